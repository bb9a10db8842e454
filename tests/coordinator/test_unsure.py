"""Whether a record of ours may be on its way to the log that what is decided without it could not follow."""

from __future__ import annotations

import pytest
from tests.support.fake_store import FakeStore
from tests.support.logs import JOB_UID
from tests.support.stores import small_store

from toprope.coordinator.adapters.objects import ThreadedStore
from toprope.coordinator.log import Log
from toprope.store.errors import FencedError, UnavailableError
from toprope.store.log import chain
from toprope.store.log.records import Elected, Job, Pin, Record, Retire, Taint
from toprope.store.names import Key

RETIRES = Retire(seqs=(4,))
TAINTS = Taint(attempt=1, from_step=50, to_step=None, reason="NaN")


async def leading(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> Log:
    """Return the log of one that leads, of which step 10 is READY 4, 20 is 5 and so on."""
    monkeypatch.setattr(chain, "BACK_OFF_S", (0.0,))
    small_store(store, steps=(10, 20, 30, 40))
    log = Log(ThreadedStore(store), "job", writer_id="leader")
    assert await log.elect(lambda _: Elected(), job_uid=JOB_UID)
    return log


async def give_up(log: Log, store: FakeStore, record: Record) -> None:
    """Append a record of which the store takes all requests and answers none."""
    store.faults.extend(["late"] * 2)
    with pytest.raises(UnavailableError):
        await log.append(lambda _: record)


@pytest.mark.parametrize("record", [RETIRES, TAINTS], ids=["retired", "tainted"])
async def test_a_log_that_can_be_read_again_is_no_proof_that_nothing_lands(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FakeStore()
    log = await leading(store, monkeypatch)
    await give_up(log, store, record)
    await log.catch_up()
    assert log.is_unsure
    store.land()
    await log.catch_up()
    assert not log.is_unsure


async def test_a_record_in_its_place_is_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore()
    log = await leading(store, monkeypatch)
    await give_up(log, store, RETIRES)
    await log.append(lambda _: Pin(seq=6))
    assert not log.is_unsure
    store.land()
    await log.catch_up()
    assert log.state.retired == frozenset()


async def test_another_record_that_may_land_there_too_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore()
    log = await leading(store, monkeypatch)
    await give_up(log, store, RETIRES)
    await give_up(log, store, Pin(seq=6))
    await log.catch_up()
    assert log.is_unsure


async def test_it_counts_as_soon_as_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    class Watched(FakeStore):
        log: Log | None = None

        def create(self, key: Key, body: bytes | memoryview) -> None:
            if self.log is not None:
                seen.append(self.log.is_unsure)
            super().create(key, body)

    store = Watched()
    store.log = log = await leading(store, monkeypatch)
    await log.append(lambda _: RETIRES)
    assert seen == [True]
    assert not log.is_unsure


async def test_what_a_replaced_leader_would_have_sent_is_not_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore()
    log = await leading(store, monkeypatch)
    assert await Log(ThreadedStore(store), "job", writer_id="next").elect(lambda _: Elected(), job_uid=JOB_UID)
    with pytest.raises(FencedError):
        await log.append(lambda _: RETIRES)
    await log.look()
    assert not log.is_unsure


@pytest.mark.parametrize("record", [Pin(seq=4), Job(uid=JOB_UID, name="job", retain="last=1")], ids=["pin", "policy"])
async def test_what_may_come_before_it_is_not_waited_for(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore()
    log = await leading(store, monkeypatch)
    await give_up(log, store, record)
    assert not log.is_unsure
