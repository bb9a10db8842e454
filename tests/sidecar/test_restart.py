"""A sidecar that was killed and started again adopts slots by their pages."""

from __future__ import annotations

from pathlib import Path

from tests.sidecar.test_restore import flip
from tests.support.coordinator_stub import CoordinatorStub
from tests.support.scripted_trainer import ScriptedTrainer
from tests.support.sidecar_node import MakeNode, Node

from toprope.trainer_hooks.link import wire
from toprope.trainer_hooks.link.slot import SlotState, read_page


def trained(node: Node, stub: CoordinatorStub) -> ScriptedTrainer:
    """Return a trainer in attempt 1 that has announced its size."""
    node.start()
    trainer = ScriptedTrainer(node.socket)
    trainer.begin(stub)
    trainer.announce()
    return trainer


def test_hashed_slots_are_checked_and_listed_again(nodes: MakeNode, stub: CoordinatorStub) -> None:
    node = nodes()
    with trained(node, stub) as trainer:
        trainer.snapshot(1)
        before = stub.wait_copy("a", "memory", 1)
        node.kill()
        node.start()
        assert stub.wait_copy("a", "memory", 1) == before


def test_a_hashed_slot_that_changed_meanwhile_is_dropped(nodes: MakeNode, stub: CoordinatorStub) -> None:
    node = nodes()
    with trained(node, stub) as trainer:
        grant = trainer.snapshot(1)
        stub.wait_copy("a", "memory", 1)
        trainer.snapshot(3)
        stub.wait_copy("a", "memory", 3)
        node.kill()
        flip(Path(grant.path), 2000)
        node.start()
        inventory = stub.wait("a", lambda i: any(c.step == 3 for c in i.copies), what="copy of step 3")
        assert not [c for c in inventory.copies if c.step == 1]


def test_a_slot_that_was_sealed_while_no_sidecar_lived_is_hashed(nodes: MakeNode, stub: CoordinatorStub) -> None:
    node = nodes()
    with trained(node, stub) as trainer:
        grant = trainer.grant()
        node.kill()
        trainer.page(grant, 5, SlotState.SEALED, trainer.write(grant, 5))
        node.start()
        stub.wait_copy("a", "memory", 5)
        assert read_page(Path(grant.page_path)).state is SlotState.HASHED


def test_a_snapshot_that_is_being_written_keeps_its_slot_and_is_sealed_on_the_new_connection(
    nodes: MakeNode, stub: CoordinatorStub
) -> None:
    node = nodes()
    with trained(node, stub) as trainer:
        grant = trainer.grant()
        size = trainer.write(grant, 5)
        node.kill()
        node.start()
        trainer.connect()
        trainer.announce()
        others = {trainer.grant().slot, trainer.grant().slot}
        assert grant.slot not in others
        trainer.seal(grant, 5, size)
        stub.wait_copy("a", "memory", 5)


def test_a_slot_whose_writer_died_is_torn_and_lent_again(nodes: MakeNode, stub: CoordinatorStub) -> None:
    node = nodes()
    with trained(node, stub) as trainer:
        grant = trainer.grant()
        trainer.write(grant, 5)
        trainer.die()
        inventory = stub.wait("a", lambda i: bool(i.skipped), what="torn snapshot")
        assert (inventory.skipped[0].step, inventory.skipped[0].reason) == (5, "torn: the trainer died")
        trainer.connect()
        trainer.announce()
        assert {trainer.grant().slot for _ in range(3)} == {0, 1, 2}


def test_what_a_dead_trainer_sealed_is_carried_on(nodes: MakeNode, stub: CoordinatorStub) -> None:
    node = nodes()
    with trained(node, stub) as trainer:
        grant = trainer.grant()
        trainer.page(grant, 4, SlotState.SEALED, trainer.write(grant, 4))
        trainer.die()
        stub.wait_copy("a", "object", 4)


def test_a_new_process_is_lent_no_slot_that_another_can_still_write_into(
    nodes: MakeNode, stub: CoordinatorStub
) -> None:
    node = nodes()
    with trained(node, stub) as old:
        locked = old.snapshot(1).slot
        stub.wait("a", lambda i: any(r.lock_held for r in i.ranks), what="held lock")
        with ScriptedTrainer(node.socket, launch_id="bb") as new:
            state = stub.wait("a", lambda i: i.ranks[0].lock_held, what="held lock").ranks[0]
            assert state.launch_id == "aa", "the state names the process that may still write"
            new.begin(stub, number=2)
            new.announce()
            assert locked not in {new.snapshot(1).slot, new.snapshot(2).slot}
            old.die()
            assert new.grant().slot == locked


def test_a_frame_with_the_wrong_seq_is_ignored(nodes: MakeNode, stub: CoordinatorStub) -> None:
    node = nodes()
    with trained(node, stub) as trainer:
        grant = trainer.grant()
        size = trainer.write(grant, 1)
        trainer.send(wire.Sealed(slot=grant.slot, seq=99, attempt_uid=trainer.attempt_uid, step=1, bytes=size))
        trainer.send(wire.Sealed(slot=7, seq=1, attempt_uid=trainer.attempt_uid, step=1, bytes=size))
        trainer.snapshot(2)
        stub.wait_copy("a", "memory", 2)
        assert [c.step for c in stub.inventories["a"].copies if c.tier == "memory"] == [2]
