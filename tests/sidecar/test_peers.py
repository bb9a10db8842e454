"""Two real sidecars: one pulls what the other holds, and believes only what it has stored."""

from __future__ import annotations

from pathlib import Path

from tests.sidecar.test_restore import flip, restart
from tests.support.coordinator_stub import CoordinatorStub
from tests.support.scripted_trainer import ScriptedTrainer
from tests.support.sidecar_node import MakeNode

from toprope.coordinator.wire import Source


def test_a_peer_copies_each_snapshot_and_serves_it_after_its_owner_is_gone(
    nodes: MakeNode, stub: CoordinatorStub
) -> None:
    owner, holder, fresh = nodes("a"), nodes("b"), nodes("c")
    owner.start()
    holder.start()
    stub.wait("a", lambda _: True, what="inventory")
    stub.place(("a", "b"))
    with ScriptedTrainer(owner.socket) as trainer:
        trainer.begin(stub)
        trainer.announce()
        for step in (1, 2, 3):
            trainer.snapshot(step)
            assert stub.wait_copy("b", "peer", step).digest == stub.wait_copy("a", "memory", step).digest
            stub.keep(trainer.attempt_uid, step)
        copy = stub.wait_copy("b", "peer", 3)
        expected = trainer.image(3)
        owner.kill()
    fresh.start()
    with restart(fresh, stub, copy, Source(tier="peer", node="b", url=holder.url)) as trainer:
        (shard,) = trainer.join(2, f"{2:032x}").shards
        assert (shard.tier, shard.node) == ("peer", "b")
        assert Path(shard.path).read_bytes() == expected


def test_a_peer_refuses_bytes_that_were_flipped_after_hashing_and_the_owner_drops_them(
    nodes: MakeNode, stub: CoordinatorStub
) -> None:
    owner, holder = nodes("a"), nodes("b")
    owner.start()
    holder.start()
    stub.wait("a", lambda _: True, what="inventory")
    with ScriptedTrainer(owner.socket) as trainer:
        trainer.begin(stub)
        trainer.announce()
        grant = trainer.snapshot(1)
        stub.wait_copy("a", "memory", 1)
        flip(Path(grant.path), 2000)
        stub.place(("a", "b"))
        inventory = stub.wait("a", lambda i: any(s.step == 1 for s in i.skipped), what="skip of the damaged step")
        assert not [c for c in inventory.copies if c.step == 1 and c.tier == "memory"]
        trainer.snapshot(3)
        stub.wait_copy("b", "peer", 3)
        assert [c.step for c in stub.inventories["b"].copies] == [3]


def test_peers_go_on_copying_while_the_coordinator_is_away(nodes: MakeNode, stub: CoordinatorStub) -> None:
    owner, holder = nodes("a"), nodes("b")
    owner.start()
    holder.start()
    stub.wait("a", lambda _: True, what="inventory")
    stub.place(("a", "b"))
    with ScriptedTrainer(owner.socket) as trainer:
        trainer.begin(stub)
        trainer.announce()
        trainer.snapshot(1)
        stub.wait_copy("b", "peer", 1)
        stub.away = True
        trainer.snapshot(2)
        holder.wait_copy("peer", 2)
        stub.away = False
        stub.wait_copy("b", "peer", 2)


def test_a_restarted_holder_lists_its_copy_only_if_it_still_has_its_digest(
    nodes: MakeNode, stub: CoordinatorStub
) -> None:
    owner, holder = nodes("a"), nodes("b")
    owner.start()
    holder.start()
    stub.wait("a", lambda _: True, what="inventory")
    stub.place(("a", "b"))
    with ScriptedTrainer(owner.socket) as trainer:
        trainer.begin(stub)
        trainer.announce()
        for step in (1, 2):
            trainer.snapshot(step)
            stub.keep(stub.wait_copy("b", "peer", step).attempt_uid, step)
        owner.kill()
        holder.kill()
        flip(holder.memory / "job" / "peer" / "rank-0-spare-1.data", 2000)
        holder.start()
        inventory = stub.wait("b", lambda i: any(c.tier == "peer" for c in i.copies), what="peer copies")
        assert [c.step for c in inventory.copies if c.tier == "peer"] == [1]
