"""What a sidecar counts."""

from __future__ import annotations

import urllib.request

from tests.support.coordinator_stub import CoordinatorStub
from tests.support.scripted_trainer import ScriptedTrainer
from tests.support.sidecar_node import MakeNode

from toprope.trainer_hooks.link import wire


def test_each_step_that_was_skipped_is_counted_once(nodes: MakeNode, stub: CoordinatorStub) -> None:
    node = nodes()
    node.start()
    with ScriptedTrainer(node.socket) as trainer:
        trainer.begin(stub)
        for step in (4, 8):
            trainer.send(wire.Skipped(attempt_uid=trainer.attempt_uid, step=step, reason="no free slot"))
        stub.wait("a", lambda inventory: len(inventory.skipped) == 2, what="skipped steps")
        with urllib.request.urlopen(f"{node.url}/metrics", timeout=10) as answer:
            assert 'toprope_skips_total{rank="0"} 2.0' in answer.read().decode().splitlines()
