"""The leader clears away what the policy does not keep, and is not hindered by what somebody removed by hand."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from tests.support.fake_store import FakeStore
from tests.support.logs import JOB_UID
from tests.support.stores import small_store

from toprope.coordinator.adapters.objects import ThreadedStore
from toprope.coordinator.log import Log
from toprope.coordinator.metrics import Metrics
from toprope.coordinator.tidying import Tidier
from toprope.store.keep.gone import in_words
from toprope.store.log.chain import read_log
from toprope.store.log.records import Elected, Job, Pin


def never() -> bool:
    return False


async def leading(store: FakeStore, *, held_up: Callable[[], bool] = never) -> tuple[Log, Tidier, Metrics]:
    log, metrics = Log(ThreadedStore(store), "job", writer_id="leader"), Metrics()
    await log.look()
    assert await log.elect(lambda _: Elected(), job_uid=JOB_UID)
    return log, Tidier(ThreadedStore(store), log, metrics, held_up=held_up), metrics


@pytest.mark.fault("B75")
async def test_a_pinned_step_that_was_removed_by_hand_is_let_go_of_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = FakeStore()
    small_store(store, steps=(10, 20, 30, 40, 50)).log.add(Pin(seq=6), Job(uid=JOB_UID, name="job", retain="last=1"))
    for key in [key for key in store.objects if "s000000030" in key]:
        del store.objects[key]
    log, tidier, metrics = await leading(store)
    with caplog.at_level(logging.WARNING):
        await tidier._round()
        await tidier._round()
    (warning,) = caplog.messages
    assert "step 30 (READY 6, pinned) was removed from the store by hand: it is unpinned and retired" in warning
    state = log.state
    assert (state.pins, [state.readies[seq].step for seq in state.live]) == (frozenset(), [40, 50])
    assert {key.split("/")[3] for key in store.objects if "/shards/" in key} == {"s000000040", "s000000050"}
    assert metrics.tidying_failed._value.get() == 0


async def test_a_pinned_step_that_is_damaged_keeps_its_pin_and_all_else_stays(caplog: pytest.LogCaptureFixture) -> None:
    store = FakeStore()
    small_store(store, steps=(10, 20, 30, 40, 50)).log.add(Pin(seq=6), Job(uid=JOB_UID, name="job", retain="last=1"))
    lost = next(key for key in store.objects if "s000000030/rank-00000" in key and key.endswith("json"))
    del store.objects[lost]
    before = {key for key in store.objects if "/log/" not in key}
    log, tidier, metrics = await leading(store)
    await tidier._round()
    assert "by hand" not in caplog.text
    assert log.state.pins == {6}
    assert {key for key in store.objects if "/log/" not in key} == before
    assert metrics.tidying_failed._value.get() == 1


@pytest.mark.parametrize("removed", [0, 30])
async def test_nothing_is_let_go_of_while_an_attempt_must_come_into_the_log_first(
    removed: int, caplog: pytest.LogCaptureFixture
) -> None:
    store = FakeStore()
    small_store(store, steps=(10, 20, 30, 40, 50)).log.add(Pin(seq=6), Job(uid=JOB_UID, name="job", retain="last=1"))
    for key in [key for key in store.objects if removed and f"s{removed:09d}" in key]:
        del store.objects[key]
    log, tidier, metrics = await leading(store, held_up=lambda: True)
    n = log.state.n
    await tidier._round()
    assert (log.state.n, log.state.pins) == (n, frozenset({6}))
    assert "by hand" not in caplog.text, "it is told of once it is done"
    assert metrics.tidying_failed._value.get() == (1 if removed else 0)


async def test_what_was_held_up_half_way_is_not_told_of_as_done(caplog: pytest.LogCaptureFixture) -> None:
    store = FakeStore()
    small_store(store, steps=(10, 20, 30, 40, 50)).log.add(Pin(seq=6), Job(uid=JOB_UID, name="job", retain="last=1"))
    for key in [key for key in store.objects if "s000000030" in key]:
        del store.objects[key]
    log, tidier, _ = await leading(store, held_up=lambda: 6 not in log.state.pins and 6 in log.state.live)
    await tidier._round()
    assert (log.state.pins, 6 in log.state.live) == (frozenset(), True)
    assert "by hand" not in caplog.text


@pytest.mark.parametrize(
    ("pins", "seqs", "dry_run", "text"),
    [
        ((), (4,), False, "step 10 (READY 4) was removed from the store by hand: it is retired"),
        ((4,), (4,), True, "step 10 (READY 4, pinned) was removed from the store by hand: it would be unpinned and "),
        (
            (),
            (4, 5),
            False,
            "step 10 (READY 4), step 20 (READY 5) were removed from the store by hand: they are retired",
        ),
        ((5,), (4, 5), False, "by hand: they are retired, the pinned unpinned"),
    ],
)
def test_the_warning_says_what_is_done_with_how_many(
    pins: tuple[int, ...], seqs: tuple[int, ...], *, dry_run: bool, text: str
) -> None:
    job = small_store(FakeStore(), steps=(10, 20))
    job.log.add(*(Pin(seq=seq) for seq in pins))
    assert text in in_words(read_log(job.store, "job"), seqs, done=not dry_run)
