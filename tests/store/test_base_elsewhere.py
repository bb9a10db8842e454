"""A job that starts from a checkpoint in another store: copied here, pinned here, and independent of there."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import pytest
from tests.support.fake_store import FakeStore
from tests.support.logs import LogWriter
from tests.support.stores import shard_image, small_store
from tests.support.strict_s3 import StrictS3

from toprope.coordinator.basing import base_shards, pinned_base
from toprope.store.errors import (
    CorruptObjectError,
    MissingObjectError,
    NothingToVerifyError,
    StoreError,
    UnavailableError,
    UsageError,
)
from toprope.store.log.chain import read_log
from toprope.store.log.records import Base, Elected, Job, Taint
from toprope.store.look.verify import verify_checkpoint
from toprope.store.names import Key
from toprope.store.objects.directory import DirectoryStore
from toprope.store.objects.opening import open_store
from toprope.store.objects.protocol import ObjectStore
from toprope.store.transfer.restore import restore

Kind = Literal["directory", "s3"]
UID = "0d" * 16


class Asked(DirectoryStore):
    """A store that notes what it was asked for and does not have."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.missed: list[Key] = []

    def size(self, key: Key) -> int:
        try:
            return super().size(key)
        except MissingObjectError:
            self.missed.append(key)
            raise


def root_of(kind: Kind, name: str, tmp_path: Path, strict: StrictS3) -> str:
    if kind == "s3":
        return strict.root(name)
    (tmp_path / name).mkdir()
    return str(tmp_path / name)


def at(root: str, step: int = 10, *, job: str = "job") -> str:
    """Return how the checkpoint is named on a command line."""
    path, mark, query = root.partition("?")
    return f"{path}/{job}@{step}{mark}{query}"


def based(store: ObjectStore, where: str, *, take: Literal["all", "weights"] = "all") -> Base:
    return pinned_base(store, "new", at=where, take=take, token="", into=lambda: store, say=lambda _: None)


def begin(store: ObjectStore, base: Base) -> None:
    LogWriter(store, "new").add(Job(uid=UID, name="new"), Elected(), Job(uid=UID, name="new", base=base))


def elsewhere(tmp_path: Path, *, steps: tuple[int, ...] = (10, 20)) -> tuple[Path, LogWriter]:
    root = tmp_path / "elsewhere"
    root.mkdir()
    return root, small_store(DirectoryStore(root), steps=steps).log


def contents(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("take", ["all", "weights"])
@pytest.mark.parametrize(
    ("there", "here"), [("directory", "directory"), ("directory", "s3"), ("s3", "directory"), ("s3", "s3")]
)
def test_a_base_of_another_store_is_copied_checked_and_pinned_here(
    tmp_path: Path, strict: StrictS3, there: Kind, here: Kind, take: Literal["all", "weights"]
) -> None:
    source = root_of(there, "theirs", tmp_path, strict)
    log = small_store(open_store(source, write=True), steps=(10, 20)).log
    store = open_store(root_of(here, "ours", tmp_path, strict), write=True)
    base = based(store, at(source), take=take)
    copied = read_log(store, "job")
    assert (base.job, base.job_uid, base.step, base.take) == ("job", log.state.job_uid, 10, take)
    assert base.manifest_sha256 == log.state.readies[4].manifest_sha256
    assert (copied.pins, copied.live) == (frozenset({base.seq}), (base.seq,))
    assert verify_checkpoint(store, copied, base.seq).damages == ()
    assert [shard.rank for shard in base_shards(store, base)] == [0, 1]
    assert read_log(open_store(source), "job") == log.state, "nothing is written there"
    assert list(open_store(source).list("job/holds/")) == []
    restore(store, copied, to=tmp_path / "out")
    assert [path.read_bytes() for path in sorted((tmp_path / "out").glob("*.safetensors"))] == [
        shard_image(step=10, rank=rank) for rank in (0, 1)
    ]


def test_once_it_is_recorded_the_other_store_may_be_gone(tmp_path: Path) -> None:
    root, _ = elsewhere(tmp_path)
    store = FakeStore()
    base = based(store, at(str(root)))
    begin(store, base)
    shutil.rmtree(root)
    before = dict(store.objects)
    assert based(store, at(str(root))) == base
    assert store.objects == before
    with pytest.raises(UsageError, match="starts from job@10, all"):
        based(store, at(str(root), 20))


@pytest.mark.parametrize("lost", range(0, 7, 3))
def test_a_copy_that_was_cut_off_leaves_no_checkpoint_and_is_gone_on_with(tmp_path: Path, lost: int) -> None:
    root, _ = elsewhere(tmp_path)
    store = FakeStore()
    store.faults.extend(["none"] * lost)
    store.faults.append("request lost")
    with pytest.raises(UnavailableError):
        based(store, at(str(root)))
    assert read_log(store, "job").live == ()
    first = len(store.created)
    base = based(store, at(str(root)))
    assert [shard.rank for shard in base_shards(store, base)] == [0, 1]
    assert len(store.created) == len(set(store.created)) > first


def test_a_copy_of_the_whole_job_that_is_here_is_taken_as_it_is(tmp_path: Path) -> None:
    root, log = elsewhere(tmp_path)
    store = FakeStore()
    small_store(store, steps=(10, 20, 30))
    assert read_log(store, "job").job_uid == log.state.job_uid
    before = {key: body for key, body in store.objects.items() if "/log/" not in key}
    base = based(store, at(str(root)))
    assert base.seq == 4
    assert read_log(store, "job").pins == {4}
    assert {key: body for key, body in store.objects.items() if "/log/" not in key} == before


def test_a_damaged_object_there_gives_no_base_here(tmp_path: Path) -> None:
    root, _ = elsewhere(tmp_path)
    path = next((root / "job" / "shards" / "a1" / "s000000010").glob("rank-00001*.safetensors"))
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body)
    store = FakeStore()
    with pytest.raises(CorruptObjectError, match="rank-00001"):
        based(store, at(str(root)))
    assert read_log(store, "job").n == 0
    assert read_log(store, "new").n == 0


@pytest.mark.parametrize(
    ("where", "error", "text"),
    [
        ("{root}/job@11", NothingToVerifyError, "no READY checkpoint of step 11"),
        ("{root}/job@20", UsageError, "is tainted"),
        ("{root}/other@10", UsageError, "no such job"),
        ("{root}/job@10..20", UsageError, "is not usable"),
        ("{root}/nowhere/job@10", UnavailableError, "can't be reached"),
    ],
)
def test_what_is_no_base_there_is_refused_and_nothing_changes(
    tmp_path: Path, where: str, error: type[Exception], text: str
) -> None:
    root, log = elsewhere(tmp_path)
    log.add(Taint(attempt=1, from_step=20, to_step=20, reason="bad"))
    before, store = contents(root), FakeStore()
    with pytest.raises(error, match=text):
        based(store, where.format(root=root))
    assert store.objects == {}
    assert contents(root) == before


def test_another_job_of_its_name_here_is_left_alone(tmp_path: Path) -> None:
    root, _ = elsewhere(tmp_path)
    store = FakeStore()
    LogWriter(store, "job").add(Job(uid="ee" * 16, name="job"), Elected())
    before = dict(store.objects)
    with pytest.raises(UsageError, match="there is a job of this name with another history"):
        based(store, at(str(root)))
    assert store.objects == before


def test_two_coordinators_that_copy_the_same_at_once_come_to_the_same(tmp_path: Path) -> None:
    root, _ = elsewhere(tmp_path)
    (tmp_path / "ours").mkdir()
    with ThreadPoolExecutor(2) as pool:
        ours = [DirectoryStore(tmp_path / "ours") for _ in range(2)]
        first, second = pool.map(lambda store: based(store, at(str(root))), ours)
    assert first == second
    assert read_log(ours[0], "job").pins == {first.seq}
    assert [shard.rank for shard in base_shards(ours[0], first)] == [0, 1]


def test_a_base_whose_copy_was_deleted_here_is_not_begun_from(tmp_path: Path) -> None:
    root, _ = elsewhere(tmp_path)
    store = FakeStore()
    base = based(store, at(str(root)))
    for key in [key for key in store.objects if key.endswith(".safetensors")]:
        del store.objects[Key(key)]
    with pytest.raises(StoreError, match="rank-0000"):
        base_shards(store, base)


def test_what_is_not_there_yet_is_asked_of_the_store_that_is_opened_for_the_copy(tmp_path: Path) -> None:
    root, _ = elsewhere(tmp_path)
    (tmp_path / "here").mkdir()
    patient, plain = Asked(tmp_path / "here"), Asked(tmp_path / "here")
    pinned_base(patient, "new", at=at(str(root)), take="all", token="", into=lambda: plain, say=lambda _: None)
    assert plain.missed, "shards are looked for before they are copied"
    assert not [key for key in patient.missed if "/log/" not in key]
