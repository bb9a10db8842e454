"""Whose a slot is, and when: the core's rules for the memory tier, as sentences."""

from __future__ import annotations

from tests.support.core_driver import UID, Driver, shard, sight

from toprope.coordinator.wire import Kept
from toprope.sidecar import effects as do
from toprope.sidecar import events as on
from toprope.sidecar.values import SlotSight
from toprope.trainer_hooks.link import wire
from toprope.trainer_hooks.link.slot import Page, SlotState


def test_slots_are_made_for_the_size_that_was_announced() -> None:
    driver = Driver()
    driver.attempt()
    driver.hello()
    driver.frame(wire.Size(bytes=100))
    assert driver.all(do.MakeSlots) == [do.MakeSlots(rank=0, slots=(0, 1, 2), bytes=100)]
    assert driver.tick(1.0) == [], "they are made once"


def test_slots_that_are_being_made_are_neither_lent_nor_made_again() -> None:
    driver = Driver()
    driver.attempt()
    driver.hello()
    driver.frame(wire.Size(bytes=100))
    driver.see(sight(0), made=False)
    assert driver.granted() == [], "there may be no room for the others, and then it goes too"
    assert driver.all(do.MakeSlots) == []
    driver.see(*(sight(number) for number in range(3)))
    assert driver.granted() == [0, 1, 2]


def test_all_free_slots_are_lent_at_once() -> None:
    driver = Driver()
    driver.train()
    assert driver.granted() == [0, 1, 2]


def test_no_slot_is_lent_before_the_attempt_is_applied() -> None:
    driver = Driver()
    driver.attempt(phase="staged")
    driver.hello()
    driver.frame(wire.Size(bytes=100))
    driver.see(*(sight(number) for number in range(3)))
    assert driver.granted() == []


def test_no_slot_is_lent_to_a_launch_that_has_no_attempt() -> None:
    driver = Driver()
    driver.attempt(launch_id="bb")
    driver.hello(launch_id="aa")
    driver.frame(wire.Size(bytes=100))
    driver.see(*(sight(number) for number in range(3)))
    assert driver.granted() == []


def test_a_stray_that_says_to_be_a_rank_in_training_takes_neither_its_slots_nor_its_place() -> None:
    driver = Driver()
    driver.attempt()
    driver.hello(world=2)
    driver.frame(wire.Join(attempt_uid=UID))
    driver.frame(wire.Size(bytes=100))
    driver.frame(wire.Skipped(attempt_uid=UID, step=4, reason="no free slot"))
    driver.hello(connection=2, launch_id="bb")
    driver.see(*(sight(number) for number in range(3)))
    lent_on = {effect.connection for effect in driver.all(do.GrantSlot)}
    assert (driver.granted(), lent_on) == ([0, 1, 2], {1})
    (state,) = driver.inventory.ranks
    assert (state.launch_id, state.world, state.step) == ("aa", 2, 4)


def test_a_process_that_connects_once_more_is_lent_slots_on_its_new_connection_alone() -> None:
    driver = Driver()
    driver.attempt()
    driver.hello()
    driver.frame(wire.Size(bytes=100))
    driver.hello(connection=2)
    driver.frame(wire.Size(bytes=100), connection=2)
    driver.see(*(sight(number) for number in range(3)))
    assert {effect.connection for effect in driver.all(do.GrantSlot)} == {2}


def test_a_restarted_sidecar_without_a_document_lends_to_the_process_that_holds_a_lock() -> None:
    driver = Driver()
    driver.see(sight(0, seq=3, launch_id="aa", lock_held=True), sight(1, seq=2, launch_id="aa"))
    driver.hello(launch_id="aa")
    assert driver.granted() == [0, 1]


def test_a_restarted_sidecar_says_that_it_reads_until_its_slots_and_its_disk_are_read() -> None:
    driver = Driver()
    driver.see(sight(0, SlotState.HASHED, seq=3, step=7, digest=f"{7:032x}"))
    driver.attempt()
    assert driver.inventory.reading
    driver.on(on.LeftoversRead())
    assert driver.inventory.reading, "a slot is still being checked"
    driver.hashed(0, 7, seq=3)
    assert (driver.copies("memory"), driver.inventory.reading) == ([7], False)


def test_a_disk_that_takes_a_minute_to_read_holds_up_no_restore() -> None:
    driver = Driver()
    driver.attempt()
    driver.tick()
    driver.tick(59.0)
    assert driver.inventory.reading
    driver.tick(1.0)
    assert not driver.inventory.reading


def test_a_sealed_slot_is_hashed_and_then_listed() -> None:
    driver = Driver()
    driver.train()
    assert driver.seal(0, 1)[:1] == [do.HashSlot(rank=0, slot=0, seq=1)]
    driver.hashed(0, 1)
    assert driver.copies("memory") == [1]


def test_sealed_frames_that_do_not_fit_the_grant_are_ignored() -> None:
    driver = Driver()
    driver.train()
    for slot, seq in ((0, 2), (0, 0), (5, 1)):
        driver.seal(slot, 1, seq=seq)
        assert driver.all(do.HashSlot) == []
    driver.seal(0, 1)
    driver.seal(0, 1)
    assert driver.all(do.HashSlot) == [], "a doubled frame does nothing"


def test_an_image_larger_than_its_slot_is_skipped_by_name_and_the_slot_is_lent_again() -> None:
    driver = Driver()
    driver.train()
    driver.frame(wire.Sealed(slot=0, seq=1, attempt_uid=UID, step=1, bytes=101))
    assert driver.inventory.skipped[0].reason == "an image of 101 bytes in a slot of 100"
    assert driver.granted() == [0]


def test_a_slot_whose_page_changed_while_it_was_hashed_is_lent_again() -> None:
    driver = Driver()
    driver.train()
    driver.seal(0, 1)
    driver.on(on.SlotDropped(rank=0, slot=0, seq=1, reason="changed"))
    assert driver.granted() == [0]
    assert driver.copies("memory") == []


def test_a_damaged_slot_is_not_lent_again_while_it_is_read() -> None:
    driver = Driver()
    driver.train()
    driver.snapshot(0, 1)
    driver.on(on.ServeBegan(serve=1, attempt_uid=UID, step=1, rank=0))
    driver.on(on.CopyDoubted(attempt_uid=UID, step=1, rank=0, tier="memory"))
    driver.on(on.SlotDropped(rank=0, slot=0, seq=1, reason="a bit flipped"))
    assert (driver.granted(), driver.copies("memory")) == ([], [])
    driver.on(on.ServeEnded(serve=1))
    assert driver.granted() == [0]


def test_a_digest_of_an_earlier_grant_is_not_believed() -> None:
    driver = Driver()
    driver.train()
    driver.seal(0, 1)
    driver.on(on.SlotDropped(rank=0, slot=0, seq=1, reason="changed"))
    driver.hashed(0, 1, seq=1)
    assert driver.copies("memory") == []


def test_a_kept_step_is_never_given_up() -> None:
    driver = Driver()
    driver.train()
    driver.keep(1)
    for slot, step in enumerate((1, 2, 3)):
        driver.snapshot(slot, step)
    driver.tick(100.0)
    assert driver.copies("memory") == [1, 3]
    assert driver.granted() == [1]


def test_the_kept_step_frees_those_before_it() -> None:
    driver = Driver()
    driver.train()
    for slot, step in enumerate((1, 2, 3)):
        driver.snapshot(slot, step)
    assert driver.granted() == []
    driver.keep(2)
    assert driver.granted() == [0]
    assert driver.copies("memory") == [2, 3]


def test_a_snapshot_that_waits_for_protection_goes_after_its_time_when_a_newer_one_is_there() -> None:
    driver = Driver()
    driver.train()
    for slot, step in enumerate((1, 2, 3)):
        driver.snapshot(slot, step)
    driver.tick(29.0)
    assert driver.granted() == []
    driver.tick(1.0)
    assert driver.granted() == [0]


def test_a_step_that_cannot_become_complete_is_given_up_at_once() -> None:
    driver = Driver()
    driver.train()
    for slot, step in enumerate((1, 2, 3)):
        driver.snapshot(slot, step)
    driver.want(dropped=(Kept(attempt_uid=UID, step=2),))
    assert driver.granted() == [1]


def test_the_source_of_an_attempt_stays_until_it_is_applied_whatever_keep_says() -> None:
    driver = Driver()
    driver.train()
    driver.snapshot(0, 1)
    driver.attempt(
        number=2, uid="2b", launch_id="bb", source="held", source_attempt_uid=UID, from_step=1, phase="opened"
    )
    assert (UID, 1) in driver.core._kept()


def test_a_slot_in_use_by_a_peer_is_not_lent_until_it_has_acknowledged() -> None:
    driver = Driver()
    driver.train()
    driver.place("a", "b")
    for slot, step in enumerate((1, 2, 3)):
        driver.snapshot(slot, step)
    driver.keep(3)
    assert driver.granted() == []
    driver.on(on.Acked(holder="b", attempt_uid=UID, step=1, rank=0, digest=shard(1).digest))
    assert driver.granted() == [0]


def test_a_slow_reader_loses_its_copy_and_not_the_trainer_its_slot() -> None:
    driver = Driver()
    driver.train()
    driver.place("a", "b")
    for slot, step in enumerate((1, 2, 3)):
        driver.snapshot(slot, step)
    driver.keep(3)
    driver.tick(30.1)
    assert driver.granted() == [0]
    assert {shout.what for shout in driver.all(do.Shout)} == {"use-deadline"}


def test_a_slot_is_in_use_while_its_bytes_flow_however_long() -> None:
    driver = Driver()
    driver.train()
    for slot, step in enumerate((1, 2, 3)):
        driver.snapshot(slot, step)
    driver.on(on.ServeBegan(serve=7, attempt_uid=UID, step=1, rank=0))
    driver.on(on.ServeBegan(serve=8, attempt_uid=UID, step=2, rank=0))
    driver.keep(3)
    driver.tick(1000.0)
    assert driver.granted() == []
    driver.on(on.ServeEnded(serve=7))
    assert driver.granted() == [0]


def test_an_acknowledgement_of_other_bytes_makes_the_owner_check_its_slot() -> None:
    driver = Driver()
    driver.train()
    driver.place("a", "b")
    driver.snapshot(0, 1)
    driver.on(on.Acked(holder="b", attempt_uid=UID, step=1, rank=0, digest="f" * 32))
    assert driver.all(do.HashSlot) == [do.HashSlot(rank=0, slot=0, seq=1, digest=shard(1).digest)]
    assert driver.copies("memory") == [], "it is not listed while it is in doubt"
    driver.hashed(0, 1)
    assert driver.copies("memory") == [1]


def test_a_torn_snapshot_is_dropped_when_the_lock_is_free() -> None:
    driver = Driver()
    driver.train()
    driver.on(on.ConnectionClosed(connection=1))
    driver.see(sight(0, SlotState.WRITING, seq=1, step=1, launch_id="aa", lock_held=True))
    assert driver.all(do.EmptySlot) == [], "a closed connection is a hint, not a death"
    driver.see(sight(0, SlotState.WRITING, seq=1, step=1, launch_id="aa"))
    assert [effect.slot for effect in driver.all(do.EmptySlot)] == [0]
    assert [skip.step for skip in driver.inventory.skipped] == [1]


def test_a_free_lock_tells_of_a_death_though_a_forked_child_keeps_the_connection() -> None:
    driver = Driver()
    driver.train()
    driver.see(sight(0, SlotState.WRITING, seq=1, step=1, launch_id="aa"))
    assert [effect.slot for effect in driver.all(do.EmptySlot)] == [0]


def test_what_was_sealed_before_the_trainer_died_is_hashed() -> None:
    driver = Driver()
    driver.train()
    driver.on(on.ConnectionClosed(connection=1))
    driver.see(sight(1, SlotState.SEALED, seq=1, step=1, launch_id="aa"))
    assert driver.all(do.HashSlot) == [do.HashSlot(rank=0, slot=1, seq=1)]


def test_on_reconnect_a_slot_that_was_not_begun_is_lent_anew_and_one_being_written_is_left_alone() -> None:
    driver = Driver()
    driver.train()
    driver.on(on.ConnectionClosed(connection=1))
    driver.hello(connection=2)
    assert driver.all(do.LookAtSlots) == [do.LookAtSlots(rank=0)]
    driver.see(
        sight(0, SlotState.WRITING, seq=1, step=1, launch_id="aa", lock_held=True),
        sight(1, seq=1, launch_id="aa", lock_held=True),
        sight(2, seq=1, launch_id="aa", lock_held=True),
    )
    assert [(grant.slot, grant.page.seq) for grant in driver.all(do.GrantSlot)] == [(1, 2), (2, 2)]
    driver.seal(0, 1, connection=2)
    assert driver.all(do.HashSlot) == [do.HashSlot(rank=0, slot=0, seq=1)]


def test_a_slot_passes_to_another_process_only_when_its_lock_is_free() -> None:
    driver = Driver()
    driver.train()
    driver.snapshot(0, 1)
    driver.see(*(sight(number, seq=1, launch_id="aa", lock_held=number == 0) for number in range(3)))
    driver.on(on.ConnectionClosed(connection=1))
    driver.attempt(number=2, uid="2b", launch_id="bb")
    driver.hello(connection=2, launch_id="bb")
    driver.frame(wire.Size(bytes=100), connection=2)
    grants = driver.all(do.GrantSlot)
    assert [(grant.slot, grant.check_lock) for grant in grants] == [(1, True), (2, True)]
    driver.on(on.SlotHeld(rank=0, slot=1, seq=2, launch_id="aa"))
    assert driver.granted() == [], "its lock was taken meanwhile"
    driver.see(sight(1, seq=1, launch_id="aa"))
    assert driver.granted() == [1]


def test_a_snapshot_is_not_given_up_for_a_slot_that_another_process_still_locks() -> None:
    driver = Driver()
    driver.train()
    for slot, step in enumerate((1, 2, 3)):
        driver.snapshot(slot, step)
    driver.see(*(sight(number, seq=1, launch_id="aa", lock_held=True) for number in range(3)))
    driver.on(on.ConnectionClosed(connection=1))
    driver.attempt(number=2, uid="2b", launch_id="bb")
    driver.hello(connection=2, launch_id="bb")
    driver.frame(wire.Size(bytes=100), connection=2)
    assert driver.granted() == []
    assert driver.copies("memory") == [1, 2, 3]


def test_the_state_of_a_rank_names_the_launch_that_holds_its_lock() -> None:
    driver = Driver()
    driver.train()
    driver.see(sight(0, seq=1, launch_id="aa", lock_held=True))
    driver.on(on.ConnectionClosed(connection=1))
    driver.hello(connection=2, launch_id="bb")
    (state,) = driver.inventory.ranks
    assert (state.launch_id, state.lock_held) == ("aa", True)


def test_slots_found_at_start_are_adopted_by_their_pages() -> None:
    driver = Driver()
    driver.want()
    digest = shard(2).digest
    driver.see(
        sight(0, SlotState.SEALED, seq=1, step=1),
        sight(1, SlotState.HASHED, seq=4, step=2, digest=digest),
        sight(2, SlotState.WRITING, seq=2, step=3),
        sight(3, SlotState.WRITING, seq=2, step=3, lock_held=True),
    )
    assert driver.all(do.HashSlot) == [
        do.HashSlot(rank=0, slot=0, seq=1),
        do.HashSlot(rank=0, slot=1, seq=4, digest=digest),
    ]
    assert [effect.slot for effect in driver.all(do.EmptySlot)] == [2]


def test_a_state_that_has_grown_gets_larger_slots_and_gives_up_the_small_ones() -> None:
    driver = Driver()
    driver.train()
    driver.snapshot(0, 1)
    driver.frame(wire.Size(bytes=200))
    assert driver.all(do.MakeSlots) == [do.MakeSlots(rank=0, slots=(3, 4, 5), bytes=200)]
    assert driver.copies("memory") == [1], "the old step stays readable"


def test_a_launch_is_lent_no_slot_of_an_earlier_one_before_it_has_said_how_large_they_must_be() -> None:
    driver = Driver()
    driver.train()
    driver.attempt(number=2, uid="2" * 32, launch_id="bb")
    driver.hello(connection=2, launch_id="bb")
    driver.see(*(sight(number, launch_id="aa") for number in range(3)))
    assert driver.granted() == []
    driver.frame(wire.Size(bytes=200), connection=2)
    assert driver.granted() == [], "they would not do"
    assert driver.all(do.MakeSlots) == [do.MakeSlots(rank=0, slots=(3, 4, 5), bytes=200)]
    driver.frame(wire.Size(bytes=100), connection=2)
    assert driver.granted() == [0, 1, 2]


def test_no_slots_are_made_nor_given_up_for_a_size_that_another_process_of_the_rank_has_said() -> None:
    driver = Driver()
    driver.train()
    driver.hello(connection=2, launch_id="bb")
    driver.frame(wire.Size(bytes=500), connection=2)
    assert driver.all(do.MakeSlots) == []
    driver.snapshot(0, 1)
    driver.snapshot(1, 2)
    driver.keep(2)
    assert (driver.all(do.RemoveSlots), driver.core.slots.numbers(0)) == ([], (0, 1, 2))


def test_slots_that_are_too_small_go_once_nothing_needs_them() -> None:
    driver = Driver()
    driver.train()
    driver.snapshot(0, 1)
    driver.keep(1)
    driver.frame(wire.Size(bytes=200))
    driver.see(*(SlotSight(slot=number, capacity=200, page=Page(), lock_held=False) for number in (3, 4, 5)))
    assert driver.granted() == [3, 4, 5]
    driver.frame(wire.Sealed(slot=1, seq=1, attempt_uid=UID, step=2, bytes=150))
    assert driver.all(do.RemoveSlots) == [do.RemoveSlots(rank=0, slots=(1,))], "the trainer had no use for it"
    driver.snapshot(3, 3)
    assert driver.all(do.RemoveSlots) == []
    driver.keep(3)
    assert driver.all(do.RemoveSlots) == [do.RemoveSlots(rank=0, slots=(0,))]


def test_without_room_training_goes_on_and_it_is_tried_again() -> None:
    driver = Driver()
    driver.attempt()
    driver.hello()
    driver.frame(wire.Size(bytes=100))
    driver.on(on.SlotsRefused(rank=0, reason="needs 300 bytes", room=200))
    assert [shout.what for shout in driver.all(do.Shout)] == ["no-room"]
    assert driver.all(do.MakeSlots) == []
    driver.tick(5.0)
    assert len(driver.all(do.MakeSlots)) == 1


def test_memory_of_a_rank_that_moved_away_is_given_back_once_nothing_keeps_it() -> None:
    driver = Driver()
    driver.train()
    driver.snapshot(0, 1)
    driver.on(on.ConnectionClosed(connection=1))
    driver.see(*(sight(number, seq=1, launch_id="aa") for number in (1, 2)))
    driver.keep(1)
    driver.attempt(number=2, uid="2b", launch_id="bb", world=())
    assert driver.all(do.RemoveSlots) == [do.RemoveSlots(rank=0, slots=(1, 2))]
    driver.keep(7, uid="2b")
    assert driver.all(do.RemoveSlots) == [do.RemoveSlots(rank=0, slots=(0,))]
