"""A process that may still write into a slot keeps it, whatever else is wanted: the core's rules, as sentences."""

from __future__ import annotations

import pytest
from tests.support.core_driver import Driver, sight

from toprope.sidecar import effects as do
from toprope.sidecar import events as on
from toprope.trainer_hooks.link import wire
from toprope.trainer_hooks.link.slot import SlotState


def test_a_sealed_frame_of_another_process_than_the_slot_was_lent_to_is_ignored() -> None:
    driver = Driver()
    driver.train()
    driver.hello(connection=2, launch_id="bb")
    driver.seal(0, 1, connection=2)
    assert driver.all(do.HashSlot) == []
    driver.seal(0, 1)
    assert driver.all(do.HashSlot) == [do.HashSlot(rank=0, slot=0, seq=1)]


@pytest.mark.parametrize("lock_held", [True, False])
def test_a_snapshot_in_a_slot_that_another_process_has_locked_does_not_go_for_a_new_one(*, lock_held: bool) -> None:
    driver = Driver()
    driver.train()
    for slot, step in enumerate((1, 2, 3)):
        driver.snapshot(slot, step)
        locked = sight(slot, SlotState.HASHED, seq=1, step=step, launch_id="aa", lock_held=lock_held)
        driver.see(locked)
    driver.on(on.ConnectionClosed(connection=1))
    driver.attempt(number=2, uid="2b", launch_id="bb")
    driver.hello(connection=2, launch_id="bb")
    driver.frame(wire.Size(bytes=100), connection=2)
    assert driver.granted() == ([] if lock_held else [0])


def test_slots_of_a_rank_that_moved_away_stay_while_its_old_process_has_locked_them() -> None:
    driver = Driver()
    driver.train()
    driver.on(on.ConnectionClosed(connection=1))
    driver.see(*(sight(number, seq=1, launch_id="aa", lock_held=number == 1) for number in range(3)))
    driver.attempt(number=2, uid="2b", launch_id="bb", world=())
    assert driver.all(do.RemoveSlots) == [do.RemoveSlots(rank=0, slots=(0, 2))]
    driver.see(sight(1, seq=1, launch_id="aa"))
    assert driver.all(do.RemoveSlots) == [do.RemoveSlots(rank=0, slots=(1,))]
