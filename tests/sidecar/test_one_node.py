"""One real sidecar and a trainer without torch: from seal to each tier."""

from __future__ import annotations

from pathlib import Path

import xxhash
from tests.support.coordinator_stub import CoordinatorStub
from tests.support.scripted_trainer import ScriptedTrainer
from tests.support.sidecar_node import MakeNode


def test_a_sealed_snapshot_reaches_memory_local_and_object_tier(nodes: MakeNode, stub: CoordinatorStub) -> None:
    node = nodes()
    node.start()
    with ScriptedTrainer(node.socket) as trainer:
        trainer.begin(stub)
        trainer.announce()
        trainer.snapshot(4)
        expected = xxhash.xxh3_128(trainer.image(4)).hexdigest()
        assert stub.wait_copy("a", "memory", 4).digest == expected
        local = stub.wait_copy("a", "local", 4)
        assert xxhash.xxh3_128(Path(local.key).read_bytes()).hexdigest() == expected
        receipt = stub.wait_copy("a", "object", 4)
        assert (node.store / receipt.key).read_bytes() == trainer.image(4)
        assert (node.store / receipt.index_key).exists()
    assert node.stop() == 0
