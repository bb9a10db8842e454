"""What goes to the slow tiers comes to rest, however many snapshots the slots hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from toprope.coordinator.wire import Cadence
from toprope.sidecar.effects import DropLocal, StoreLocal, StoreObject
from toprope.sidecar.events import LocalStored, ObjectStored, StoreFailed
from toprope.sidecar.slot_book import SlotRecord
from toprope.sidecar.tier_book import LOCAL_STEPS_KEPT, RECEIPTS_KEPT, TierBook
from toprope.sidecar.values import Shard

CADENCE = Cadence(from_step=0, every=1, local_every=1, object_every=1)


def _shard(step: int) -> Shard:
    return Shard(attempt=1, step=step, attempt_uid="aa", rank=0, world=1, bytes=8, digest="d" * 32)


def _slots(steps: range) -> list[tuple[SlotRecord, Shard]]:
    return [(SlotRecord(rank=0, number=step, capacity=8), _shard(step)) for step in steps]


def _run(book: TierBook, slots: list[tuple[SlotRecord, Shard]], *, rounds: int) -> tuple[list[int], list[int]]:
    """Carry out what the book plans, for some rounds; the steps that went to the local and to the object tier."""
    local: list[int] = []
    remote: list[int] = []
    for _ in range(rounds):
        for effect in book.plan(slots, CADENCE, attempt_uid="aa", now_s=0.0):
            if isinstance(effect, StoreLocal):
                local.append(effect.shard.step)
                book.on_local(LocalStored(shard=effect.shard, slot=effect.slot, path=f"/local/{effect.shard.step}"))
            elif isinstance(effect, StoreObject):
                remote.append(effect.shard.step)
                receipt = effect.shard.copy("object", key=f"key-{effect.shard.step}")
                book.on_object(ObjectStored(receipt=receipt, slot=effect.slot))
        assert all(isinstance(effect, DropLocal) for effect in book.retire_local(kept=frozenset()))
    return local, remote


@pytest.mark.parametrize("held", [1, LOCAL_STEPS_KEPT, LOCAL_STEPS_KEPT + 1, RECEIPTS_KEPT + 3])
def test_each_shard_goes_to_a_tier_at_most_once_though_its_slot_is_kept(held: int) -> None:
    book = TierBook()
    local, remote = _run(book, _slots(range(1, held + 1)), rounds=4 * held)
    assert len(local) == len(set(local))
    assert len(remote) == len(set(remote))
    assert held in local
    assert held in remote


def test_what_was_overtaken_is_awaited_no_more_so_that_its_slot_gets_free() -> None:
    book = TierBook()
    slots = _slots(range(1, RECEIPTS_KEPT + 4))
    _run(book, slots, rounds=40)
    assert book.awaited(slots, CADENCE, attempt_uid="aa") == frozenset()


def test_on_a_full_disk_only_the_newest_copy_and_what_is_kept_stays_until_one_has_landed() -> None:
    book = TierBook()
    for step in range(1, LOCAL_STEPS_KEPT + 1):
        book.on_local(LocalStored(shard=_shard(step), slot=0, path=f"/local/{step}"))
    assert book.retire_local(kept=frozenset()) == []
    failed = StoreFailed(tier="local", shard=_shard(9), slot=0, reason="No space left on device", no_room=True)
    book.on_failed(failed, now_s=0.0)
    assert book.retire_local(kept=frozenset({("aa", 1)})) == []
    assert book.retire_local(kept=frozenset()) == [DropLocal(path="/local/1")]
    for step in (9, 10):
        book.on_local(LocalStored(shard=_shard(step), slot=0, path=f"/local/{step}"))
    assert book.retire_local(kept=frozenset()) == [DropLocal(path="/local/2")]


def test_what_attempts_have_left_that_the_log_went_on_without_is_older_than_all_else() -> None:
    """They were opened without the log and have higher numbers; then the log opened another one in their place."""
    book = TierBook(attempt=(5, "ee"))
    for step in range(1, RECEIPTS_KEPT + 1):
        shard = replace(_shard(step + 100), attempt=5, attempt_uid="ee")
        book.on_object(ObjectStored(receipt=shard.copy("object", key=f"fenced-{step}"), slot=0))
        book.on_local(LocalStored(shard=shard, slot=None, path=f"/local/fenced-{step}"))
    book.attempt = (2, "aa")
    slots = [(record, replace(shard, attempt=2)) for record, shard in _slots(range(1, 4))]
    local, remote = _run(book, slots, rounds=12)
    assert {2, 3} <= set(local)
    assert set(remote) == {1, 2, 3}
    assert {(shard.attempt, shard.step) for shard in book.local} == {(2, 2), (2, 3)}
    assert {1, 2, 3} <= {shard.step for shard in book.receipts}
    other = replace(_shard(9), attempt=2, attempt_uid="bb")  # of the same number, and fenced off
    assert other.age(book.attempt) < replace(_shard(1), attempt=1).age(book.attempt)
    assert other.age((0, "")) > replace(_shard(1), attempt=1).age((0, ""))
