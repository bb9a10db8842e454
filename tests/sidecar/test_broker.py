"""A sidecar and a real broker that comes and goes: documents are there anew, and nothing waits for them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion
from tests.support.coordinator_stub import CoordinatorStub
from tests.support.scripted_trainer import ScriptedTrainer
from tests.support.sidecar_node import MakeNode

from toprope.chaos.live.broker import start_broker
from toprope.chaos.live.processes import Process, free_port
from toprope.coordinator.wire import MAX_INVENTORY_BYTES, Desired, Inventory, Presence, decode, encode


class Watcher:
    """A client that collects what is published under the job's topics."""

    def __init__(self, port: int, *, job: str = "job") -> None:
        self.node = f"toprope/{job}/nodes/a"
        self.heard: queue.Queue[tuple[str, bytes]] = queue.Queue()
        subscribed = threading.Event()
        self.client = paho.Client(CallbackAPIVersion.VERSION2)
        self.client.on_message = lambda _client, _data, message: self.heard.put((message.topic, bytes(message.payload)))
        self.client.on_subscribe = lambda *_: subscribed.set()
        self.client.connect("127.0.0.1", port)
        self.client.loop_start()
        self.client.subscribe(f"toprope/{job}/#", qos=1)
        assert subscribed.wait(10.0)

    def presence(self, *, alive: bool) -> Presence:
        """Return the next presence that says so."""
        while True:
            topic, body = self.heard.get(timeout=20.0)
            if topic == f"{self.node}/presence":
                presence = decode(body, Presence, limit=MAX_INVENTORY_BYTES)
                if presence.alive is alive:
                    return presence

    def inventory_with(self, step: int) -> Inventory:
        """Return the next inventory that lists a memory copy of a step."""
        while True:
            topic, body = self.heard.get(timeout=20.0)
            if topic == f"{self.node}/inventory":
                inventory = decode(body, Inventory, limit=MAX_INVENTORY_BYTES)
                if any((copy.step, copy.tier) == (step, "memory") for copy in inventory.copies):
                    return inventory

    def say(self, desired: Desired) -> None:
        """Publish the coordinator's document."""
        self.client.publish(f"{self.node}/desired", encode(desired), qos=1, retain=True).wait_for_publish(10.0)


@contextmanager
def watching(port: int, *, job: str = "job") -> Iterator[Watcher]:
    watcher = Watcher(port, job=job)
    try:
        yield watcher
    finally:
        watcher.client.disconnect()
        watcher.client.loop_stop()
        watcher.client._reset_sockets()  # else its wake-up pair is left to the garbage collector, which warns


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    chosen = free_port()
    started.append(begin_broker(chosen, tmp_path))
    yield chosen
    while started:
        started.pop().stop()


started: list[Process] = []


def begin_broker(port: int, directory: Path) -> Process:
    return start_broker(port=port, directory=directory, log=directory / "broker.log")


def test_documents_are_published_again_to_a_broker_that_forgot_them(
    nodes: MakeNode, stub: CoordinatorStub, port: int, tmp_path: Path
) -> None:
    node = nodes()
    started.pop().kill()
    node.start("--broker", f"127.0.0.1:{port}")
    with ScriptedTrainer(node.socket) as trainer:
        trainer.begin(stub)
        trainer.announce()
        trainer.snapshot(1)
        started.append(begin_broker(port, tmp_path))
        with watching(port) as watcher:
            watcher.inventory_with(1)
        started.pop().kill()
        trainer.snapshot(2)
        node.wait_copy("memory", 2)
        stub.wait_copy("a", "memory", 2)
        started.append(begin_broker(port, tmp_path))
        with watching(port) as watcher:
            assert watcher.inventory_with(2).version > 0
        with watching(port) as watcher:
            presence = watcher.presence(alive=True)
        assert presence.incarnation == stub.inventories["a"].incarnation


def test_a_killed_sidecar_is_told_dead_by_its_will_and_one_that_ends_says_so(
    nodes: MakeNode, stub: CoordinatorStub, port: int
) -> None:
    node = nodes()
    with watching(port) as watcher:
        node.start("--broker", f"127.0.0.1:{port}")
        first = watcher.presence(alive=True)
        node.kill()
        assert watcher.presence(alive=False).incarnation == first.incarnation
        node.start("--broker", f"127.0.0.1:{port}")
        second = watcher.presence(alive=True)
        assert (second.boot_id, second.incarnation == first.incarnation) == (first.boot_id, False)
        assert node.stop() == 0
        assert watcher.presence(alive=False).incarnation == second.incarnation


def test_the_document_is_heard_by_the_broker_while_the_coordinator_does_not_answer(
    nodes: MakeNode, stub: CoordinatorStub, port: int
) -> None:
    node = nodes()
    stub.away = True
    with watching(port) as watcher:
        watcher.say(stub.desired)
        node.start("--broker", f"127.0.0.1:{port}")
        with ScriptedTrainer(node.socket) as trainer:
            view = stub.attempt(1, "aa", {0: "a"})
            watcher.say(stub.desired)
            trainer.join(1, view.uid)
            stub.phase("applied")
            watcher.say(stub.desired)
            trainer.announce()
            trainer.snapshot(1)
            watcher.inventory_with(1)


def test_a_sidecar_starts_and_serves_without_broker_and_coordinator(nodes: MakeNode, stub: CoordinatorStub) -> None:
    node = nodes()
    stub.away = True
    node.start("--broker", f"127.0.0.1:{free_port()}")
    with ScriptedTrainer(node.socket) as trainer:
        assert trainer.welcome.node == "a"
    assert node.stop() == 0
