"""Staging a restore: each way to a shard, and what every rank is told when there is none."""

from __future__ import annotations

from pathlib import Path

from tests.support.coordinator_stub import CoordinatorStub, restore_shard
from tests.support.scripted_trainer import ScriptedTrainer
from tests.support.sidecar_node import MakeNode, Node

from toprope.coordinator.wire import Copy, Source
from toprope.trainer_hooks.link import wire


def restart(node: Node, stub: CoordinatorStub, copy: Copy, *sources: Source) -> ScriptedTrainer:
    """Return a new trainer for which attempt 2 was opened from this copy."""
    trainer = ScriptedTrainer(node.socket, launch_id="bb")
    stub.attempt(
        2,
        "bb",
        {0: node.name},
        source="held",
        source_attempt_uid=copy.attempt_uid,
        from_step=copy.step,
        restore=(restore_shard(copy, *sources),),
    )
    return trainer


def flip(path: Path, at: int) -> None:
    """Flip one bit."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_a_new_trainer_is_given_the_slot_itself_and_goes_on(nodes: MakeNode, stub: CoordinatorStub) -> None:
    node = nodes()
    node.start()
    with ScriptedTrainer(node.socket) as trainer:
        trainer.begin(stub)
        trainer.announce()
        trainer.snapshot(1)
        copy = stub.wait_copy("a", "memory", 1)
        expected = trainer.image(1)
    with restart(node, stub, copy) as trainer:
        (shard,) = trainer.join(2, f"{2:032x}").shards
        assert (shard.tier, shard.node) == ("memory", "a")
        assert Path(shard.path).read_bytes()[: shard.bytes] == expected
        stub.keep(copy.attempt_uid, 1)
        trainer.apply(stub)
        trainer.announce()
        trainer.snapshot(2)
        assert stub.wait_copy("a", "memory", 2).attempt == 2


def test_a_damaged_slot_is_passed_over_for_the_local_copy(nodes: MakeNode, stub: CoordinatorStub) -> None:
    node = nodes()
    node.start()
    with ScriptedTrainer(node.socket) as trainer:
        trainer.begin(stub)
        trainer.announce()
        grant = trainer.snapshot(2)
        copy = stub.wait_copy("a", "local", 2)
        flip(Path(grant.path), 2000)
    with restart(node, stub, copy) as trainer:
        (shard,) = trainer.join(2, f"{2:032x}").shards
        assert shard.tier == "local"
    stub.wait("a", lambda i: all(c.tier != "memory" for c in i.copies), what="end of the damaged memory copy")


def test_a_shard_comes_from_the_object_store_when_nobody_else_has_it(nodes: MakeNode, stub: CoordinatorStub) -> None:
    node, fresh = nodes("a"), nodes("b")
    node.start()
    with ScriptedTrainer(node.socket) as trainer:
        trainer.begin(stub)
        trainer.announce()
        trainer.snapshot(4)
        receipt = stub.wait_copy("a", "object", 4)
        expected = trainer.image(4)
    node.kill()
    fresh.start()
    sources = (Source(tier="memory", node="a", url=node.url), Source(tier="object", key=receipt.index_key))
    with restart(fresh, stub, receipt, *sources) as trainer:
        (shard,) = trainer.join(2, f"{2:032x}").shards
        assert shard.tier == "object"
        assert Path(shard.path).read_bytes() == expected
        trainer.apply(stub)
        trainer.announce()
        trainer.grant()
        assert not Path(shard.path).exists(), "staged files are dropped once the state is applied"


def test_a_shard_that_nobody_has_is_a_verdict_that_says_what_was_tried(nodes: MakeNode, stub: CoordinatorStub) -> None:
    node = nodes()
    node.start()
    copy = Copy(attempt=1, attempt_uid="1a", step=3, rank=0, world=1, tier="peer", bytes=100, digest="0" * 32)
    with restart(node, stub, copy, Source(tier="object", key="job/none.safetensors")) as trainer:
        trainer.send(wire.Join(attempt_uid=f"{2:032x}", wants=(wire.Want(rank=0),)))
        inventory = stub.wait("a", lambda i: any(r.verdict is not None for r in i.ranks), what="verdict")
        verdict = inventory.ranks[0].verdict
        assert verdict is not None
        assert not verdict.ok
        assert "rank 0" in verdict.reason
        assert "object job/none.safetensors" in verdict.reason
        stub.phase("failed", reason=verdict.reason)
        go = trainer.expect(wire.Go)
        assert (go.ok, go.phase, go.reason) == (False, "staged", verdict.reason)


def test_open_is_answered_with_the_attempt_and_its_schedule(nodes: MakeNode, stub: CoordinatorStub) -> None:
    node = nodes()
    node.start()
    with ScriptedTrainer(node.socket) as trainer:
        view = stub.attempt(1, "aa", {0: "a"})
        place = wire.Member(rank=0, node="a", boot_id=trainer.welcome.boot_id)
        trainer.send(wire.Open(launch_id="aa", round=0, world=(place,), spec={"x": 1}, versions={}))
        answer = trainer.expect(wire.Attempt)
        assert (answer.uid, answer.source, answer.schedule.every) == (view.uid, "fresh", 1)
        assert stub.opens[0].spec == {"x": 1}
