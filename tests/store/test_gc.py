"""Garbage collection: what it takes, what it must leave, and that it may die or wake up late at any point."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
from msgspec.structs import replace
from tests.support.fake_store import FakeStore
from tests.support.logs import LogWriter, attempt, ready, uid
from tests.support.stores import JobBuilder, small_store

from toprope.store.checkpoint.manifest import Index, decode, sha256
from toprope.store.errors import MissingObjectError, StoreError, UnavailableError
from toprope.store.keep.gc import GcPlan, execute, is_dead, survey
from toprope.store.keep.holds import HoldWatch, holding
from toprope.store.keep.retention import parse_policy, plan_retention
from toprope.store.log.chain import read_log
from toprope.store.log.fold import JobState
from toprope.store.log.records import Elected, Held, Pin, Record, Retire, Struck, Taint
from toprope.store.look.verify import verify_checkpoint
from toprope.store.names import Key, hold_key, holds_prefix, snap_key, snaps_prefix
from toprope.store.objects.protocol import ObjectStore
from toprope.store.transfer.restore import plan as plan_restore

CRASH = UnavailableError("killed")


class CrashingStore(FakeStore):
    """Dies at call number ``dies_at``, before or after it has done what was asked."""

    def __init__(self, *, dies_at: int, after: bool = False) -> None:
        super().__init__()
        self.dies_at = dies_at
        self.after = after
        self.calls = 0

    def delete(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self.calls += 1
            if self.calls == self.dies_at and not self.after:
                raise CRASH
            super().delete([key])
            if self.calls == self.dies_at:
                raise CRASH


def collect(store: ObjectStore, state: JobState | None = None) -> GcPlan:
    plan = survey(store, state or read_log(store, "job"))
    execute(store, plan)
    return plan


def verified(store: ObjectStore) -> list[int]:
    """Verify each checkpoint that is live, and return the steps."""
    state = read_log(store, "job")
    for seq in state.live:
        assert verify_checkpoint(store, state, seq).damages == ()
    return [state.readies[seq].step for seq in state.live]


def objects_under(store: FakeStore, prefix: str) -> list[Key]:
    return [key for key in store.list("job/") if prefix in key]


def retired_job(store: FakeStore) -> JobBuilder:
    """Steps 10 to 40, of which 10 and 20 are retired."""
    job = small_store(store, steps=(10, 20, 30, 40))
    job.log.add(Retire(seqs=(4, 5)))
    return job


def test_what_is_retired_goes_and_all_else_stays() -> None:
    store = FakeStore()
    retired_job(store)
    before = set(store.objects)
    plan = collect(store)
    gone = before - set(store.objects)
    assert gone == {one.key for one in plan.condemned}
    assert {key.partition("s0000000")[2][:2] for key in gone} == {"10", "20"}
    assert len(gone) == 2 * (2 * 2 + 1)
    assert verified(store) == [30, 40]
    assert {one.why for one in plan.condemned} == {"READY 4 is retired", "READY 5 is retired"}
    assert collect(store).condemned == ()


def test_shards_go_before_the_manifest_that_tells_of_them() -> None:
    store = FakeStore()
    retired_job(store)
    kinds = ["manifest" if "/manifests/" in one.key else "shard" for one in collect(store).condemned]
    assert kinds == ["shard"] * 8 + ["manifest"] * 2


def test_orphans_go_once_their_attempt_is_over_or_has_passed_their_step() -> None:
    store = FakeStore()
    job = small_store(store, steps=(10, 20))
    for step in (15, 25):
        job.put_shard(step=step, rank=0)
    assert {key[:22] for key in [one.key for one in collect(store).condemned]} == {"job/shards/a1/s0000000"}
    assert len(objects_under(store, "s000000015")) == 0
    assert len(objects_under(store, "s000000025")) == 2, "step 25 is on its way to READY"
    job.open_attempt(ready=5, from_step=20)
    assert {one.why for one in collect(store).condemned} == {"no checkpoint names it, and its attempt is over"}
    assert len(objects_under(store, "s000000025")) == 0
    assert verified(store) == [10, 20]


def test_what_is_named_otherwise_is_nobodys_to_delete() -> None:
    store = FakeStore()
    retired_job(store)
    strange = ["shards/handpicked", "shards/a1/s000000010/notes.txt", "manifests/a1-s000000010.json", "other/a1/x"]
    for name in strange:
        store.objects[Key(f"job/{name}")] = b""
    collect(store)
    assert all(f"job/{name}" in store.objects for name in strange)


def test_the_log_and_the_facts_are_never_deleted() -> None:
    store = FakeStore()
    retired_job(store)
    before = objects_under(store, "/log/") + objects_under(store, "/facts/")
    collect(store)
    assert objects_under(store, "/log/") + objects_under(store, "/facts/") == before


def test_of_the_folds_of_the_log_the_newest_stays() -> None:
    store = FakeStore()
    small_store(store)
    for number in (2, 4, 5):
        store.objects[snap_key("job", number)] = b""
    collect(store)
    assert objects_under(store, "/snap/") == [snap_key("job", 5)]


def test_the_source_of_the_current_attempt_stays_though_it_is_not_ready() -> None:
    store = FakeStore()
    job = small_store(store, steps=(10,))
    for rank in range(2):
        job.put_shard(step=20, rank=rank)
    job.open_attempt(held=Held(attempt_uid=uid(1), step=20), from_step=20)
    collect(store)
    assert len(objects_under(store, "s000000020")) == 4
    job.checkpoint(30)
    job.open_attempt(ready=job.log.state.head, from_step=30)
    collect(store)
    assert len(objects_under(store, "s000000020")) == 0


def test_a_step_that_the_next_attempt_may_go_back_to_stays_until_a_later_one_is_ready() -> None:
    store = FakeStore()
    job = small_store(store, steps=(10,))
    for step in (12, 15, 18):
        job.put_shard(step=step, rank=0)
    job.open_attempt(held=Held(attempt_uid=uid(1), step=15), from_step=15)
    collect(store)
    assert len(objects_under(store, "s000000012")) == len(objects_under(store, "s000000015")) == 2
    assert objects_under(store, "s000000018") == [], "step 18 is not on the lineage any more"
    strike = Struck(attempt_uid=uid(1), step=15, why="damaged")
    job.open_attempt(held=Held(attempt_uid=uid(1), step=12), from_step=12, struck=(strike,))
    collect(store)
    assert len(objects_under(store, "s000000012")) == 2
    assert objects_under(store, "s000000015") == []
    job.checkpoint(20)
    job.open_attempt(ready=job.log.state.head, from_step=20)
    collect(store)
    assert objects_under(store, "s000000012") == []
    assert verified(store) == [10, 20]


def test_what_a_step_names_that_the_next_attempt_may_go_back_to_stays_too() -> None:
    store = FakeStore()
    job = small_store(store, steps=(10, 15, 18))
    key = next(key for key in objects_under(store, "s000000010/rank-00001") if key.endswith(".json"))
    older = decode(store.read(key), Index, key=key, expected_sha256=sha256(store.read(key))).files[0]
    for rank in range(2):
        job.put_shard(step=20, rank=rank, change=lambda one: replace(one, files=(*one.files, older)))
        job.put_shard(step=22, rank=rank)
    job.open_attempt(held=Held(attempt_uid=uid(1), step=22), from_step=22)
    job.log.add(Retire(seqs=(4,)))
    collect(store)
    assert objects_under(store, "s000000010") == [older.key]
    assert len(objects_under(store, "s000000020")) == 4


def test_a_tainted_step_is_none_that_an_attempt_may_go_back_to() -> None:
    store = FakeStore()
    job = small_store(store, steps=(10,))
    for step in (12, 15):
        job.put_shard(step=step, rank=0)
    job.open_attempt(held=Held(attempt_uid=uid(1), step=15), from_step=15)
    job.log.add(Taint(attempt=1, from_step=12, to_step=12, reason="loss"))
    collect(store)
    assert objects_under(store, "s000000012") == []
    assert len(objects_under(store, "s000000015")) == 2


def test_what_is_dead_stays_dead_whatever_comes_next() -> None:
    for seed in range(30):
        rng, log = random.Random(seed), LogWriter(FakeStore()).begin()
        log.add(attempt(1), ready(2, parent=None))
        dead: set[tuple[int, int]] = set()
        for _ in range(14):
            log.add(next_record(log.state, rng))
            now = {at for at in SOME_STEPS if is_dead(log.state, attempt=at[0], step=at[1])}
            assert dead <= now, f"seed {seed}: {sorted(dead - now)} came back to life"
            dead = now
        assert set() < dead < SOME_STEPS


SOME_STEPS = {(attempt, step) for attempt in range(1, 18) for step in range(1, 30)}


def next_record(state: JobState, rng: random.Random) -> Record:
    """Return a record that may come next: READY, a taint, or an attempt from READY or from any step of the lineage."""
    number, restorable = state.attempt_number + 1, state.restorable()
    held = [
        Held(attempt_uid=stretch.attempt_uid, step=step)
        for stretch in state.lineage()
        for step in range(stretch.after + 1, min(29, stretch.upto or state.last_step + 4) + 1)
        if not state.is_tainted(attempt=int(stretch.attempt_uid, 16), step=step)
        and (stretch.attempt_uid, step) not in state.struck
    ]
    what = rng.choice(("ready", "held", "held", "taint", "back"))
    if what == "held" and held:
        source, tried = rng.choice(held), rng.choice(held)
        struck = (Struck(attempt_uid=tried.attempt_uid, step=tried.step, why="damaged"),) if tried != source else ()
        return attempt(number, held=source, from_step=source.step, struck=struck)
    if what == "taint" and len(restorable) > 1:
        newest = restorable[0][1]
        return Taint(attempt=newest.attempt, from_step=newest.step, to_step=newest.step, reason="loss")
    good = [(seq, one) for seq, one in restorable if (one.attempt_uid, one.step) not in state.struck]
    if what == "back" and good:
        seq, one = rng.choice(good)
        return attempt(number, ready=seq, from_step=one.step)
    return ready(state.last_step + 1, number=state.attempt_number, parent=state.head)


def test_what_a_source_names_stays_though_its_index_came_after_the_job_was_listed() -> None:
    store = FakeStore()
    job = small_store(store, steps=(10, 15, 18))
    body = store.read(Key(job.put_shard(step=17, rank=1).index_key))
    older = decode(body, Index, key="", expected_sha256=sha256(body)).files[0]
    job.log.add(Retire(seqs=(4,)))

    class OpensMeanwhile(FakeStore):
        def list(self, prefix: str) -> Iterator[Key]:
            yield from tuple(super().list(prefix))
            if prefix == snaps_prefix("job"):
                for rank in range(2):
                    job.put_shard(step=20, rank=rank, change=lambda one: replace(one, files=(*one.files, older)))
                job.open_attempt(held=Held(attempt_uid=uid(1), step=20), from_step=20)

    meanwhile = OpensMeanwhile()
    meanwhile.objects = store.objects
    plan = collect(meanwhile, job.log.state)
    assert any(one.why == "READY 4 is retired" for one in plan.condemned)
    assert Key(older.key) in store.objects


@pytest.mark.parametrize("kind", ["/manifests/a1-s000000030", "s000000030/rank-00001-of-00002-"])
@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_with_one_unreadable_manifest_or_index_nothing_is_deleted(kind: str, damage: str) -> None:
    store = FakeStore()
    retired_job(store)
    key = next(key for key in objects_under(store, kind) if key.endswith(".json"))
    if damage == "missing":
        del store.objects[key]
    else:
        store.objects[key] = store.objects[key][:-1] + b" "
    before = dict(store.objects)
    with pytest.raises(StoreError, match=r"Nothing was deleted, since what step 30 of job job names is not known"):
        collect(store)
    assert store.objects == before


@pytest.mark.fault("B73")
@pytest.mark.parametrize("after", [False, True])
def test_a_collector_may_die_at_each_deletion(*, after: bool) -> None:
    dies_at, died = 0, True
    while died:
        dies_at += 1
        store = CrashingStore(dies_at=dies_at, after=after)
        retired_job(store)
        try:
            collect(store)
            died = False
        except UnavailableError:
            died = True
        assert verified(store) == [30, 40]
        collect(store)
        assert objects_under(store, "s000000010") == objects_under(store, "s000000020") == []
        assert verified(store) == [30, 40]
    assert dies_at == 11


def test_a_collector_that_wakes_up_late_deletes_only_what_was_condemned() -> None:
    store = FakeStore()
    job = retired_job(store)
    late = survey(store, job.log.state)
    job.log.add(Elected())
    job.open_attempt(ready=job.log.state.head, from_step=40)
    for step in (45, 50, 60):
        job.checkpoint(step)
    job.log.add(Retire(seqs=(6,)))
    collect(store)
    execute(store, late)
    assert verified(store) == [40, 45, 50, 60]


def test_what_is_retired_while_the_collector_lists_stays_for_this_time() -> None:
    store = FakeStore()
    job = small_store(store, steps=(10, 20, 30, 40))

    def list_holds() -> tuple[Key, ...]:
        holds = tuple(store.list(holds_prefix("job")))  # none yet: a reader comes only now, and step 10 is not retired
        job.log.add(Retire(seqs=(4,)))
        return holds

    assert survey(store, job.log.state, list_holds=list_holds).condemned == ()
    assert len(collect(store).condemned) == 5


def test_a_pinned_checkpoint_is_not_retired_and_so_stays() -> None:
    store = FakeStore()
    job = small_store(store, steps=(10, 20, 30))
    job.log.add(Pin(seq=4))
    collect(store)
    assert verified(store) == [10, 20, 30]


@pytest.mark.fault("B63")
def test_newest_and_kept_are_by_number_and_a_stray_is_left_alone() -> None:
    store = FakeStore()
    job = small_store(store, steps=(8, 9, 10, 99999, 100000, 1000000))
    stray = Key("job/shards/a1/handpicked")
    store.objects[stray] = b"mine"
    assert job.log.state.readies[plan_restore(job.log.state)[0]].step == 1000000
    plan = plan_retention(job.log.state, parse_policy("last=3"))
    job.log.add(Retire(seqs=tuple(verdict.seq for verdict in plan.retired)))
    collect(store)
    assert verified(store) == [99999, 100000, 1000000]
    assert store.objects[stray] == b"mine"
    assert not any(f"s{step:09d}" in key for step in (8, 9, 10) for key in store.objects)


@pytest.mark.fault("B57")
@pytest.mark.parametrize("seed", range(8))
def test_a_copy_that_arrives_in_any_order_is_never_taken_for_garbage(seed: int) -> None:
    source, target = FakeStore(), FakeStore()
    job = small_store(source, steps=(10, 20))
    job.open_attempt(ready=5, from_step=20).checkpoint(30)
    keys = sorted(source.objects)
    random.Random(seed).shuffle(keys)
    for arrived, key in enumerate(keys, start=1):
        with contextlib.suppress(StoreError):
            collect(target)
        target.create(key, source.objects[key])
        assert set(target.objects) == set(keys[:arrived])
    assert verified(target) == [10, 20, 30]


# --- holds


def test_what_a_reader_holds_stays_until_it_is_done() -> None:
    store = FakeStore()
    job = small_store(store, steps=(10, 20, 30, 40))
    with holding(store, job.log.state, 4) as state:
        assert state == job.log.state
        job.log.add(Retire(seqs=(4, 5)))
        plan = collect(store)
        assert plan.held == (4,)
        assert len(objects_under(store, "s000000010")) == 5
        assert len(objects_under(store, "s000000020")) == 0
    assert objects_under(store, "/holds/") == []
    collect(store)
    assert len(objects_under(store, "s000000010")) == 0


def test_a_reader_that_comes_after_the_retirement_is_told_so() -> None:
    store = FakeStore()
    job = small_store(store, steps=(10, 20, 30, 40))
    before = job.log.state
    job.log.add(Retire(seqs=(4,)))
    with holding(store, before, 4) as state:
        assert 4 in state.retired


def test_a_hold_on_what_is_gone_hinders_nobody() -> None:
    store = FakeStore()
    job = retired_job(store)
    collect(store)
    store.objects[hold_key("job", seq=4, hold_id="ab", beat=0)] = b""
    store.objects[Key("job/holds/strange")] = b""
    job.put_shard(step=15, rank=0)
    assert len(collect(store).condemned) == 2


def test_the_reader_of_a_hold_that_went_stale_finds_objects_missing_and_no_wrong_ones() -> None:
    store = FakeStore()
    job = small_store(store, steps=(10, 20, 30, 40))
    watch = HoldWatch(ttl_s=300)
    with holding(store, job.log.state, 4):
        job.log.add(Retire(seqs=(4,)))
        for at_s in (0.0, 400.0):
            look = partial(watch.look, store, "job", now_s=partial(float, at_s))
            execute(store, survey(store, read_log(store, "job"), list_holds=look))
        (damage,) = verify_checkpoint(store, job.log.state, 4).damages
        assert "manifests/a1-s000000010" in damage.key
    with pytest.raises(MissingObjectError):
        store.read(Key(damage.key))
