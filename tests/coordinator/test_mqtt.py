"""The coordinator's connection to a broker: it ends when told to, whatever the broker does meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar, Self

import aiomqtt
import pytest
from msgspec import structs
from tests.coordinator.test_extracts import WHOLE

from toprope.coordinator.adapters import mqtt
from toprope.coordinator.extracts import Extracts
from toprope.coordinator.performer import ended
from toprope.coordinator.settings import Address
from toprope.coordinator.wire import Desired, decode


class DeadBroker:
    """A client whose broker is gone by the time that it is to be left: leaving it fails, as aiomqtt's does then."""

    def __init__(self, *_: Any, **__: Any) -> None:  # noqa: ANN401 - a client takes much
        self.messages = self._silence()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        raise aiomqtt.MqttError("Disconnected during disconnect")

    async def subscribe(self, _topics: object) -> None:
        """Do nothing."""

    async def _silence(self) -> AsyncIterator[aiomqtt.Message]:
        await asyncio.Event().wait()
        yield  # type: ignore[misc] # never reached: what makes this a generator


async def connected(loop: asyncio.TaskGroup) -> tuple[mqtt.Mqtt, asyncio.Task[None]]:
    reached = asyncio.Event()
    client = mqtt.Mqtt(
        Address(host="broker", port=1), job="job", topics=(), deliver=lambda _: None, connected=reached.set
    )
    running = loop.create_task(client.run())
    await reached.wait()
    return client, running


def test_a_broker_that_dies_with_the_coordinator_does_not_keep_it_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiomqtt, "Client", DeadBroker)

    async def told_once() -> None:
        async with asyncio.timeout(5.0), asyncio.TaskGroup() as tasks:
            _, running = await connected(tasks)
            running.cancel()
            await asyncio.wait([running], timeout=1.0)
            assert running.cancelled()

    asyncio.run(told_once())


class Refusing(DeadBroker):
    """A client that can't publish, and whose connection breaks soon after that."""

    breaks: ClassVar[asyncio.Event]

    async def __aexit__(self, *_: object) -> None:
        """Leave."""

    async def publish(self, *_: object, **__: object) -> None:
        asyncio.get_running_loop().call_soon(self.breaks.set)
        raise aiomqtt.MqttError("no")

    async def _silence(self) -> AsyncIterator[aiomqtt.Message]:
        heard: list[aiomqtt.Message] = []
        for message in heard:
            yield message
        await self.breaks.wait()
        self.breaks.clear()
        raise aiomqtt.MqttError("Disconnected during message iteration")


def test_a_connection_that_breaks_in_the_pause_after_a_failed_publication_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(aiomqtt, "Client", Refusing)
    monkeypatch.setattr(mqtt, "_BACK_OFF_S", (0.0,))
    monkeypatch.setattr(mqtt, "_AGAIN_S", 0.05)

    async def published() -> None:
        Refusing.breaks, first, again = asyncio.Event(), asyncio.Event(), asyncio.Event()

        def connected() -> None:
            (again if first.is_set() else first).set()

        address = Address(host="broker", port=1)
        client = mqtt.Mqtt(address, job="job", topics=(), deliver=lambda _: None, connected=connected)
        async with asyncio.timeout(5.0), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(client.run())
            await first.wait()
            client._nodes = dict.fromkeys("ab")
            publishing = tasks.create_task(client.publish(lambda: Extracts(WHOLE)))
            await again.wait()
            assert not running.done()
            running.cancel()
            await publishing

    asyncio.run(published())


class Noting(DeadBroker):
    """A client that notes what is published, and lets a test do something at each publication."""

    published: ClassVar[list[tuple[str, int]]]
    meanwhile: ClassVar[Callable[[str], None]]

    async def __aexit__(self, *_: object) -> None:
        """Leave."""

    async def publish(self, topic: str, body: bytes, **_: object) -> None:
        self.published.append((topic.split("/")[-2], decode(body, Desired, limit=len(body)).version))
        type(self).meanwhile(topic)
        await asyncio.sleep(0)


class Steady(Noting):
    """One that takes its time for each: all of them take longer than a publication may that does not go on."""

    async def publish(self, topic: str, body: bytes, **_: object) -> None:
        await asyncio.sleep(0.15)
        self.published.append((topic.split("/")[-2], len(body)))


def test_what_is_decided_while_nodes_are_told_is_told_to_those_who_come_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiomqtt, "Client", Noting)
    monkeypatch.setattr(mqtt, "_TOLD_AT_ONCE", 1)
    newest = Extracts(WHOLE)
    Noting.published = []

    def decide(topic: str) -> None:
        nonlocal newest
        if topic.endswith("b/desired"):
            newest = Extracts(structs.replace(WHOLE, version=8, protected_step=50))

    Noting.meanwhile = decide

    async def published() -> None:
        async with asyncio.timeout(5.0), asyncio.TaskGroup() as tasks:
            client, running = await connected(tasks)
            client._nodes = dict.fromkeys("abc")
            for _ in range(2):
                await client.publish(lambda: newest)
            running.cancel()

    asyncio.run(published())
    first = [("a", 7), ("b", 7), ("c", 8), ("job", 8)]
    assert Noting.published == [*first, ("a", 8), ("b", 8), ("job", 8)]


def test_telling_many_is_not_given_up_while_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(aiomqtt, "Client", Steady)
    monkeypatch.setattr(mqtt, "_TOLD_AT_ONCE", 1)
    monkeypatch.setattr(mqtt, "_TIMEOUT_S", 1.0)
    Steady.published, nodes = [], [f"n{number}" for number in range(10)]

    async def published() -> None:
        async with asyncio.timeout(30.0), asyncio.TaskGroup() as tasks:
            client, running = await connected(tasks)
            client._nodes = dict.fromkeys(nodes)
            await client.publish(lambda: Extracts(WHOLE))
            running.cancel()

    asyncio.run(published())
    assert [node for node, _ in Steady.published] == [*nodes, "job"]
    assert not caplog.records


def test_a_loop_that_loses_its_cancellation_is_told_again() -> None:
    async def deaf() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.Event().wait()

    async def told() -> None:
        async with asyncio.timeout(5.0), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(deaf())
            await asyncio.sleep(0)
            await ended({running})

    asyncio.run(told())
