"""The coordinator's connection to a broker: it ends when told to, whatever the broker does meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, ClassVar, Self

import aiomqtt
import pytest
from tests.coordinator.test_extracts import WHOLE

from toprope.coordinator.adapters import mqtt
from toprope.coordinator.extracts import Extracts
from toprope.coordinator.performer import ended
from toprope.coordinator.settings import Address


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


async def connected(loop: asyncio.TaskGroup) -> asyncio.Task[None]:
    reached = asyncio.Event()
    client = mqtt.Mqtt(
        Address(host="broker", port=1), job="job", topics=(), deliver=lambda _: None, connected=reached.set
    )
    running = loop.create_task(client.run())
    await reached.wait()
    return running


def test_a_broker_that_dies_with_the_coordinator_does_not_keep_it_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiomqtt, "Client", DeadBroker)

    async def told_once() -> None:
        async with asyncio.timeout(5.0), asyncio.TaskGroup() as tasks:
            running = await connected(tasks)
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
            publishing = tasks.create_task(client.publish(Extracts(WHOLE)))
            await again.wait()
            assert not running.done()
            running.cancel()
            await publishing

    asyncio.run(published())


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
