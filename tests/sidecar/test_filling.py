"""What is fetched for a restore makes its room range by range: that there is none is an error, and never a signal."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from tests.sidecar.test_fetching import FakePeers
from tests.support.fake_store import FakeStore
from tests.support.logs import JOB_UID, uid
from tests.support.stores import JobBuilder, safetensors_image

from toprope.coordinator.wire import RestoreShard
from toprope.sidecar.adapters.files import Pages
from toprope.sidecar.effects import Stage
from toprope.sidecar.memory import Memory, NoRoomError
from toprope.sidecar.staging import Stager, StagingError
from toprope.sidecar.values import Way
from toprope.store.checkpoint.manifest import Shard
from toprope.store.names import Key
from toprope.trainer_hooks.link.wire import ALL

STEP, TENSOR, RANGE = 10, 640 * 1024, 64 * 1024
STAGED = "4a" * 16


def large_image(*, step: int, rank: int, world: int, number: int, job_uid: str) -> bytes:
    header = {"format": "1", "job_uid": job_uid, "attempt": str(number), "attempt_uid": uid(number)}
    header |= {"step": str(step), "rank": str(rank), "world": str(world), "document": "__document__"}
    tensors = {"w": ("U8", [TENSOR], bytes(range(256)) * (TENSOR // 256)), "__document__": ("U8", [2], b"{}")}
    return safetensors_image(tensors, header)


IMAGE = large_image(step=STEP, rank=0, world=1, number=1, job_uid=JOB_UID)


class FillingStore(FakeStore):
    """Tells of each range that it is asked to fill."""

    def __init__(self) -> None:
        super().__init__()
        self.on_fill: Callable[[int], None] = lambda _: None

    def read(self, key: Key, *, start: int = 0, length: int | None = None, uncached: bool = False) -> bytes:
        if length is not None:
            self.on_fill(start)
        return super().read(key, start=start, length=length, uncached=uncached)

    def stream(self, key: Key, *, start: int, length: int) -> Generator[memoryview, None, None]:
        self.on_fill(start)
        yield from super().stream(key, start=start, length=length)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FillingStore:
    monkeypatch.setattr("toprope.store.digest.FILL_BYTES", RANGE)
    return FillingStore()


@pytest.fixture
def memory(small_tmpfs: Path) -> Memory:
    memory = Memory(small_tmpfs / "job", Pages(), limit_bytes=None)
    memory.make_directories()
    return memory


def shard_in(store: FillingStore) -> Shard:
    return JobBuilder(store, world=1, image=large_image).begin().put_shard(step=STEP, rank=0)


def staged(store: FillingStore, memory: Memory, shard: Shard, *tensors: str) -> bytes:
    request = Stage(
        attempt_uid=STAGED,
        source_attempt_uid=uid(1),
        step=STEP,
        shard=RestoreShard(rank=0, bytes=shard.bytes, digest=shard.digest, sources=()),
        ways=(Way(kind="object", tier="object", key=shard.index_key),),
        tensors=frozenset(tensors),
        part=1,
    )
    found = Stager(memory=memory, peers=FakePeers(), objects=store, doubt=lambda *_: None).stage(request)
    return Path(found.shard.path).read_bytes()


def taken(directory: Path) -> int:
    """Return what the files there really take."""
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


def test_the_first_byte_waits_for_no_more_room_than_its_own_range(store: FillingStore, memory: Memory) -> None:
    shard, seen = shard_in(store), list[int]()
    store.on_fill = lambda _: seen.append(taken(memory.root))
    assert staged(store, memory, shard, ALL) == IMAGE
    assert len(seen) > TENSOR // RANGE
    assert all(have <= number * RANGE + 2 * mmap.PAGESIZE for number, have in enumerate(seen, start=1)), seen


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("wanted", [ALL, "w"])
def test_room_that_goes_half_way_is_an_error_that_leaves_nothing_and_with_room_again_all_is_well(
    store: FillingStore, memory: Memory, monkeypatch: pytest.MonkeyPatch, wanted: str, *, threads: bool
) -> None:
    if threads:
        monkeypatch.setattr("toprope.store.digest.CHUNK_BYTES", RANGE)
    shard, other = shard_in(store), memory.root / "other"
    goes_at = 3 * RANGE if wanted == ALL else 1

    def fill_the_rest(start: int) -> None:
        if start >= goes_at:
            with contextlib.suppress(OSError), other.open("ab", buffering=0) as file:
                while True:
                    file.write(bytes(mmap.PAGESIZE))

    store.on_fill = fill_the_rest
    with pytest.raises(StagingError, match=r"no room to stage it: .* of memory needed, .* free in "):
        staged(store, memory, shard, wanted)
    assert other.exists()
    assert list((memory.root / "stage").iterdir()) == []
    other.unlink()
    store.on_fill = lambda _: None
    found = staged(store, memory, shard, wanted)
    assert found == IMAGE


def test_what_does_not_fit_is_refused_before_a_byte_is_asked_for(store: FillingStore, memory: Memory) -> None:
    shard, asked = shard_in(store), list[int]()
    store.on_fill = asked.append
    (memory.root / "other").write_bytes(bytes(TENSOR))
    with pytest.raises(StagingError, match="of memory needed"):
        staged(store, memory, shard, ALL)
    assert asked == []
    assert list((memory.root / "stage").iterdir()) == []


def test_a_copy_of_a_peer_needs_room_for_all_of_it_and_leaves_no_file_without(memory: Memory) -> None:
    path = memory.spare(0, 0).data
    with pytest.raises(NoRoomError):
        memory.fit(path, 4 * TENSOR)
    assert not path.exists()
    view = memory.fit(path, TENSOR)
    view[:] = bytes([7]) * TENSOR
    assert path.read_bytes() == bytes([7]) * TENSOR
