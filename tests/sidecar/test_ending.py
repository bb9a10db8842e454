"""A sidecar that is told to end ends, whatever does not answer, and begins nothing more."""

from __future__ import annotations

import asyncio
import shutil
from typing import NoReturn

import pytest
from tests.sidecar.test_config import config
from tests.sidecar.test_performer import parts_of
from tests.support.coordinator_stub import CoordinatorStub
from tests.support.scripted_trainer import ScriptedTrainer
from tests.support.sidecar_node import MakeNode, Node

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


def test_told_to_end_it_serves_until_the_last_snapshot_is_safe_elsewhere(
    nodes: MakeNode, stub: CoordinatorStub
) -> None:
    """A snapshot that comes after the signal is still taken, and copied to a peer."""
    owner, holder = nodes("a"), nodes("b")
    owner.start("--grace", "60")
    holder.start()
    stub.wait("a", lambda _: True, what="inventory")
    stub.place(("a", "b"))
    with ScriptedTrainer(owner.socket) as trainer:
        trainer.begin(stub)
        trainer.announce()
        trainer.snapshot(1)
        owner.terminate()
        trainer.snapshot(2)
        stub.wait_copy("b", "peer", 2)
        assert "ends" not in owner.log.read_text()
    stub.change(protected_step=1)
    until(owner, "told to end")
    assert owner.process is not None
    assert owner.process.status() is None, "step 2 is not protected yet"
    stub.change(protected_step=2)
    until(owner, "ends: nothing is left to save")
    assert owner.ended() == 0


def test_the_grace_has_an_end(nodes: MakeNode, stub: CoordinatorStub) -> None:
    node = nodes()
    node.start("--grace", "0.3")
    stub.wait("a", lambda _: True, what="inventory")
    with ScriptedTrainer(node.socket) as trainer:
        trainer.begin(stub)
        node.terminate()
        until(node, "ends, for its grace of 0.3 s is over: 1 trainers are connected")
        assert node.ended() == 0


def test_told_twice_it_ends_at_once(nodes: MakeNode, stub: CoordinatorStub) -> None:
    node = nodes()
    node.start("--grace", "60")
    stub.wait("a", lambda _: True, what="inventory")
    with ScriptedTrainer(node.socket) as trainer:
        trainer.begin(stub)
        node.terminate()
        until(node, "told to end")
        assert node.stop() == 0


def until(node: Node, said: str) -> None:
    """Wait until a node's log has these words."""
    assert node.process is not None
    while said not in node.log.read_text():
        assert node.process.status() is None, f"it has ended: {node.log.read_text()}"
        node.pause()


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
