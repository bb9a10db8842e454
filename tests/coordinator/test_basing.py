"""A job that starts from a checkpoint of another: recorded, pinned there, the oldest step of its lineage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import msgspec
import pytest
from tests.coordinator.test_sweep import config
from tests.support.fake_store import FakeStore
from tests.support.logs import SPEC, LogWriter, attempt, uid
from tests.support.reigns import LAUNCH, Reign, digest
from tests.support.stores import small_store

from toprope.coordinator import runtime
from toprope.coordinator.basing import base_shards, make_base, pinned_base
from toprope.coordinator.wire import BaseView, OpenAnswer
from toprope.store.errors import NoStoreError, NothingToVerifyError, StoreError, UsageError
from toprope.store.keep.changes import checked
from toprope.store.keep.gc import survey
from toprope.store.log.chain import read_log
from toprope.store.log.fold import JobState, violation
from toprope.store.log.records import Base, Elected, Held, Job, Record, Retire, Taint
from toprope.store.log.snap import decode, encode
from toprope.store.names import Key, snap_key

OTHER, THIRD = "2b" * 16, "3c" * 16
TAKES: list[Literal["all", "weights"]] = ["all", "weights"]
BASE = Base(
    job="big",
    job_uid="0c" * 16,
    seq=4,
    attempt_uid="ba" * 16,
    step=12000,
    world=2,
    manifest_sha256="3a" * 32,
    take="all",
)


def based(take: Literal["all", "weights"], damage: str = "") -> Reign:
    """Return a reign over two nodes of a job that starts from two ranks of another."""
    reign = Reign(base=msgspec.structs.replace(BASE, take=take), base_damage=damage)
    reign.node("a")
    reign.node("b")
    return reign


def legal(state: JobState, record: Record) -> str | None:
    """Return what is wrong with the record once its envelope is that of the current writer."""
    envelope = {"term": state.term, "writer_id": state.writer_id, "nonce": "0" * 32, "prev": state.tail_sha256}
    return violation(state, msgspec.structs.replace(record, **envelope))


def opened(reign: Reign, launch_id: str = LAUNCH, round_number: int = 0) -> OpenAnswer:
    answer = reign.ask("a", "b", launch_id=launch_id, round_number=round_number)
    assert answer is not None
    return answer


@pytest.mark.parametrize(("take", "from_step"), [("all", 12000), ("weights", 0)])
def test_the_first_attempt_begins_from_the_base_out_of_the_object_store(
    take: Literal["all", "weights"], from_step: int
) -> None:
    view = opened(based(take)).attempt
    assert view is not None
    assert (view.source, view.from_step) == ("base", from_step)
    assert view.base == BaseView(job_uid=BASE.job_uid, step=12000, weights_only=take == "weights")
    assert [(shard.digest, [one.key for one in shard.sources]) for shard in view.restore] == [
        (digest(BASE.attempt_uid, 12000, rank), [f"other/rank-{rank}.index"]) for rank in (0, 1)
    ]


@pytest.mark.parametrize("take", TAKES)
def test_steps_of_the_job_itself_come_before_its_base_whatever_their_number(take: Literal["all", "weights"]) -> None:
    reign = based(take)
    first = opened(reign).attempt
    assert first is not None
    reign.verdict("staged")
    reign.verdict("applied")
    reign.hold(first.from_step + 2, tiers=("memory", "peer"))
    reign.end_trainers()
    second = opened(reign, OTHER).attempt
    assert second is not None
    assert (second.source, second.from_step) == ("held", first.from_step + 2)
    assert second.base is None


@pytest.mark.parametrize("take", TAKES)
def test_without_a_step_of_its_own_each_attempt_begins_from_the_base_again(take: Literal["all", "weights"]) -> None:
    reign = based(take)
    opened(reign)
    reign.end_trainers()
    after = reign.successor()
    after.hear()
    again = opened(after, OTHER).attempt
    assert again is not None
    assert (again.number, again.source) == (2, "base")


def test_a_base_that_can_not_be_had_stops_the_job_and_is_never_a_fresh_start() -> None:
    answer = opened(based("all", damage="the base big@12000 is gone"))
    assert answer.code == "nothing-left"
    assert "the base big@12000 is gone" in answer.text


def test_a_base_that_ranks_could_not_take_is_struck_off_and_the_job_stops() -> None:
    reign = based("all")
    opened(reign)
    reign.verdict("staged", ranks=(0,), ok=False, reason="digest")
    answer = opened(reign, round_number=1)
    assert answer.code == "nothing-left"
    assert "struck off before" in answer.text


def test_a_checkpoint_of_the_new_job_has_no_parent_and_then_it_is_what_is_begun_from() -> None:
    reign = based("weights")
    opened(reign)
    reign.verdict("staged")
    reign.verdict("applied")
    reign.hold(8, tiers=("memory", "object"))
    reign.read_back()
    assert reign.ready_steps == [8]
    (ready,) = reign.state.readies.values()
    assert ready.parent is None
    reign.end_trainers()
    for node in reign.nodes.values():
        node.copies.clear()
    reign.hear()
    after = opened(reign, OTHER).attempt
    assert after is not None
    assert (after.source, after.from_step) == ("ready", 8)


def test_a_fold_of_the_log_and_the_collector_know_of_the_base() -> None:
    reign = based("all")
    opened(reign)
    body = encode(reign.state)
    assert decode(body, key=snap_key("job", reign.state.n), job="job").base == reign.base
    assert survey(reign.store, reign.state).condemned == ()


# --- pinning it in its own job


def pinned(store: FakeStore, at: str = "job@10", *, job: str = "new", take: Literal["all", "weights"] = "all") -> Base:
    return pinned_base(store, job, at=at, take=take, token="", into=lambda: store, say=lambda _: None)


def begun(store: FakeStore, base: Base) -> JobState:
    """Found the new job with this base."""
    log = LogWriter(store, "new")
    log.add(Job(uid="0d" * 16, name="new"), Elected(), Job(uid="0d" * 16, name="new", base=base))
    return log.state


@pytest.mark.parametrize("take", TAKES)
def test_a_base_is_pinned_where_it_is_and_names_its_manifest(take: Literal["all", "weights"]) -> None:
    store = FakeStore()
    log = small_store(store).log
    base = pinned(store, take=take)
    assert read_log(store, "job").pins == {base.seq}
    assert base == Base(
        job="job",
        job_uid=log.state.job_uid,
        seq=4,
        attempt_uid=uid(1),
        step=10,
        world=2,
        manifest_sha256=log.state.readies[4].manifest_sha256,
        take=take,
    )
    assert [shard.rank for shard in base_shards(store, base)] == [0, 1]


def test_the_same_base_given_again_changes_nothing() -> None:
    store = FakeStore()
    small_store(store)
    base = pinned(store)
    state = begun(store, base)
    assert state.base == base
    before = dict(store.objects)
    assert pinned(store) == base
    assert make_base(state, base=base) is None
    assert store.objects == before


@pytest.mark.parametrize(
    ("at", "job", "error", "text"),
    [
        ("job@11", "new", NothingToVerifyError, "no READY checkpoint of step 11"),
        ("job@10", "job", UsageError, "job job has begun without it"),
        ("other@10", "new", UsageError, "no such job"),
        ("job@10..20", "new", UsageError, "is a range"),
        ("job@20", "new", UsageError, "is tainted"),
        ("job@20", "based", UsageError, "starts from job@10, all"),
    ],
)
def test_a_base_that_can_not_be_one_is_refused_and_nothing_changes(
    at: str, job: str, error: type[Exception], text: str
) -> None:
    store = FakeStore()
    small_store(store).log.add(Taint(attempt=1, from_step=20, to_step=20, reason="bad"))
    log = LogWriter(store, "based")
    log.add(Job(uid="0d" * 16, name="based"), Elected())
    log.add(Job(uid="0d" * 16, name="based", base=pinned(store, job="based")))
    before = dict(store.objects)
    with pytest.raises(error, match=text):
        pinned(store, at, job=job)
    assert store.objects == before


SPOILT: dict[str, Callable[[Base], Base]] = {
    "job": lambda base: msgspec.structs.replace(base, job="gone"),
    "uid": lambda base: msgspec.structs.replace(base, job_uid="ee" * 16),
    "manifest": lambda base: msgspec.structs.replace(base, manifest_sha256="ee" * 32),
    "seq": lambda base: msgspec.structs.replace(base, seq=99),
}


@pytest.mark.parametrize("what", SPOILT)
def test_only_the_checkpoint_that_was_recorded_is_read(what: str) -> None:
    store = FakeStore()
    small_store(store)
    with pytest.raises(StoreError, match="is gone"):
        base_shards(store, SPOILT[what](pinned(store)))


def test_a_base_that_is_tainted_later_or_loses_a_file_is_not_begun_from() -> None:
    store = FakeStore()
    log = small_store(store, steps=(10,)).log
    base = pinned(store)
    (lost,) = [key for key in store.objects if "rank-00001" in key and key.endswith(".safetensors")]
    body = store.objects.pop(lost)
    with pytest.raises(StoreError, match="rank-00001"):
        base_shards(store, base)
    store.objects[lost] = body
    log.state = read_log(store, "job")
    log.add(Elected())
    log.add(Taint(attempt=1, from_step=10, to_step=10, reason="bad"))
    with pytest.raises(StoreError, match="was tainted in its own job"):
        base_shards(store, base)


def test_a_policy_of_its_own_job_keeps_the_base() -> None:
    store = FakeStore()
    small_store(store, steps=(10, 20, 30, 40))
    base = pinned(store)
    with pytest.raises(UsageError, match="pinned"):
        checked(read_log(store, "job"), Retire(seqs=(base.seq,)))


def test_nobody_can_ask_a_coordinator_to_set_a_base() -> None:
    state = small_store(FakeStore()).log.state
    for more in ({}, {"retain": "last=1"}, {"spec_sha256": "5e" * 32}):
        change = msgspec.structs.replace(Job(uid=state.job_uid, name="job", base=BASE), **more)
        with pytest.raises(UsageError, match="a base is set when a job begins"):
            checked(state, change)


def test_the_base_is_set_once_before_the_first_attempt_and_is_of_another_job() -> None:
    store = FakeStore()
    small_store(store)
    state = begun(store, pinned(store))
    record = Job(uid="0d" * 16, name="new", base=msgspec.structs.replace(BASE, job_uid="0d" * 16))
    assert legal(state, record) == "a base is set already"
    unset = replace(state, base=None)
    assert legal(unset, record) == "its base is of the job itself"
    assert legal(read_log(store, "job"), Job(uid="0b" * 16, name="job", base=BASE)) == (
        "it sets a base after the first attempt"
    )
    fresh = replace(state, spec_sha256=SPEC)
    assert legal(fresh, attempt(1)) == "a fresh start although the job has a base"
    held = Held(attempt_uid=uid(1), step=10)
    assert legal(fresh, attempt(1, held=held, from_step=10)) is None
    assert legal(fresh, attempt(1, held=held, from_step=0)) == "from_step 0 is not that of the base, 10"


class RefusingStore(FakeStore):
    """Refuses all reads."""

    def read(self, key: Key, *, start: int = 0, length: int | None = None, uncached: bool = False) -> bytes:
        raise NoStoreError(f"{key}: refused")


async def test_a_coordinator_waits_for_a_store_that_is_away_when_it_pins_the_base(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "_OPEN_AGAIN_S", 0.001)
    store, stop = FakeStore(), asyncio.Event()
    small_store(store)
    wanted = replace(config("unused"), job="new", base="job@10")
    store.reads_lost = 3
    base = await runtime._base(wanted, store, stop)
    assert (base is not None and base.step, store.reads_lost) == (10, 0)
    assert [record.message.partition(": ")[0] for record in caplog.records if record.levelname == "ERROR"] == [
        "waits for the object store, and serves nobody before"
    ], "said once"
    store.reads_lost = 10**9
    asyncio.get_running_loop().call_soon(stop.set)
    assert await runtime._base(wanted, store, stop) is None
    with pytest.raises(NoStoreError):
        await runtime._base(wanted, RefusingStore(), asyncio.Event())
