"""Indexes are read before their step is committed, as receipts come in; what is READY rests on each all the same."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from msgspec import structs
from tests.support.fake_store import FakeStore
from tests.support.receipts import receipts_of
from tests.support.reigns import copy_of
from tests.support.stores import JobBuilder, adapter_image

from toprope.coordinator.adapters.objects import ThreadedStore
from toprope.coordinator.commits import AHEAD_AT_ONCE, Commits
from toprope.coordinator.committing import Committer
from toprope.coordinator.effects import Commit, ReadAhead
from toprope.coordinator.index_checks import Expected
from toprope.coordinator.intents import CommitStep, ReadIndexes
from toprope.coordinator.log import Log
from toprope.coordinator.wire import Inventory
from toprope.store.checkpoint.manifest import Index
from toprope.store.errors import CorruptObjectError, UnavailableError
from toprope.store.log.records import Attempt
from toprope.store.names import Key

WORLD = 4


class Counting(ThreadedStore):
    """A store that counts how often each index is read; ``away`` lets no read be answered."""

    def __init__(self, store: FakeStore) -> None:
        super().__init__(store)
        self.reads: Counter[Key] = Counter()
        self.away = False
        self.held = asyncio.Event()
        self.held.set()

    async def read_indexes(self, expected: Sequence[Expected]) -> list[Index | None]:
        await self.held.wait()
        self.reads.update(one.key for one in expected)
        if self.away:
            raise UnavailableError("no answer")
        return await super().read_indexes(expected)


class Way:
    """Steps that were written, and a committer that is asked for them."""

    def __init__(self, *steps: int) -> None:
        objects = FakeStore()
        self.builder = JobBuilder(objects, image=adapter_image, codec="none", world=WORLD).begin()
        self.receipts = {step: receipts_of(self.builder, self.builder.checkpoint(step)) for step in steps}
        self.store = Counting(objects)
        self.log = Log(self.store, "job", writer_id="leader")
        self.committer = Committer(self.store, self.log, wall_s=lambda: 0)

    def ahead(self, step: int, *ranks: int, uid: str = "") -> ReadIndexes:
        receipts = tuple(self.receipts[step][rank] for rank in ranks or range(WORLD))
        uid = uid or receipts[0].copy.attempt_uid
        return ReadIndexes(attempt=1, attempt_uid=uid, step=step, world=WORLD, receipts=receipts)

    def intent(self, step: int, *, rested_on: frozenset[str] = frozenset()) -> CommitStep:
        receipts = self.receipts[step]
        uid = receipts[0].copy.attempt_uid
        return CommitStep(attempt=1, attempt_uid=uid, step=step, receipts=receipts, rested_on=rested_on)

    def reads(self, step: int) -> list[int]:
        """Return how often the index of each rank of a step was read."""
        return [self.store.reads[Key(one.copy.index_key)] for one in self.receipts[step]]


@pytest.fixture
async def way() -> Way:
    """Return a job with steps 10, 20 and 30, whose log was read."""
    way = Way(10, 20, 30)
    await way.log.look()
    return way


async def read(way: Way, *ahead: ReadIndexes) -> None:
    """Read ahead, to the end."""
    async with asyncio.TaskGroup() as tasks:
        for one in ahead:
            way.committer.read_ahead(one, wanted={10, 20, 30}, tasks=tasks)


async def test_each_index_is_read_once_whether_ahead_or_when_its_step_is_committed(way: Way) -> None:
    await read(way, way.ahead(10, 0, 2))
    assert way.reads(10) == [1, 0, 1, 0]
    assert await way.committer._indexes(way.intent(10)) == [None] * WORLD
    assert way.reads(10) == [1, 1, 1, 1]
    assert await way.committer._indexes(way.intent(10)) == [None] * WORLD
    assert way.reads(10) == [2, 2, 2, 2], "a commit that is tried again believes nothing that was read before"


async def test_a_commit_waits_for_what_is_being_read_ahead(way: Way) -> None:
    way.store.held.clear()
    async with asyncio.TaskGroup() as tasks:
        way.committer.read_ahead(way.ahead(10), wanted={10}, tasks=tasks)
        committing = tasks.create_task(way.committer._indexes(way.intent(10)))
        await asyncio.sleep(0.01)
        assert not committing.done()
        way.store.held.set()
    assert committing.result() == [None] * WORLD
    assert way.reads(10) == [1] * WORLD


async def test_what_could_not_be_read_ahead_is_read_when_the_step_is_committed(way: Way) -> None:
    way.store.away = True
    await read(way, way.ahead(10))
    way.store.away = False
    assert await way.committer._indexes(way.intent(10)) == [None] * WORLD
    assert way.reads(10) == [2] * WORLD


async def test_what_is_wrong_with_an_index_that_was_read_ahead_is_told_of_when_the_step_is_committed(way: Way) -> None:
    key = Key(way.receipts[10][2].copy.index_key)
    way.builder.store.objects[key] = b"{}"  # type: ignore[attr-defined] # a fake one
    await read(way, way.ahead(10))
    with pytest.raises(CorruptObjectError, match="rank-00002"):
        await way.committer._indexes(way.intent(10))


async def test_a_receipt_that_says_something_else_than_the_one_that_was_read_ahead_is_held_against_its_index(
    way: Way,
) -> None:
    await read(way, way.ahead(10))
    receipts = list(way.receipts[10])
    receipts[1] = replace(receipts[1], copy=structs.replace(receipts[1].copy, bytes=1))
    with pytest.raises(CorruptObjectError, match="its receipt"):
        await way.committer._indexes(replace(way.intent(10), receipts=tuple(receipts)))


async def test_an_index_into_whose_file_others_point_is_read_whole(way: Way) -> None:
    await read(way, way.ahead(10))
    rested_on = frozenset({way.receipts[10][3].copy.key})
    *alone, whole = await way.committer._indexes(way.intent(10, rested_on=rested_on))
    assert alone == [None] * (WORLD - 1)
    assert whole is not None
    assert whole.rank == WORLD - 1
    assert way.reads(10) == [1, 1, 1, 2]


async def test_no_more_is_read_of_steps_that_are_not_wanted_any_more(way: Way) -> None:
    way.store.held.clear()
    async with asyncio.TaskGroup() as tasks:
        for step, wanted in ((10, {10}), (20, {10, 20}), (30, {10, 30})):
            way.committer.read_ahead(way.ahead(step), wanted=wanted, tasks=tasks)
        assert list(way.committer._ahead) == [10, 30]
        way.store.held.set()
    assert (way.reads(10), way.reads(20), way.reads(30)) == ([1] * WORLD, [0] * WORLD, [1] * WORLD)


async def test_nothing_stays_of_steps_before_and_of_other_attempts(way: Way) -> None:
    await read(way, way.ahead(10), way.ahead(30))
    await way.committer._indexes(way.intent(30))
    assert not way.committer._ahead
    await read(way, way.ahead(20))
    await read(way, way.ahead(30, uid="9f" * 16))
    assert list(way.committer._ahead) == [30]
    assert way.reads(30) == [2] * WORLD
    await way.committer._indexes(way.intent(30))
    assert way.reads(30) == [3] * WORLD, "what was read for another attempt is not believed"


async def test_no_more_is_read_ahead_once_the_reign_is_over(way: Way) -> None:
    way.store.held.clear()
    async with asyncio.timeout(5.0), asyncio.TaskGroup() as tasks:
        way.committer.read_ahead(way.ahead(10), wanted={10}, tasks=tasks)
        await asyncio.sleep(0.01)
        way.committer.end()
    assert way.reads(10) == [0] * WORLD


# --- what is asked for


def commits(world: int) -> Commits:
    attempt = Attempt(
        attempt=1,
        uid="a1" * 16,
        launch_id="1a" * 16,
        round=0,
        ready=None,
        held=None,
        from_step=0,
        struck=(),
        world_size=world,
        facts_sha256="",
        spec_sha256="",
        why="",
    )
    return Commits(attempt=attempt, last_step=0, retry_s=2.0, read_back_deadline_s=30.0)


def tell(commits: Commits, step: int, *ranks: int) -> list[tuple[int, tuple[int, ...]]]:
    """Let a node tell that ranks were stored; return of which indexes it is asked then that they be read ahead."""
    attempt = commits.attempt
    assert attempt is not None
    copies = [copy_of(attempt.uid, step, rank, "object", world=attempt.world_size) for rank in ranks]
    identity = {"boot_id": "b0", "incarnation": "c0", "version": 1, "url": "", "domain": {}, "ranks": ()}
    commits.collect(Inventory(job="job", job_uid="0b" * 16, node="a", copies=tuple(copies), **identity))  # type: ignore[arg-type]
    effects = commits.steer(last_step=0, readers=["a", "b"], now_s=0.0)
    assert not any(isinstance(effect, Commit) for effect in effects)
    asked = [effect.indexes for effect in effects if isinstance(effect, ReadAhead)]
    return [(one.step, tuple(receipt.copy.rank for receipt in one.receipts)) for one in asked]


def test_the_indexes_of_few_ranks_are_asked_for_once_when_all_are_there() -> None:
    told = commits(3)
    assert tell(told, 8, 0, 1) == []
    assert tell(told, 8, 2) == [(8, (0, 1, 2))]
    assert tell(told, 8, 2) == []


def test_those_of_many_are_asked_for_while_they_come_in() -> None:
    told = commits(AHEAD_AT_ONCE + 10)
    assert tell(told, 8, *range(AHEAD_AT_ONCE - 1)) == []
    assert tell(told, 8, *range(AHEAD_AT_ONCE - 1, AHEAD_AT_ONCE + 5)) == [(8, tuple(range(AHEAD_AT_ONCE + 5)))]
    assert tell(told, 8, *range(AHEAD_AT_ONCE + 5, AHEAD_AT_ONCE + 9)) == []
    assert tell(told, 8, AHEAD_AT_ONCE + 9) == [(8, tuple(range(AHEAD_AT_ONCE + 5, AHEAD_AT_ONCE + 10)))]


def test_those_of_a_step_that_another_has_overtaken_are_not_asked_for() -> None:
    told = commits(3)
    assert tell(told, 8, 0, 1) == []
    assert tell(told, 16, 0, 1, 2) == [(16, (0, 1, 2))]
    assert told.under_way == 16
    assert tell(told, 8, 2) == []
