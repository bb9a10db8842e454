"""Which checkpoint is the newest, and what may be deleted: the log says it, and no name, time or listing does."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from dataclasses import replace
from itertools import count
from pathlib import Path

import msgspec
import pytest
from tests.support.fake_store import FakeStore
from tests.support.logs import LogWriter, uid
from tests.support.stores import JobBuilder, safetensors_image, shard_image, small_store
from tests.support.strict_s3 import Stored, StrictS3

from toprope.__main__ import main
from toprope.coordinator.config import Config
from toprope.coordinator.settings import Address
from toprope.coordinator.wire import Cadence
from toprope.store.errors import UsageError
from toprope.store.keep.changes import append_in_passing
from toprope.store.keep.gc import execute, survey
from toprope.store.keep.purging import delete
from toprope.store.keep.retention import make_retire
from toprope.store.log.chain import read_log
from toprope.store.log.fold import JobState
from toprope.store.log.records import Pin, Ready, Record, Retire
from toprope.store.look.show import checkpoint_lines, named_objects, read_job
from toprope.store.look.usage import usage
from toprope.store.look.verify import verify_checkpoint
from toprope.store.names import Key
from toprope.store.objects.directory import DirectoryStore
from toprope.store.objects.opening import open_store
from toprope.store.transfer.restore import plan

MANY = 1205
NOW_S = 1_800_000_000


def ckpt(*words: object) -> int:
    return main([str(word) for word in words])


def newest(root: Path, to: Path, capsys: pytest.CaptureFixture[str]) -> int:
    """Restore the newest checkpoint, see that its bytes are those of its step, and return that."""
    capsys.readouterr()
    assert ckpt("restore", root, "--to", to, "--json") == 0
    step: int = json.loads(capsys.readouterr().out)["step"]
    shards = sorted(to.glob("*.safetensors"))
    assert [one.read_bytes() for one in shards] == [
        shard_image(step=step, rank=rank, world=len(shards)) for rank in range(len(shards))
    ]
    return step


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.fault("B50")
def test_what_never_became_ready_is_not_restored_and_is_told_of_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    store = DirectoryStore(root)
    builder = JobBuilder(store, world=4).begin()
    builder.checkpoint(10)
    builder.checkpoint(20)
    for rank in range(3):
        builder.put_shard(step=30, rank=rank)
    (root / "job" / "shards" / "a1" / "s000000040").mkdir()
    store.create(Key("job/shards/step-50.bak"), b"by hand")
    before = contents(root)
    capsys.readouterr()
    assert ckpt("restore", root, "--to", tmp_path / "out") == 0
    out, err = capsys.readouterr()
    assert "restored step 20 of job job" in out
    assert [line for line in err.splitlines() if "no checkpoint" in line] == [
        "no checkpoint: job/shards/step-50.bak: no object of a checkpoint has such a name",
        "no checkpoint: step 30 of attempt 1: not READY, 3 of 4 ranks have stored it",
        "no checkpoint: job/shards/a1/s000000040: an empty folder",
    ]
    assert contents(root) == before
    assert (root / "job" / "shards" / "a1" / "s000000040").is_dir()
    assert newest(root, tmp_path / "again", capsys) == 20
    (job,) = usage(store).jobs
    told = [*job.orphans.keys, *job.unknown.keys]
    assert len([key for key in told if "s000000030" in key]) == 6, "three shards, three indexes"
    assert told.count(Key("job/shards/step-50.bak")) == 1
    assert len(told) == 7, "an empty folder is no object, and holds nothing that could be told of"


@pytest.mark.fault("B75")
@pytest.mark.parametrize("renamed", [False, True], ids=["removed", "renamed"])
@pytest.mark.parametrize("kind", ["all", "shards", "manifests"])
def test_a_pinned_step_that_was_removed_by_hand_costs_one_warning_and_its_pin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, *, renamed: bool
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    builder = small_store(DirectoryStore(root), steps=(10, 20, 30, 40))
    builder.log.add(Pin(seq=6))
    for lies in ("shards/a1/s000000030", "manifests/a1-s000000030*"):
        if kind in {"all", lies.partition("/")[0]}:
            (found,) = (root / "job").glob(lies)
            found.rename(found.with_name(f"{found.name}.old") if renamed else tmp_path / found.name)
    builder.checkpoint(50)
    assert newest(root, tmp_path / "out", capsys) == 50
    before = contents(root)
    assert ckpt("gc", root, "--retain", "last=1", "--dry-run") == 0
    assert_one_warning(capsys.readouterr().err, "would be")
    assert contents(root) == before
    assert ckpt("gc", root, "--retain", "last=1") == 0
    assert_one_warning(capsys.readouterr().err, "is")
    state = read_log(builder.store, "job")
    assert (state.pins, [state.readies[seq].step for seq in state.live]) == (frozenset(), [40, 50])
    assert {name: contents(root)[name] for name in before if ".old" in name} == {
        name: body for name, body in before.items() if ".old" in name
    }, "what was renamed is somebody else's"
    assert newest(root, tmp_path / "again", capsys) == 50
    assert ckpt("gc", root, "--retain", "last=1") == 0
    assert "step 30" not in capsys.readouterr().err
    assert ckpt("verify", root) == 0


def assert_one_warning(told: str, how: str) -> None:
    (line,) = [line for line in told.splitlines() if "by hand" in line]
    assert f"job job: step 30 (READY 6, pinned) was removed from the store by hand: it {how} unpinned" in line


@pytest.mark.parametrize("lost", ["one index", "one shard", "the manifest of head"])
def test_what_is_damaged_or_needed_is_not_let_go_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lost: str
) -> None:
    """A pin is lifted only from what can't come back; where in doubt, nothing changes."""
    root = tmp_path / "root"
    root.mkdir()
    builder = small_store(DirectoryStore(root), steps=(10, 20, 30, 40))
    builder.log.add(Pin(seq=6))
    paths = {
        "one index": "shards/a1/s000000030/rank-00000*.index.json",
        "one shard": "shards/a1/s000000030/rank-00000*.safetensors",
        "the manifest of head": "manifests/a1-s000000040*",
    }
    (found,) = (root / "job").glob(paths[lost])
    found.unlink()
    log = read_log(builder.store, "job")
    assert ckpt("gc", root, "--retain", "last=2") == (0 if lost == "one shard" else 2)
    after = read_log(builder.store, "job")
    assert (after.pins, 6 in after.live, 7 in after.live) == (log.pins, True, True)
    assert "by hand" not in capsys.readouterr().err


class Clocked(LogWriter):
    """Writes the time of its clock into each READY."""

    at_s = NOW_S

    def add(self, *records: Record) -> int:
        timed = [msgspec.structs.replace(one, at_s=self.at_s) if isinstance(one, Ready) else one for one in records]
        return super().add(*timed)


@pytest.mark.fault("B64")
def test_the_newest_is_that_of_the_log_whatever_the_times_of_files_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    builder = JobBuilder(DirectoryStore(root))
    builder.log = clock = Clocked(builder.store)
    builder.begin().checkpoint(10)
    clock.at_s -= 3600  # it was set back
    builder.checkpoint(20)
    for path in root.rglob("*"):
        os.utime(path, (2_000_000_000 - 10 * ("s000000020" in str(path)),) * 2)  # step 10 touched last
    assert newest(root, tmp_path / "touched", capsys) == 20
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    assert newest(copy, tmp_path / "copied", capsys) == 20
    (twins := tmp_path / "twins").mkdir()
    small_store(DirectoryStore(twins), steps=(10, 20))  # within one second
    assert newest(twins, tmp_path / "of-twins", capsys) == 20


@pytest.mark.fault("B60")
def test_what_a_writer_left_half_done_blocks_no_step_and_only_a_dead_ones_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    builder = JobBuilder(DirectoryStore(root)).begin()
    folder = root / "job" / "shards" / "a1" / "s000000300"
    folder.mkdir(parents=True)
    (folder / ".tmp-dead").write_bytes(b"half a shard")
    with (folder / ".tmp-alive").open("wb") as living:
        fcntl.flock(living, fcntl.LOCK_SH)
        builder.checkpoint(300)
        assert ckpt("gc", root) == 0
        assert sorted(path.name for path in folder.glob(".tmp-*")) == [".tmp-alive"]
    assert newest(root, tmp_path / "out", capsys) == 300


@pytest.mark.parametrize("skew_s", [7200, -7200, None], ids=["ahead", "behind", "jumping"])
def test_no_clock_decides_what_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skew_s: int | None) -> None:
    """What is on its way stays, old orphans go: whatever the wall clock and the times of the files say."""
    store = DirectoryStore(tmp_path)
    builder = small_store(store, steps=(10, 20, 30))
    builder.put_shard(step=25, rank=0)  # never became READY, and can't any more
    builder.put_shard(step=40, rank=0)  # in flight
    calls = count()
    monkeypatch.setattr("time.time", lambda: NOW_S + (next(calls) * 5000 % 20000 if skew_s is None else skew_s))
    for number, path in enumerate(sorted(tmp_path.rglob("*"))):
        os.utime(path, (NOW_S + (-1) ** number * 90 * 86400,) * 2)

    def retire(state: JobState) -> Record | None:
        return make_retire(replace(state, retain="last=1"))

    append_in_passing(store, "job", retire, purpose="test")
    plan = survey(store, read_log(store, "job"))
    execute(store, plan)
    left = {path.name for path in (tmp_path / "job" / "shards" / "a1").iterdir()}
    assert left == {"s000000020", "s000000030", "s000000040"}, "head, its parent, and what is in flight"
    for seq in read_log(store, "job").live:
        assert verify_checkpoint(store, read_log(store, "job"), seq).damages == ()


ODD = [
    "p" * 300,
    ".".join(["deeply nested"] * 80)[:1000],
    "model.[v2] (a+b)#1 é/*?",
    "trailing dot.",
    "trailing space ",
    "Twin",
    "twin",
]


def odd_image(*, step: int, rank: int, world: int, number: int, job_uid: str) -> bytes:
    header = {"job_uid": job_uid, "attempt": str(number), "attempt_uid": uid(number), "step": str(step)}
    header |= {"format": "1", "rank": str(rank), "world": str(world), "document": "__document__"}
    tensors = {name: ("U8", [3], bytes([at, rank, step])) for at, name in enumerate(ODD)}
    return safetensors_image({**tensors, "__document__": ("U8", [2], b"{}")}, header)


@pytest.mark.fault("B87")
@pytest.mark.parametrize(
    "job", ["exp [v2] (a+b)#1 é", "a/b", "..", "a+b", "a#b", "nul\0", "Upper", "x" * 65, "dot ", ""]
)
def test_a_job_of_an_odd_name_is_refused_before_anything_is_made_of_it(
    tmp_path: Path, job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """So it never gets into a topic or a key, and cuts off nobody."""
    listen = Address(host="127.0.0.1", port=0)
    cadence = Cadence(from_step=0, every=1, local_every=1, object_every=1)
    with pytest.raises(UsageError, match="job"):
        Config(
            job=job,
            store=str(tmp_path),
            listen=listen,
            broker=None,
            embedded_broker=None,
            cadence=cadence,
            token="",
            ready_file=None,
        )
    assert ckpt("show", tmp_path, "--job", job) == 64
    assert job[:20].strip("\0") in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault("B87")
def test_parameters_of_odd_and_long_names_go_through_the_whole_cycle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    builder = JobBuilder(DirectoryStore(root), image=odd_image).begin()
    for step in (1, 2, 3):
        builder.checkpoint(step)
    assert ckpt("show", root, "--step", "3", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert {tensor["name"] for tensor in shown["indexes"][0]["tensors"]} == {*ODD, "__document__"}
    assert ckpt("gc", root, "--retain", "last=1") == 0
    assert ckpt("verify", root) == 0
    assert ckpt("restore", root, "--to", tmp_path / "out") == 0
    (first, _) = sorted((tmp_path / "out").glob("*.safetensors"))
    uid_of_job = read_log(builder.store, "job").job_uid
    assert first.read_bytes() == odd_image(step=3, rank=0, world=2, number=1, job_uid=uid_of_job)


@pytest.mark.long
@pytest.mark.fault("B120")
def test_all_of_1205_shards_are_listed_verified_and_deleted() -> None:
    builder = JobBuilder(FakeStore(), world=MANY).begin()
    for step in (10, 20, 30):
        builder.checkpoint(step)
    store, state = builder.store, builder.log.state
    assert isinstance(store, FakeStore)
    named = [one.key for one in named_objects(store, read_job(store, "job"))]
    assert sorted(named) == sorted(store.objects)
    assert len(named) == 3 * (2 * MANY + 1) + 9, "with the log and the facts"
    newest_seq = plan(state)[0]
    assert verify_checkpoint(store, state, newest_seq).damages == ()
    last = next(key for key in store.objects if f"s000000030/rank-{MANY - 1:05d}" in key and key.endswith("json"))
    body = store.objects.pop(last)
    assert [damage.rank for damage in verify_checkpoint(store, state, newest_seq).damages] == [MANY - 1]
    store.objects[last] = body
    builder.log.add(Retire(seqs=(min(state.readies),)))
    condemned = survey(store, builder.log.state)
    assert len(condemned.condemned) == 2 * MANY + 1
    execute(store, condemned)
    assert [key for key in store.objects if "s000000010" in key] == []
    assert len(store.objects) == 2 * (2 * MANY + 1) + 10


@pytest.mark.long
@pytest.mark.fault("B120")
def test_all_of_1300_steps_are_listed_and_all_but_the_newest_deleted() -> None:
    builder = JobBuilder(FakeStore(), world=1).begin()
    for step in range(1, 1301):
        builder.checkpoint(step)
    store = builder.store
    assert isinstance(store, FakeStore)
    state = read_log(store, "job")
    assert [line.step for line in checkpoint_lines(state)] == list(range(1, 1301))
    assert state.readies[plan(state)[0]].step == 1300
    append_in_passing(store, "job", lambda now: make_retire(replace(now, retain="last=1")), purpose="test")
    execute(store, survey(store, read_log(store, "job")))
    assert {key.split("/")[3] for key in store.objects if "/shards/" in key} == {"s000001299", "s000001300"}
    after = read_log(store, "job")
    assert [verify_checkpoint(store, after, seq).damages for seq in after.live] == [(), ()]


@pytest.mark.fault("B120")
def test_a_bucket_lists_and_deletes_more_than_a_call_takes(strict: StrictS3) -> None:
    """A thousand at a time is all that the server lists, and it refuses to delete more."""
    store = open_store(strict.root("team"))
    for number in range(MANY):
        strict.objects[f"team/job/shards/{number:05d}"] = Stored(body=b"x", etag='"0"', metadata={})
    keys = tuple(store.list("job/"))
    assert keys == tuple(f"job/shards/{number:05d}" for number in range(MANY))
    delete(store, keys)
    assert strict.objects == {}
    store.delete(keys)
