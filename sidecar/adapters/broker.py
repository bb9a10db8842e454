"""The MQTT broker: this node's documents up, the coordinator's document down; connected again whenever it is lost.

A broker may forget what it retained, so each connection begins by publishing all anew. The client is new for each
connection, its id and its last will name this life of the sidecar: a successor is never thrown off or declared dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable

import aiomqtt

from toprope.coordinator.settings import Address
from toprope.coordinator.wire import MAX_DESIRED_BYTES, Desired, DocumentError, Inventory, Presence, decode, encode
from toprope.sidecar import metrics

KEEPALIVE_S = 5
TIMEOUT_S = 5.0
BACK_OFF_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

log = logging.getLogger("toprope.sidecar")


class MqttBroker:
    """Keeps one connection to the broker for as long as ``run`` runs."""

    def __init__(
        self,
        address: Address,
        *,
        job: str,
        presence: Presence,
        newest: Callable[[], Inventory | None],
    ) -> None:
        self._address = address
        self._job = job
        self._presence = presence
        self._newest = newest
        self._client: aiomqtt.Client | None = None
        self._publishing: asyncio.Timeout | None = None
        self._random = random.SystemRandom()

    async def publish_inventory(self, inventory: Inventory) -> bool:
        """Publish the document; say whether the broker has acknowledged it."""
        client = self._client
        if client is None:
            return False
        try:
            async with asyncio.timeout(TIMEOUT_S) as self._publishing:
                await client.publish(self._topic("inventory"), encode(inventory), qos=1, retain=True)
        except (aiomqtt.MqttError, TimeoutError):
            return False
        finally:
            self._publishing = None
        return True

    def connected(self) -> bool:
        """Say whether there is a connection right now."""
        return self._client is not None

    async def run(self, on_desired: Callable[[Desired], None]) -> None:
        """Connect, serve, and connect again, until cancelled; ``on_desired`` learns what the coordinator says."""
        failures = 0
        while True:
            try:
                await self._serve(on_desired)
            except (aiomqtt.MqttError, OSError, TimeoutError) as error:
                if _is_cancelled():
                    raise asyncio.CancelledError from error
                failures = 0 if self._client is not None else failures + 1
                log.warning("broker %s:%d: %s", self._address.host, self._address.port, error)
            finally:
                self._client = None
                if self._publishing is not None and not self._publishing.expired():  # no answer will come any more
                    self._publishing.reschedule(asyncio.get_running_loop().time())
                metrics.BROKER_UP.set(0)
            delay = BACK_OFF_S[min(failures, len(BACK_OFF_S) - 1)]
            await asyncio.sleep(delay * self._random.uniform(0.5, 1.0))

    async def _serve(self, on_desired: Callable[[Desired], None]) -> None:
        gone = Presence(
            node=self._presence.node,
            boot_id=self._presence.boot_id,
            incarnation=self._presence.incarnation,
            alive=False,
        )
        async with aiomqtt.Client(
            self._address.host,
            self._address.port,
            identifier=f"toprope-{self._job}-{self._presence.node}-{self._presence.incarnation}",
            will=aiomqtt.Will(self._topic("presence"), encode(gone), qos=1, retain=True),
            keepalive=KEEPALIVE_S,
            timeout=TIMEOUT_S,
        ) as client:
            try:
                await self._converse(client, on_desired)
            except asyncio.CancelledError:
                with contextlib.suppress(aiomqtt.MqttError, TimeoutError):
                    await client.publish(self._topic("presence"), encode(gone), qos=1, retain=True, timeout=1.0)
                raise

    async def _converse(self, client: aiomqtt.Client, on_desired: Callable[[Desired], None]) -> None:
        await client.publish(self._topic("presence"), encode(self._presence), qos=1, retain=True)
        await client.subscribe(self._topic("desired"), qos=1)
        self._client = client
        metrics.BROKER_UP.set(1)
        log.info("broker %s:%d: connected", self._address.host, self._address.port)
        inventory = self._newest()
        if inventory is not None:
            await client.publish(self._topic("inventory"), encode(inventory), qos=1, retain=True)
        async for message in client.messages:
            _take(message, on_desired)

    def _topic(self, last: str) -> str:
        return f"toprope/{self._job}/nodes/{self._presence.node}/{last}"


def _take(message: aiomqtt.Message, on_desired: Callable[[Desired], None]) -> None:
    try:
        on_desired(decode(message.payload, Desired, limit=MAX_DESIRED_BYTES))
    except DocumentError as error:
        log.warning("broker: document on %s ignored: %s", message.topic, error)


def _is_cancelled() -> bool:
    """Say whether this task is to end: to leave a client may fail, and its error then hides the cancellation."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
