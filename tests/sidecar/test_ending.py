"""A sidecar that is told to end ends, whatever does not answer, and begins nothing more."""

from __future__ import annotations

import shutil

from tests.support.coordinator_stub import CoordinatorStub
from tests.support.sidecar_node import MakeNode

from toprope.coordinator.wire import ReadBackTask


def test_a_read_back_that_an_absent_store_does_not_answer_does_not_keep_it_from_ending(
    nodes: MakeNode, stub: CoordinatorStub
) -> None:
    node = nodes()
    node.start()
    stub.wait("a", lambda _: True, what="inventory")
    shutil.rmtree(node.store)
    stub.change(read_backs=(ReadBackTask(node="a", key="job/shards/a1", bytes=1, digest="00" * 16),))
    while "read-back-failed" not in node.log.read_text():
        node.pause()
    assert node.stop() == 0
