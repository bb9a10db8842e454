"""Restore to disk: what it writes, what it passes over, and that a directory appears whole or not at all."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open
from tests.support.fake_store import FakeStore
from tests.support.stores import JobBuilder, shard_image, small_store

from toprope.store.errors import CkptError, NothingToVerifyError, StoreError, UnavailableError, UsageError
from toprope.store.keep.gc import execute, survey
from toprope.store.log.chain import read_log
from toprope.store.log.records import Retire, Taint
from toprope.store.names import Key
from toprope.store.transfer.partial import restore_part
from toprope.store.transfer.restore import plan, restore


def spoil(store: FakeStore, *parts: str) -> None:
    for key in [key for key in store.objects if all(part in key for part in parts)]:
        body = store.objects[key]
        store.objects[key] = body[:-5] + bytes([body[-5] ^ 4]) + body[-4:]


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_the_newest_ready_is_written_as_plain_files(tmp_path: Path) -> None:
    store = FakeStore()
    small_store(store, steps=(10, 20))
    done = restore(store, read_log(store, "job"), to=tmp_path / "out")
    assert (done.step, done.seq, done.passed_over) == (20, 5, ())
    assert list(done.files) == names_in(tmp_path / "out")
    assert list(done.files) == ["manifest.json", "rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors"]
    for rank in (0, 1):
        path = tmp_path / "out" / f"rank-0000{rank}-of-00002.safetensors"
        assert path.read_bytes() == shard_image(step=20, rank=rank)
        with safe_open(path, framework="np") as opened:
            assert opened.get_tensor("model.weight")[0, 0] == 20 + rank
    assert names_in(tmp_path) == ["out"]


@pytest.mark.parametrize("parts", [("rank-00001", ".safetensors"), ("rank-00000", ".index.json"), ("manifests",)])
def test_when_one_is_damaged_the_next_older_is_used_and_it_says_why(tmp_path: Path, parts: tuple[str, ...]) -> None:
    store = FakeStore()
    small_store(store, steps=(10, 20, 30))
    spoil(store, "s000000030", *parts)
    done = restore(store, read_log(store, "job"), to=tmp_path / "out")
    assert done.step == 20
    ((step, damages),) = [(one.step, one.damages) for one in done.passed_over]
    assert step == 30
    assert all(part in damages[0].key for part in parts)
    assert names_in(tmp_path) == ["out"]


def test_any_flipped_byte_of_the_newest_makes_restore_use_the_older(memory_dir: Path) -> None:
    store = FakeStore()
    small_store(store, steps=(10, 20))
    state = read_log(store, "job")
    for key in [key for key in store.objects if "s000000020" in key]:
        good = store.objects[key]
        for at in range(0, len(good), 37):
            store.objects[key] = good[:at] + bytes([good[at] ^ (1 << at % 8)]) + good[at + 1 :]
            done = restore(store, state, to=memory_dir / "out", force=True)
            assert (done.step, done.passed_over[0].damages[0].key) == (10, key), at
        store.objects[key] = good


@pytest.mark.parametrize("force", [False, True])
def test_a_kill_at_any_point_leaves_the_directory_whole_or_absent(memory_dir: Path, *, force: bool) -> None:
    store = FakeStore()
    small_store(store, steps=(10, 20))
    state = read_log(store, "job")
    statuses = []
    for number in range(100):
        out = memory_dir / str(number) / "out"
        out.parent.mkdir()
        if force:
            restore(store, state, to=out, step=10)
        statuses.append(_restore_and_die_at(number, lambda: restore(store, state, to=out, force=force)))  # noqa: B023 - runs at once
        if out.exists():
            step = 20 if (out / "rank-00000-of-00002.safetensors").read_bytes() == shard_image(step=20, rank=0) else 10
            for rank in (0, 1):
                assert (out / f"rank-0000{rank}-of-00002.safetensors").read_bytes() == shard_image(step=step, rank=rank)
            assert (out / "manifest.json").exists()
        if statuses[-1] == 0:
            break
    assert statuses[-1] == 0, "the restore never came to its end"
    assert len(statuses) > 10


def _restore_and_die_at(number: int, run: Callable[[], object]) -> int:
    """Run in a child process that dies at call ``number`` of fsync, mkdir, open or rename; return its exit status."""
    child = os.fork()
    if child == 0:
        calls = itertools.count()

        def dying(function: Callable[..., object]) -> Callable[..., object]:
            def call(*args: object, **kwargs: object) -> object:
                if next(calls) == number:
                    os._exit(9)
                return function(*args, **kwargs)

            return call

        for owner, name in ((os, "fsync"), (Path, "mkdir"), (Path, "open"), (Path, "rename")):
            setattr(owner, name, dying(getattr(owner, name)))
        try:
            run()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_when_all_are_damaged_nothing_is_written(tmp_path: Path) -> None:
    store = FakeStore()
    small_store(store, steps=(10, 20))
    spoil(store, "rank-00001", ".safetensors")
    with pytest.raises(StoreError, match=r"(?s)nothing was written.*step 20, rank 1.*step 10, rank 1"):
        restore(store, read_log(store, "job"), to=tmp_path / "out")
    assert names_in(tmp_path) == []


def test_a_step_that_was_asked_for_is_never_replaced_by_another(tmp_path: Path) -> None:
    store = FakeStore()
    small_store(store, steps=(10, 20))
    assert restore(store, read_log(store, "job"), to=tmp_path / "out", step=10).step == 10
    spoil(store, "s000000020", "manifests")
    with pytest.raises(StoreError, match="step 20"):
        restore(store, read_log(store, "job"), to=tmp_path / "other", step=20)
    with pytest.raises(NothingToVerifyError, match=r"there are steps \[10, 20\]"):
        restore(store, read_log(store, "job"), to=tmp_path / "other", step=15)
    assert names_in(tmp_path) == ["out"]


def test_the_plan_follows_the_lineage_and_leaves_out_what_is_tainted() -> None:
    builder = small_store(FakeStore(), steps=(10, 20, 30))
    assert plan(builder.log.state) == (6, 5, 4)
    builder.open_attempt(ready=5, from_step=20).checkpoint(25)
    assert plan(builder.log.state) == (8, 5, 4)
    builder.log.add(Taint(attempt=1, from_step=15, to_step=None, reason="NaN"))
    assert plan(builder.log.state) == (8, 4)
    assert plan(builder.log.state, step=30) == (6,)
    with pytest.raises(NothingToVerifyError, match="no READY checkpoint yet"):
        plan(JobBuilder(FakeStore()).begin().log.state)
    for number, begin, end in ((2, 0, None), (1, 0, 9), (1, 10, 14)):
        builder.log.add(Taint(attempt=number, from_step=begin, to_step=end, reason="x"))
    with pytest.raises(NothingToVerifyError, match="retired or tainted"):
        plan(builder.log.state)


def test_what_is_there_is_never_overwritten_without_force(tmp_path: Path) -> None:
    store = FakeStore()
    small_store(store, steps=(10, 20))
    state = read_log(store, "job")
    out = tmp_path / "out"
    out.mkdir()
    restore(store, state, to=out, step=10)
    with pytest.raises(UsageError, match="--force"):
        restore(store, state, to=out)
    assert (out / "rank-00000-of-00002.safetensors").read_bytes() == shard_image(step=10, rank=0)
    assert restore(store, state, to=out, force=True).step == 20
    assert (out / "rank-00000-of-00002.safetensors").read_bytes() == shard_image(step=20, rank=0)
    assert names_in(tmp_path) == ["out"]


def test_force_replaces_only_what_a_restore_wrote(tmp_path: Path) -> None:
    store = FakeStore()
    small_store(store, steps=(10,))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "home")
    for name in ("home", "file", "link", "missing/out"):
        with pytest.raises(UsageError):
            restore(store, read_log(store, "job"), to=tmp_path / name, force=True)
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years"
    assert names_in(tmp_path) == ["file", "home", "link"]


@pytest.mark.parametrize("part_first", [True, False])
def test_force_replaces_a_part_by_a_checkpoint_and_the_other_way_round(tmp_path: Path, *, part_first: bool) -> None:
    store = FakeStore()
    small_store(store)
    state, to = read_log(store, "job"), tmp_path / "out"

    def part(*, force: bool) -> None:
        restore_part(store, state, to=to, only=["model.*"], force=force)
        assert "PARTIAL.json" in names_in(to)
        assert "manifest.json" not in names_in(to)

    def whole(*, force: bool) -> None:
        restore(store, state, to=to, force=force)
        assert "PARTIAL.json" not in names_in(to)
        assert "manifest.json" in names_in(to)

    first, second = (part, whole) if part_first else (whole, part)
    first(force=False)
    second(force=True)
    assert names_in(tmp_path) == ["out"]


@pytest.mark.fault("B81")
def test_a_damaged_restore_by_force_leaves_the_old_one(tmp_path: Path) -> None:
    store = FakeStore()
    small_store(store, steps=(10,))
    state = read_log(store, "job")
    restore(store, state, to=tmp_path / "out")
    before = names_in(tmp_path / "out")
    spoil(store, "rank-00001", ".safetensors")
    with pytest.raises(StoreError):
        restore(store, state, to=tmp_path / "out", force=True)
    assert names_in(tmp_path / "out") == before
    assert names_in(tmp_path) == ["out"]


def test_too_little_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore()
    small_store(store, steps=(10,))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 99, 1))
    with pytest.raises(CkptError, match="needs 1134 bytes, but 1 are free"):
        restore(store, read_log(store, "job"), to=tmp_path / "out")
    assert names_in(tmp_path) == []


def test_a_directory_that_cannot_be_written_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore()
    small_store(store, steps=(10,))

    def fail(_: int) -> None:
        raise OSError(28, "")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CkptError, match="can't be written: No space left on device"):
        restore(store, read_log(store, "job"), to=tmp_path / "out")
    assert names_in(tmp_path) == []


def test_a_store_that_stops_answering_leaves_nothing_behind(tmp_path: Path) -> None:
    class Silent(FakeStore):
        def read(self, key: Key, *, start: int = 0, length: int | None = None, uncached: bool = False) -> bytes:
            if "rank-00001" in key:
                raise UnavailableError(f"{key}: no answer")
            return super().read(key, start=start, length=length, uncached=uncached)

    store = Silent()
    small_store(store, steps=(10,))
    state = read_log(store, "job")
    with pytest.raises(UnavailableError):
        restore(store, state, to=tmp_path / "out")
    assert names_in(tmp_path) == []


class WithoutHolds(FakeStore):
    """Readers may not write here."""

    def create(self, key: Key, body: bytes | memoryview) -> None:
        if "/holds/" in key:
            raise UnavailableError(f"{key}: access denied")
        super().create(key, body)


@pytest.mark.fault("B76")
@pytest.mark.parametrize("kind", [FakeStore, WithoutHolds])
def test_a_restore_whose_step_is_retired_meanwhile_finishes_or_begins_anew(
    tmp_path: Path, kind: type[FakeStore], caplog: pytest.LogCaptureFixture
) -> None:
    """With a hold it finishes; without one it fails whole and takes the newest that is there by then."""
    store = kind()
    job = small_store(store, steps=(10,))
    state, read, moved = read_log(store, "job"), store.read, [False]

    def read_slowly(key: Key, *, start: int = 0, length: int | None = None, uncached: bool = False) -> bytes:
        body = read(key, start=start, length=length, uncached=uncached)
        if "rank-00000" in key and key.endswith(".safetensors") and not moved[0]:
            moved[0] = True
            for step in (20, 30, 40):
                job.checkpoint(step)
            job.log.add(Retire(seqs=(4,)))
            execute(store, survey(store, job.log.state))
        return body

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "read", read_slowly)
        done = restore(store, state, to=tmp_path / "out")
    if kind is FakeStore:
        assert (done.step, done.passed_over) == (10, ())
        for rank in (0, 1):
            path = tmp_path / "out" / f"rank-0000{rank}-of-00002.safetensors"
            assert path.read_bytes() == shard_image(step=10, rank=rank)
    else:
        assert (done.step, [one.step for one in done.passed_over]) == (40, [10])
        assert "reading without a hold on READY 4" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not [key for key in store.objects if "/holds/" in key]
    execute(store, survey(store, job.log.state))
    assert not [key for key in store.objects if "s000000010" in key]
