"""Files of the memory and the local tier: room, order of writes, what a crash leaves, what is believed at start."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path

import pytest
import xxhash
from tests.support.scripted_trainer import image

from toprope.coordinator.wire import ReadBackTask
from toprope.sidecar.adapters.files import Disk, Pages
from toprope.sidecar.budget import Room, measure, needed_bytes, why_too_little
from toprope.sidecar.directories import lock_directory
from toprope.sidecar.effects import DropLocal
from toprope.sidecar.events import LocalStored, StoreFailed
from toprope.sidecar.local_tier import LocalError, LocalTier
from toprope.sidecar.memory import DroppedError, Memory, NoRoomError, boot_id, used_bytes
from toprope.sidecar.object_tier import DamagedError, ObjectTier, read_back
from toprope.sidecar.ports import SyncError
from toprope.sidecar.tier_book import TierBook
from toprope.sidecar.values import Shard
from toprope.store.errors import UsageError
from toprope.store.objects.opening import open_store
from toprope.trainer_hooks.link.slot import Page, SlotState, read_page, write_page

UID = "1a" * 16


def made_image(*, step: int = 1, rank: int = 0, job_uid: str = "0b" * 16) -> bytes:
    return image(attempt=1, attempt_uid=UID, step=step, rank=rank, world=2, payload=4096, job_uid=job_uid)


def made_shard(body: bytes, *, step: int = 1) -> Shard:
    digest = xxhash.xxh3_128(body).hexdigest()
    return Shard(attempt=1, step=step, attempt_uid=UID, rank=0, world=2, bytes=len(body), digest=digest)


def sealed_slot(memory: Memory, body: bytes, *, seq: int = 1, step: int = 1, rank: int = 0) -> None:
    """Write an image into slot 0 of rank 0 as a trainer does."""
    memory.make_slots(0, (0,), len(body) + 100)
    memory.view(memory.slot(0, 0).data)[: len(body)] = body
    page = Page(
        state=SlotState.SEALED, seq=seq, rank=rank, world=2, attempt=1, attempt_uid=UID, step=step, bytes=len(body)
    )
    write_page(memory.slot(0, 0).page, page)


def memory_in(directory: Path, *, limit_bytes: int | None = None, job_uid: str = "") -> Memory:
    memory = Memory(directory / "job", Pages(), limit_bytes=limit_bytes, job_uid=lambda: job_uid)
    memory.make_directories()
    return memory


@pytest.fixture
def memory(memory_dir: Path) -> Memory:
    return memory_in(memory_dir, job_uid="0b" * 16)


# Memory


def test_slots_are_private_files_of_exactly_the_size_with_an_empty_page(memory: Memory) -> None:
    memory.make_slots(0, (0, 1, 2), 12345)
    for sight in memory.look(0):
        assert (sight.capacity, sight.page.state, sight.lock_held) == (12345, SlotState.EMPTY, False)
        for path in (memory.slot(0, sight.slot).data, memory.slot(0, sight.slot).page, memory.slot(0, sight.slot).lock):
            assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("lost", ["data", "page", "lock"])
def test_a_slot_that_a_kill_left_half_made_is_made_anew(memory: Memory, lost: str) -> None:
    memory.make_slots(0, (0,), 100)
    getattr(memory.slot(0, 0), lost).unlink()
    assert memory.look(0) == ()
    memory.make_slots(0, (0, 1, 2), 200)
    assert [sight.capacity for sight in memory.look(0)] == [200, 200, 200]


def test_a_whole_slot_is_never_made_again(memory: Memory) -> None:
    body = made_image()
    sealed_slot(memory, body)
    with pytest.raises(FileExistsError):
        memory.make_slots(0, (0, 1), 100)
    assert memory.hash_slot(0, 0, seq=1) == made_shard(body)


def test_hashing_writes_the_digest_into_the_page(memory: Memory) -> None:
    body = made_image()
    sealed_slot(memory, body)
    assert memory.hash_slot(0, 0, seq=1) == made_shard(body)
    page = read_page(memory.slot(0, 0).page)
    assert (page.state, page.digest) == (SlotState.HASHED, made_shard(body).digest)
    assert memory.check_slot(0, 0, seq=1, digest=page.digest) == made_shard(body)


def test_a_slot_is_dropped_when_page_header_or_digest_are_not_as_they_should_be(memory: Memory) -> None:
    body = made_image()
    sealed_slot(memory, body)
    with pytest.raises(DroppedError, match="expected SEALED of seq 2"):
        memory.hash_slot(0, 0, seq=2)
    memory.hash_slot(0, 0, seq=1)
    memory.view(memory.slot(0, 0).data)[2000] ^= 1
    with pytest.raises(DroppedError, match="when it was hashed"):
        memory.check_slot(0, 0, seq=1, digest=made_shard(body).digest)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (made_image(step=2), "header says step 2; expected 1"),
        (made_image(rank=1), "header says rank 1; expected 0"),
        (made_image(job_uid="ff"), "header says job ff"),
        (b"\xff" * 500, "not a shard image"),
    ],
)
def test_an_image_of_another_snapshot_is_dropped(memory: Memory, body: bytes, text: str) -> None:
    sealed_slot(memory, body)
    with pytest.raises(DroppedError, match=text):
        memory.hash_slot(0, 0, seq=1)


class RewrittenPages(Pages):
    """The trainer writes on: each look at the page finds a later one."""

    def read(self, path: Path) -> Page:
        page = super().read(path)
        write_page(path, Page(state=SlotState.WRITING, seq=page.seq + 1))
        return page


def test_a_slot_that_is_written_to_while_it_is_hashed_is_dropped(memory: Memory, memory_dir: Path) -> None:
    sealed_slot(memory, made_image())
    again = Memory(memory_dir / "job", RewrittenPages(), limit_bytes=None)
    with pytest.raises(DroppedError, match="written to while it was hashed"):
        again.hash_slot(0, 0, seq=1)
    assert read_page(memory.slot(0, 0).page).state is SlotState.WRITING


def test_a_limit_is_kept_and_nothing_is_left_of_slots_that_do_not_fit(memory_dir: Path) -> None:
    memory = memory_in(memory_dir, limit_bytes=250)
    memory.make_slots(0, (0, 1), 100)
    with pytest.raises(NoRoomError, match="--memory 250 leaves 50"):
        memory.make_slots(0, (2,), 100)
    assert len(memory.look(0)) == 2


def test_a_full_tmpfs_is_an_error_with_both_numbers_and_no_signal(small_tmpfs: Path) -> None:
    memory = memory_in(small_tmpfs)
    with pytest.raises(NoRoomError, match=r"3.00 MiB .* of memory needed, 1.00 MiB .* free in .*--shm-size"):
        memory.make_slots(0, (0, 1, 2), 1 << 20)
    assert memory.look(0) == ()
    memory.make_slots(0, (0,), 1 << 18)


def test_room_that_goes_while_slots_are_made_leaves_no_half_slot(
    small_tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = memory_in(small_tmpfs)
    monkeypatch.setattr(Memory, "_check_room", lambda *_args, **_kwargs: None)
    with pytest.raises(NoRoomError):
        memory.make_slots(0, (0, 1, 2), 1 << 19)
    assert memory.look(0) == ()
    assert used_bytes(memory.root) == 0


def test_the_boot_id_is_drawn_once(memory_dir: Path) -> None:
    first = boot_id(memory_dir)
    assert len(first) == 32
    assert boot_id(memory_dir) == first
    assert sorted(path.name for path in memory_dir.iterdir()) == ["boot_id"]


def test_a_directory_has_one_sidecar(memory_dir: Path) -> None:
    held = lock_directory(memory_dir, option="--memory-dir")
    with pytest.raises(UsageError, match=rf"another sidecar .* serves {memory_dir}: .* its own --memory-dir"):
        lock_directory(memory_dir, option="--memory-dir")
    os.close(held)
    os.close(lock_directory(memory_dir, option="--memory-dir"))


def test_a_mapped_file_that_was_removed_stays_readable(memory: Memory) -> None:
    memory.make_slots(0, (0,), mmap.PAGESIZE)
    view = memory.view(memory.slot(0, 0).data)
    memory.remove_slots(0, (0,))
    assert view[0] == 0


# Budget


def test_what_is_needed_counts_slots_and_peer_copies() -> None:
    assert needed_bytes(state_size=10, ranks=2, copies=1) == 100
    assert needed_bytes(state_size=10, ranks=2, copies=0) == 60


def test_too_little_room_names_the_least_and_a_container_is_recognised() -> None:
    room = Room(
        directory=Path("/dev/shm"),
        directory_total=64 << 20,
        directory_free=60 << 20,
        cgroup_free=1 << 40,
        machine_free=1 << 40,
    )
    assert why_too_little(room, 1 << 20, what="it") is None
    text = why_too_little(room, 100 << 20, what="it")
    assert text is not None
    assert "100.0 MiB (104857600 bytes) of memory needed" in text
    assert "60.0 MiB" in text
    assert "free in /dev/shm" in text
    assert "--shm-size" in text


def test_the_limit_of_a_cgroup_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("800\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 100\n")
    assert measure(tmp_path, cgroup=tmp_path).cgroup_free == 300
    (tmp_path / "memory.max").write_text("max\n")
    assert measure(tmp_path, cgroup=tmp_path).cgroup_free > 1 << 50


# The local tier


class RecordingDisk(Disk):
    """Remembers the order of calls; fails where it is told to."""

    def __init__(self, *fail: str, error: OSError | None = None) -> None:
        self.calls: list[str] = []
        self.fail = list(fail)
        self.error = error or SyncError(errno.EIO, "Input/output error")

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if self.fail and call.startswith(self.fail[0]):
            self.fail.pop(0)
            raise self.error

    def write(self, path: Path, body: memoryview) -> None:
        self._note(f"write {kind(path)}")
        super().write(path, body)

    def rename(self, old: Path, new: Path) -> None:
        self._note(f"rename {kind(old)} {kind(new)}")
        super().rename(old, new)

    def sync_directory(self, path: Path) -> None:
        self._note("sync directory")
        super().sync_directory(path)


def kind(path: Path) -> str:
    return "tmp" if path.name.startswith("tmp.") else path.suffix.removeprefix(".")


def stored(directory: Path, disk: Disk, *, step: int = 1) -> tuple[Shard, Path]:
    body = made_image(step=step)
    shard = made_shard(body, step=step)
    return shard, LocalTier(directory, disk).store(shard, memoryview(body), nonces=(f"a{step}", f"b{step}"))


def test_data_is_durable_under_its_name_before_its_receipt_is(tmp_path: Path) -> None:
    disk = RecordingDisk()
    stored(tmp_path, disk)
    assert disk.calls == [
        *("write tmp", "rename tmp safetensors", "sync directory"),
        *("write tmp", "rename tmp receipt", "sync directory"),
    ]


def test_a_failed_sync_is_followed_by_one_write_to_a_new_file(tmp_path: Path) -> None:
    _, path = stored(tmp_path, RecordingDisk("write tmp"))
    assert path.name == "a1-s1-rank-0-of-2-b1.safetensors"
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("tmp.")] == []


def test_a_second_failed_sync_gives_the_disk_up(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="failed twice") as caught:
        stored(tmp_path, RecordingDisk("write tmp", "write tmp"))
    assert caught.value.quarantine


def test_a_full_disk_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(LocalError, match="No space left") as caught:
        stored(tmp_path, RecordingDisk("write tmp", error=full))
    assert not caught.value.quarantine
    assert caught.value.no_room
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault("B74")
def test_a_local_tier_that_is_full_makes_room_by_itself_and_keeps_its_newest_step(small_tmpfs: Path) -> None:
    tier, book = LocalTier(small_tmpfs, Disk()), TierBook()

    def store(step: int) -> None:
        body = image(attempt=1, attempt_uid=UID, step=step, rank=0, world=2, payload=200_000, job_uid="0b" * 16)
        shard = made_shard(body, step=step)
        try:
            path = tier.store(shard, memoryview(body), nonces=(f"a{step}", f"b{step}"))
        except LocalError as error:
            failed = StoreFailed(tier="local", shard=shard, slot=0, reason=str(error), no_room=error.no_room)
            book.on_failed(failed, now_s=0.0)
        else:
            book.on_local(LocalStored(shard=shard, path=str(path), slot=0))

    def steps() -> list[int]:
        return [found[0].step for found in tier.scan() if not isinstance(found, str)]

    for step in (1, 2, 3):
        store(step)
    (small_tmpfs / "somebody's").write_bytes(bytes(os.statvfs(small_tmpfs).f_bavail * os.statvfs(small_tmpfs).f_bsize))
    assert os.statvfs(small_tmpfs).f_bavail == 0
    store(4)
    assert steps() == [1, 2, 3]
    for effect in book.retire_local(kept=frozenset()):
        assert isinstance(effect, DropLocal)
        tier.drop(Path(effect.path))
    assert steps() == [3]
    store(4)
    assert steps() == [3, 4]


def test_a_source_that_changed_while_it_was_written_is_not_kept(tmp_path: Path) -> None:
    body = made_image()
    shard = made_shard(body + b"x")
    with pytest.raises(LocalError) as caught:
        LocalTier(tmp_path, Disk()).store(shard, memoryview(body), nonces=("a", "b"))
    assert caught.value.damaged
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_removes_what_a_crash_left_and_nothing_else(tmp_path: Path) -> None:
    shard, path = stored(tmp_path, Disk())
    _, without = stored(tmp_path, Disk(), step=5)
    Path(f"{without}.receipt").unlink()
    (tmp_path / "tmp.dead").write_bytes(b"half")
    (tmp_path / "notes.txt").write_bytes(b"the user's")
    LocalTier(tmp_path, Disk()).sweep()
    assert {left.name for left in tmp_path.iterdir()} == {path.name, f"{path.name}.receipt", "notes.txt"}
    assert list(LocalTier(tmp_path, Disk()).scan()) == [(shard, path, "0b" * 16)]


def test_a_scan_lists_what_receipt_and_digest_vouch_for(tmp_path: Path) -> None:
    shard, path = stored(tmp_path, Disk())
    _, flipped = stored(tmp_path, Disk(), step=2)
    _, short = stored(tmp_path, Disk(), step=3)
    _, bad_receipt = stored(tmp_path, Disk(), step=4)
    _, without = stored(tmp_path, Disk(), step=5)
    raw = bytearray(flipped.read_bytes())
    raw[2000] ^= 1
    flipped.write_bytes(raw)
    os.truncate(short, 100)
    receipt = Path(f"{bad_receipt}.receipt")
    receipt.write_bytes(receipt.read_bytes().replace(b'"step": 4', b'"step": 6'))
    Path(f"{without}.receipt").unlink()
    found = list(LocalTier(tmp_path, Disk()).scan())
    assert [item for item in found if not isinstance(item, str)] == [(shard, path, "0b" * 16)]
    lines = [item for item in found if isinstance(item, str)]
    assert len(lines) == 3
    for text in ("its digest is", "it has 100 bytes", "its receipt is damaged"):
        assert any(text in line for line in lines)


# Locks and objects


def test_a_slot_whose_lock_another_process_holds_is_not_lent(memory: Memory) -> None:
    memory.make_slots(0, (0,), 100)
    paths = memory.slot(0, 0)
    write_page(paths.page, Page(launch_id="old"))
    ready, hold = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        fcntl.lockf(os.open(paths.lock, os.O_RDWR), fcntl.LOCK_EX)
        os.write(ready[1], b"x")
        os.read(hold[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    granted = Page(seq=1, launch_id="new")
    assert memory.lend(0, granted, check_lock=True) == "old"
    assert read_page(paths.page).launch_id == "old"
    os.write(hold[1], b"x")
    os.waitpid(child, 0)
    for end in (*ready, *hold):
        os.close(end)
    assert memory.lend(0, granted, check_lock=True) is None
    assert read_page(paths.page) == granted


def test_an_image_that_is_not_the_one_that_was_hashed_is_not_put_into_the_store(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"), write=True)
    body = made_image()
    with pytest.raises(DamagedError):
        ObjectTier(store, "job").put(made_shard(body + b"x"), memoryview(body), nonce="ab")
    assert list(store.list("job/")) == []
    receipt = ObjectTier(store, "job").put(made_shard(body), memoryview(body), nonce="ab")
    assert sorted(store.list("job/")) == sorted([receipt.key, receipt.index_key])


def test_an_object_is_read_back_with_what_was_found(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"), write=True)
    body = made_image()
    receipt = ObjectTier(store, "job").put(made_shard(body), memoryview(body), nonce="ab")
    task = ReadBackTask(node="a", key=receipt.key, bytes=receipt.stored_bytes, digest=receipt.stored_digest)
    assert read_back(store, task).ok
    with (tmp_path / "store" / receipt.key).open("r+b") as file:
        file.seek(2000)
        file.write(b"\xff\xfe")
    assert not read_back(store, task).ok
    (tmp_path / "store" / receipt.key).unlink()
    gone = read_back(store, task)
    assert not gone.ok
    assert receipt.key in gone.found
