"""The leader clears away what the policy does not keep, and is not hindered by what somebody removed by hand."""

from __future__ import annotations

import logging

import pytest
from tests.support.fake_store import FakeStore
from tests.support.logs import JOB_UID
from tests.support.stores import small_store

from toprope.coordinator.adapters.objects import ThreadedStore
from toprope.coordinator.log import Log
from toprope.coordinator.metrics import Metrics
from toprope.coordinator.tidying import Tidier
from toprope.store.log.records import Elected, Job, Pin


async def leading(store: FakeStore) -> tuple[Log, Tidier, Metrics]:
    log, metrics = Log(ThreadedStore(store), "job", writer_id="leader"), Metrics()
    await log.look()
    assert await log.elect(lambda _: Elected(), job_uid=JOB_UID)
    return log, Tidier(ThreadedStore(store), log, metrics), metrics


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
