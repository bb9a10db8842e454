"""Copy: a job or a checkpoint in another store, whole or not READY, whatever stops it on the way."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.fake_store import FakeStore
from tests.support.stores import small_store

from toprope.__main__ import main
from toprope.store.errors import CorruptObjectError, StoreError, UnavailableError, UsageError
from toprope.store.log.chain import append, read_log
from toprope.store.log.records import Elected, Pin, Taint
from toprope.store.look.show import job_names, named_objects, read_job
from toprope.store.look.verify import verify_checkpoint, verify_facts
from toprope.store.names import Key
from toprope.store.objects.directory import DirectoryStore
from toprope.store.objects.opening import check_apart, open_store
from toprope.store.objects.protocol import ObjectStore
from toprope.store.transfer.copy import Copied, copy, plan


def run(source: ObjectStore, target: ObjectStore, *, step: int | None = None) -> Copied:
    log = read_job(source, "job")
    return copy(source, target, log, objects=plan(source, log, step=step), step=step)


def is_good(store: ObjectStore) -> bool:
    state = read_log(store, "job")
    damages = [one for seq in state.live for one in verify_checkpoint(store, state, seq).damages]
    return bool(state.live) and not damages and not verify_facts(store, state)


def test_a_copy_of_a_job_has_the_same_bytes_and_no_more_than_its_log_names() -> None:
    source, target = FakeStore(), FakeStore()
    small_store(source)
    source.create(Key("job/shards/a1/s000000030/rank-00000-of-00002-ab.safetensors"), b"never READY")
    done = run(source, target)
    named = {one.key: one for one in named_objects(source, read_job(source, "job"))}
    assert target.objects == {key: body for key, body in source.objects.items() if key in named}
    assert done == Copied(
        job="job",
        checkpoints=(10, 20),
        objects=len([one for one in named.values() if one.kind != "log"]),
        bytes=sum(len(source.objects[Key(key)]) for key, one in named.items() if one.kind != "log"),
        there=0,
        records=len([one for one in named.values() if one.kind == "log"]),
    )
    assert is_good(target)


def test_a_second_copy_brings_only_what_is_new() -> None:
    source, target = FakeStore(), FakeStore()
    builder = small_store(source)
    run(source, target)
    assert (run(source, target).objects, run(source, target).records) == (0, 0)
    builder.checkpoint(30)
    done = run(source, target)
    assert (done.checkpoints, done.records, done.there) == ((10, 20, 30), 1, 12)
    assert is_good(target)


class _Stops(FakeStore):
    """A store that answers no create after so many."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def create(self, key: Key, body: bytes | memoryview) -> None:
        if self.left == 0:
            raise UnavailableError(f"{key}: gone")
        self.left -= 1
        super().create(key, body)


@pytest.mark.parametrize("step", [None, 10])
def test_whatever_stops_a_copy_it_is_not_ready_before_all_is_there_and_goes_on(step: int | None) -> None:
    source = FakeStore()
    small_store(source)
    whole = FakeStore()
    run(source, whole, step=step)
    for after in range(len(whole.created)):
        target = _Stops(after)
        with pytest.raises(UnavailableError):
            run(source, target, step=step)
        state = read_log(target, "job")
        assert not state.live or is_good(target)
        has_a_record = any("/log/" in key for key in target.objects)
        assert job_names(target) == (("job",) if has_a_record else ())
        target.left = -1
        run(source, target, step=step)
        assert is_good(target)
        assert read_log(target, "job").live


def test_objects_are_there_before_the_first_record_of_the_log() -> None:
    source, target = FakeStore(), FakeStore()
    small_store(source)
    run(source, target)
    is_record = ["/log/" in key for key in target.created]
    assert is_record == sorted(is_record)


def test_one_checkpoint_is_copied_without_the_others() -> None:
    source, target = FakeStore(), FakeStore()
    builder = small_store(source, steps=(10, 20))
    builder.open_attempt(ready=builder.log.state.head, from_step=20).checkpoint(30)
    done = run(source, target, step=30)
    state = read_log(target, "job")
    assert done.checkpoints == (30,)
    assert [ready.step for ready in state.readies.values()] == [30]
    assert (state.attempt_number, state.job_uid) == (2, builder.log.state.job_uid)
    assert is_good(target)
    assert not [key for key in target.objects if "s000000010" in key or "s000000020" in key]
    again = run(source, target, step=30)
    assert (again.objects, again.records) == (0, 0)


def test_a_tainted_checkpoint_is_not_copied_by_itself() -> None:
    source = FakeStore()
    builder = small_store(source)
    builder.log.add(Taint(attempt=1, from_step=20, to_step=20, reason="loss spike"))
    with pytest.raises(UsageError, match="tainted"):
        run(source, FakeStore(), step=20)


def test_what_is_damaged_at_the_source_is_not_copied_and_neither_is_the_log() -> None:
    source = FakeStore()
    small_store(source)
    for kind in ("safetensors", "index.json", "manifests", "facts"):
        target, broken = FakeStore(), FakeStore()
        broken.objects = dict(source.objects)
        key = next(one for one in broken.objects if kind in one)
        broken.objects[key] = broken.objects[key][:-1] + b"!"
        with pytest.raises(StoreError, match=key.rpartition("/")[2]):
            run(broken, target)
        assert not job_names(target)
        assert key not in target.objects


def test_what_is_damaged_at_the_destination_is_found() -> None:
    source, target = FakeStore(), FakeStore()
    small_store(source)
    key = next(one for one in source.objects if one.endswith("safetensors"))
    target.create(key, source.objects[key][:-1] + b"!")
    with pytest.raises(CorruptObjectError, match="at the destination"):
        run(source, target)
    assert not job_names(target)


def test_another_job_of_that_name_is_left_alone() -> None:
    for step in (None, 10):
        source, target = FakeStore(), FakeStore()
        small_store(source)
        small_store(target, steps=(10,))
        state = read_log(target, "job")
        append(target, state, lambda now: Pin(seq=max(now.readies)), term=state.term, writer_id=state.writer_id)
        before = dict(target.objects)
        with pytest.raises(UsageError, match="another history"):
            run(source, target, step=step)
        assert target.objects == before


def test_a_destination_that_went_on_by_itself_keeps_what_it_has() -> None:
    source, target = FakeStore(), FakeStore()
    small_store(source)
    run(source, target)
    append(target, read_log(target, "job"), lambda _: Elected(), term=0, writer_id="another")
    before = dict(target.objects)
    assert run(source, target).records == 0
    assert target.objects == before


@pytest.mark.fault("B57")
def test_a_checkpoint_that_comes_object_by_object_is_none_until_its_record_is_there() -> None:
    source = FakeStore()
    builder = small_store(source, steps=(10,))
    ready_key = next(key for key in reversed(source.created) if "/log/" in key)
    for seed in range(5):
        keys = [key for key in source.objects if key != ready_key]
        random.Random(seed).shuffle(keys)
        target = FakeStore()
        for key in keys:
            target.create(key, source.objects[key])
            if "/log/" not in "".join(target.objects):
                assert not job_names(target)
        assert not read_log(target, "job").live
        target.create(ready_key, source.objects[ready_key])
        assert read_log(target, "job") == builder.log.state
        assert is_good(target)


def test_a_killed_copy_leaves_no_ready_checkpoint_and_goes_on(tmp_path: Path) -> None:
    source, target = tmp_path / "from", tmp_path / "to"
    source.mkdir()
    small_store(DirectoryStore(source), steps=(10, 20, 30))
    program = """
import os, sys
from toprope.store.objects.directory import DirectoryStore
from toprope.__main__ import main
left, create = int(sys.argv[3]), DirectoryStore.create
def count(self, key, body):
    global left
    left -= "/holds/" not in key
    if left == 0:
        os.kill(os.getpid(), 9)
    create(self, key, body)
DirectoryStore.create = count
sys.exit(main(["copy", sys.argv[1], sys.argv[2]]))
"""
    for left, status in ((6, 3), (9, 3), (9, 3), (6, 0)):  # among the objects, twice; in the log; after a READY
        command = [sys.executable, "-c", program, str(source), str(target), str(left)]
        done = subprocess.run(command, capture_output=True, check=False, env={**os.environ})
        assert done.returncode == -signal.SIGKILL
        assert main(["verify", str(target)]) == status
    assert main(["copy", str(source), str(target)]) == 0
    assert main(["verify", str(target)]) == 0
    assert {path.name for path in target.rglob("*") if path.is_file()} == {
        path.name for path in source.rglob("*") if path.is_file() and path.parent.name != "holds"
    }


def test_a_copy_into_a_bucket_and_back(s3_root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, back = tmp_path / "from", tmp_path / "back"
    source.mkdir()
    small_store(open_store(str(source)))
    assert main(["copy", str(source), s3_root, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoints"] == [10, 20]
    assert main(["copy", s3_root, str(back)]) == 0
    files = {str(path.relative_to(source)): path.read_bytes() for path in source.rglob("*") if path.is_file()}
    assert files == {str(path.relative_to(back)): path.read_bytes() for path in back.rglob("*") if path.is_file()}


def test_a_step_that_is_not_there_leaves_no_destination_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    small_store(DirectoryStore(source), steps=(10,))
    assert main(["copy", str(source), str(target), "--step", "15"]) == 3
    assert "no READY checkpoint of step 15" in capsys.readouterr().err
    assert not target.exists()


@pytest.mark.parametrize("target", ["store/", "store/sub", "link", "link/sub/deeper", "file"])
def test_a_store_is_not_copied_into_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str) -> None:
    root = tmp_path / "store"
    root.mkdir()
    small_store(DirectoryStore(root))
    (tmp_path / "link").symlink_to(root)
    to = f"file://{root}/sub" if target == "file" else f"{tmp_path}/{target}"
    assert main(["copy", str(root), to]) == 64
    assert f"{to}: is the store {root} or lies inside it" in capsys.readouterr().err
    assert [path.name for path in root.iterdir()] == ["job"]


def test_stores_that_lie_beside_each_other_are_apart_and_prefixes_of_a_bucket_may_lie_inside() -> None:
    apart = (("/a/stores", "/a/store"), ("s3://b/pp", "s3://b/p"), ("s3://b/p/q?x=1", "s3://b/p"), ("s3://b", "/b"))
    for target, root in apart:
        check_apart(target, root)
    for inside in (("s3://b/p/q?x=1", "s3://b/p/?x=1"), ("s3://b/p/", "s3://b/p")):
        with pytest.raises(UsageError, match="or lies inside it"):
            check_apart(*inside)
