"""Slots whose files somebody has removed behind a running pair, as a login manager does at the end of a session."""

from __future__ import annotations

import shutil
import urllib.request
from pathlib import Path

import pytest
from tests.support.coordinator_stub import CoordinatorStub, restore_shard
from tests.support.core_driver import Driver, sight
from tests.support.scripted_trainer import ScriptedTrainer
from tests.support.sidecar_node import MakeNode, Node

from toprope.coordinator.wire import Copy
from toprope.sidecar import effects as do
from toprope.sidecar import events as on
from toprope.sidecar.adapters.files import Pages
from toprope.sidecar.memory import Memory, used_bytes
from toprope.sidecar.values import SlotSight
from toprope.trainer_hooks.link import wire
from toprope.trainer_hooks.link.slot import Page, SlotState

NUMBERS = (0, 1, 2)


def gone(number: int, state: SlotState = SlotState.EMPTY, *, seq: int = 0, step: int = 0) -> SlotSight:
    """Return a slot that lacks files, as it may be seen."""
    page = sight(number, state, seq=seq, step=step, launch_id="aa").page
    return SlotSight(slot=number, capacity=0, page=page, lock_held=False, gone=True)


def lost(driver: Driver) -> None:
    """Come to where the three slots of a trainer have lost their files."""
    driver.train()
    driver.see(*(sight(number, seq=1, launch_id="aa", lock_held=True) for number in NUMBERS))
    driver.see(*map(gone, NUMBERS), made=False)


def test_slots_that_are_gone_are_told_of_once_and_others_are_made_under_numbers_that_none_has_had() -> None:
    driver = Driver()
    lost(driver)
    (shout,) = driver.all(do.Shout)
    assert (shout.what, shout.text) == (
        "slots-gone",
        "rank 0: files of its slots 0, 1, 2 were removed from memory; others are made",
    )
    assert driver.all(do.MakeSlots) == [do.MakeSlots(rank=0, slots=(3, 4, 5), bytes=100)]
    driver.see(*map(gone, NUMBERS), made=False)
    assert (driver.all(do.Shout), driver.all(do.MakeSlots)) == ([], [])
    driver.see(*map(gone, NUMBERS), *(sight(number) for number in (3, 4, 5)))
    assert driver.granted() == [3, 4, 5]


def test_a_tick_looks_for_the_slots_that_are_known() -> None:
    driver = Driver()
    driver.train()
    driver.tick(1.0)
    assert driver.all(do.LookAtSlots) == [do.LookAtSlots(rank=0, known=NUMBERS)]


def test_what_is_put_into_a_slot_that_is_gone_is_held_until_a_later_step_is_kept() -> None:
    driver = Driver()
    lost(driver)
    driver.see(*(sight(number) for number in (3, 4, 5)))
    driver.snapshot(0, 1)
    assert driver.copies("memory") == [1]
    assert driver.all(do.RemoveSlots) == []
    driver.snapshot(3, 2)
    driver.keep(2)
    assert driver.all(do.RemoveSlots) == [do.RemoveSlots(rank=0, slots=(0,))]
    assert driver.copies("memory") == [2]


def test_a_snapshot_that_is_being_written_when_its_slot_goes_is_torn_only_if_its_owner_leaves() -> None:
    driver = Driver()
    lost(driver)
    driver.see(gone(0, SlotState.WRITING, seq=1, step=1), made=False)
    assert (driver.all(do.EmptySlot), driver.inventory.skipped) == ([], ()), "it is still being written"
    driver.on(on.ConnectionClosed(connection=1))
    driver.see(gone(0, SlotState.WRITING, seq=1, step=1), gone(1), gone(2), *(sight(number) for number in (3, 4, 5)))
    assert [(skip.step, skip.reason) for skip in driver.inventory.skipped] == [(1, "torn: the trainer died")]
    driver.hello(connection=2)
    driver.frame(wire.Size(bytes=100), connection=2)
    assert driver.all(do.RemoveSlots) == [do.RemoveSlots(rank=0, slots=NUMBERS)], "nobody will write into them"


def test_a_rank_whose_locks_are_gone_lives_as_long_as_it_is_connected() -> None:
    driver = Driver()
    lost(driver)
    assert [state.lock_held for state in driver.inventory.ranks] == [True]
    driver.on(on.ConnectionClosed(connection=1))
    driver.see(*map(gone, NUMBERS), made=False)
    assert [state.lock_held for state in driver.inventory.ranks] == [False] * len(driver.inventory.ranks)


def test_a_slot_that_is_found_to_be_gone_when_it_is_to_be_lent_is_not_thought_to_be_lent() -> None:
    driver = Driver()
    driver.train()
    driver.on(on.SlotGone(rank=0, slot=1, seq=0))
    assert driver.all(do.RemoveSlots) == [], "of an earlier grant"
    driver.on(on.SlotGone(rank=0, slot=1, seq=1))
    assert driver.all(do.RemoveSlots) == [do.RemoveSlots(rank=0, slots=(1,))]
    assert driver.all(do.MakeSlots) == [do.MakeSlots(rank=0, slots=(3,), bytes=100)]


def test_a_late_look_at_slots_that_were_removed_means_nothing() -> None:
    driver = Driver()
    lost(driver)
    driver.on(on.ConnectionClosed(connection=1))
    driver.see(*map(gone, NUMBERS), *(sight(number) for number in (3, 4, 5)))
    driver.hello(connection=2)
    driver.frame(wire.Size(bytes=100), connection=2)
    assert driver.all(do.RemoveSlots) == [do.RemoveSlots(rank=0, slots=NUMBERS)]
    driver.see(*map(gone, NUMBERS), made=False)
    assert (driver.all(do.Shout), driver.all(do.RemoveSlots), driver.core.slots.numbers(0)) == ([], [], (3, 4, 5))


def test_memory_tells_which_known_slots_lack_a_file_and_lends_none_of_them(memory_dir: Path) -> None:
    memory = Memory(memory_dir / "job", Pages(), limit_bytes=None)
    memory.make_directories()
    memory.make_slots(0, NUMBERS, 4096)
    memory.slot(0, 0).data.unlink()
    memory.slot(0, 1).lock.unlink()
    memory.slot(0, 2).page.unlink()
    assert memory.look(0) == ()
    sights = memory.look(0, known=NUMBERS)
    assert [(one.slot, one.capacity, one.gone, one.lock_held) for one in sights] == [
        (n, 0, True, False) for n in NUMBERS
    ]
    for number in NUMBERS:
        with pytest.raises(FileNotFoundError, match="the slot lacks a file"):
            memory.lend(number, Page(seq=1), check_lock=False)
    memory.empty(2, Page(seq=2))
    assert not memory.slot(0, 2).page.exists(), "no page is left over of a slot that is gone"
    shutil.rmtree(memory.root)
    assert used_bytes(memory.root) == 0
    memory.make_slots(0, (3,), 4096)
    assert [one.slot for one in memory.look(0, known=(0, 3)) if not one.gone] == [3]
    assert memory.fit(memory.spare(1, 0).data, 100) == bytes(100)
    memory.drop_staged(keep="")
    assert {path.stat().st_mode & 0o777 for path in (memory.root, *memory.root.glob("*"))} == {0o700}


# With a real sidecar


def served(node: Node, copy: Copy) -> bytes:
    """Return what a sidecar serves of a copy."""
    url = f"{node.url}/v1/copies/{copy.attempt_uid}/{copy.step}/{copy.rank}?tier={copy.tier}"
    with urllib.request.urlopen(url, timeout=20) as answer:
        return bytes(answer.read())


@pytest.mark.fault("B94")
@pytest.mark.parametrize("directories", [False, True], ids=["files", "directories"])
def test_slots_that_are_removed_behind_a_running_pair_cost_no_step_that_was_sealed(
    nodes: MakeNode, stub: CoordinatorStub, *, directories: bool
) -> None:
    node = nodes()
    node.start()
    ours = node.memory / "job"
    with ScriptedTrainer(node.socket) as trainer:
        trainer.begin(stub)
        trainer.announce()
        trainer.snapshot(3)
        before = stub.wait_copy("a", "memory", 3)
        grant = trainer.grant()
        with Path(grant.path).open("r+b") as mapped:
            for path in [ours] if directories else ours.rglob("*.*"):
                shutil.rmtree(path) if directories else path.unlink()
            trainer.expect(wire.Slot, lambda slot: slot.slot > max(NUMBERS))  # one of those made in their place
            assert "were removed from memory; others are made" in node.log.read_text()
            trainer.page(grant, 4, SlotState.WRITING)
            mapped.write(trainer.image(4))
        trainer.seal(grant, 4, len(trainer.image(4)))
        trainer.granted = [slot for slot in trainer.granted if slot.slot > max(NUMBERS)]
        held = stub.wait_copy("a", "memory", 4)
        stub.wait_copy("a", "object", 4)
        assert served(node, before) == trainer.image(3)
        assert served(node, held) == trainer.image(4)
        trainer.snapshot(5)
        assert served(node, stub.wait_copy("a", "memory", 5)) == trainer.image(5)
        image = trainer.image(4)
    assert_goes_on(node, stub, held, image)


def assert_goes_on(node: Node, stub: CoordinatorStub, held: Copy, image: bytes) -> None:
    """A new trainer gets what has no name any more, and a new sidecar has what is saved from then on."""
    with ScriptedTrainer(node.socket, launch_id="bb") as trainer:
        view = stub.attempt(
            2,
            "bb",
            {0: "a"},
            source="held",
            source_attempt_uid=held.attempt_uid,
            from_step=4,
            restore=(restore_shard(held),),
        )
        (shard,) = trainer.join(2, view.uid).shards
        assert (shard.tier, Path(shard.path).read_bytes()[: shard.bytes]) == ("memory", image)
        trainer.apply(stub)
        trainer.announce()
        trainer.snapshot(6)
        stub.wait_copy("a", "memory", 6)
        node.kill()
        node.start()  # one that has nothing open goes by what has a name
        inventory = stub.wait("a", lambda found: any(copy.step == 6 for copy in found.copies), what="copy of step 6")
        steps = {copy.step for copy in inventory.copies if copy.tier == "memory"}
        assert 4 not in steps
        trainer.connect()
        trainer.announce()
        trainer.snapshot(7)
        assert served(node, stub.wait_copy("a", "memory", 7)) == trainer.image(7)
