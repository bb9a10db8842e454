"""Brokers that are down, silent, unwilling, unreachable or without a name: the node serves on, and connects later."""

from __future__ import annotations

import contextlib
import itertools
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.sidecar.test_broker import watching
from tests.support.coordinator_stub import CoordinatorStub
from tests.support.scripted_trainer import ScriptedTrainer
from tests.support.sidecar_node import MakeNode, Node
from tests.support.slow_names import LOOKUP_S, NAME
from tests.support.source import ROOT

from toprope.chaos.live.broker import start_broker
from toprope.chaos.live.processes import Process, free_port, wait_until

pytestmark = [pytest.mark.long, pytest.mark.slow]
NOT_AUTHORISED = b"\x20\x02\x00\x05"
"""CONNACK with return code 5."""
CONNECTS_S = 10.0


@contextmanager
def answering(port: int, answer: bytes) -> Iterator[list[float]]:
    """Take connections at a port, say this to each, and nothing more; yield the times at which they came."""
    came: list[float] = []
    held: list[socket.socket] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                came.append(time.monotonic())
                held.append(connection)
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", port)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield came
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in held:
                connection.close()


def snapshots(trainer: ScriptedTrainer, node: Node, *steps: int) -> None:
    """Take snapshots, each of which must be held a moment later."""
    for step in steps:
        began_s = time.monotonic()
        trainer.snapshot(step)
        node.wait_copy("memory", step)
        node.stub.keep(trainer.attempt_uid, step)
        assert time.monotonic() - began_s < 5.0


@pytest.mark.fault("B135")
def test_a_broker_that_is_down_silent_and_unwilling_at_first_is_connected_soon_after_it_is_well(
    nodes: MakeNode, stub: CoordinatorStub, tmp_path: Path
) -> None:
    node, port = nodes(), free_port()
    node.start("--broker", f"127.0.0.1:{port}")
    with ScriptedTrainer(node.socket) as trainer:
        trainer.begin(stub)
        trainer.announce()
        snapshots(trainer, node, 1, 2)
        with answering(port, b"") as came:
            wait_until(lambda: len(came) >= 2, what="a silent broker is tried twice", timeout_s=30.0)
            snapshots(trainer, node, 3, 4)
        with answering(port, NOT_AUTHORISED) as came:
            wait_until(lambda: len(came) >= 3, what="an unwilling broker is tried three times", timeout_s=30.0)
            snapshots(trainer, node, 5, 6)
            pauses = [after - before for before, after in itertools.pairwise(came)]
            assert min(pauses) > 0.05, "it backs off"
        broker = start_broker(port=port, directory=tmp_path, log=tmp_path / "broker.log")
        try:
            began_s = time.monotonic()
            with watching(port) as watcher:
                watcher.inventory_with(6)
            assert time.monotonic() - began_s < CONNECTS_S
        finally:
            broker.stop()
    assert "reentrant" not in node.log.read_text()


@contextmanager
def full() -> Iterator[int]:
    """Yield a port at which no connection is ever made: its queue is full, and Linux drops what knocks."""
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        port = listening.getsockname()[1]
        for _ in range(4):
            knocking = stack.enter_context(socket.socket())
            knocking.settimeout(0)
            knocking.connect_ex(("127.0.0.1", port))
        yield port


def slowest_answer_s(node: Node, copy: str, *, for_s: float) -> float:
    """Ask for a copy and the inventory again and again; return how long the slowest answer took."""
    slowest = 0.0
    until_s = time.monotonic() + for_s
    while time.monotonic() < until_s:
        for path in (copy, "/v1/inventory", "/healthz"):
            began_s = time.monotonic()
            with urllib.request.urlopen(f"{node.url}{path}", timeout=30.0) as answer:
                answer.read()
            slowest = max(slowest, time.monotonic() - began_s)
        time.sleep(0.05)
    return slowest


@pytest.mark.fault("B140")
@pytest.mark.parametrize("broker", ["unreachable", "nameless"])
def test_a_broker_that_can_not_be_reached_or_looked_up_holds_up_no_bytes(
    broker: str, nodes: MakeNode, stub: CoordinatorStub
) -> None:
    node = nodes()

    def launch(name: str, words: list[str], *, log: Path, env: dict[str, str]) -> Process:
        command = [sys.executable, str(ROOT / "tests/support/slow_names.py"), *words]
        return Process(name, command, log=log, env=env)

    node.launch = launch  # type: ignore[assignment]
    with full() as port:
        node.start("--broker", f"{NAME}:1883" if broker == "nameless" else f"127.0.0.1:{port}")
        with ScriptedTrainer(node.socket) as trainer:
            trainer.begin(stub)
            trainer.announce()
            snapshots(trainer, node, 1)
            copy = f"/v1/copies/{trainer.attempt_uid}/1/0?tier=memory"
            assert slowest_answer_s(node, copy, for_s=LOOKUP_S + 10.0) < 1.0
            snapshots(trainer, node, 2, 3)
    assert "broker" in node.log.read_text()
