"""A sidecar that is told to end ends, whatever does not answer, and begins nothing more."""

from __future__ import annotations

import asyncio
import shutil
from typing import NoReturn

import pytest
from tests.sidecar.test_config import config
from tests.sidecar.test_performer import parts_of
from tests.support.coordinator_stub import CoordinatorStub
from tests.support.sidecar_node import MakeNode

from toprope.coordinator.wire import ReadBackTask
from toprope.sidecar import events as on
from toprope.sidecar.performer import Sidecar


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


class BrokenCore:
    """A core with a bug."""

    def handle(self, _event: object) -> NoReturn:
        """Fail."""
        raise KeyError("bug")


def test_a_core_that_fails_ends_the_process_whoever_told_it() -> None:
    async def serve() -> None:
        async with asyncio.timeout(5.0), asyncio.TaskGroup() as tasks:
            parts = parts_of(BrokenCore())
            sidecar = Sidecar(config(), parts, tasks)
            with pytest.raises(KeyError):
                sidecar.post(on.Tick(now_s=0.0))  # as the task of a connection would, which is not ours
            await sidecar.stop.wait()

    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(serve())
    assert raised.group_contains(KeyError)
