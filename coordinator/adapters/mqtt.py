"""The broker: inventories and presences in, the retained Desired out. It may go away and come back at any time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import Callable, Sequence

import aiomqtt

from toprope.coordinator.extracts import Extracts, is_news
from toprope.coordinator.ports import Document
from toprope.coordinator.settings import Address
from toprope.coordinator.wire import (
    MAX_DESIRED_BYTES,
    MAX_HEALTH_BYTES,
    MAX_INVENTORY_BYTES,
    Desired,
    DocumentError,
    Health,
    Inventory,
    Presence,
    decode,
    encode,
)
from toprope.store.errors import UnavailableError, UsageError
from toprope.store.names import checked_id

_KEEPALIVE_S = 5
_TIMEOUT_S = 5.0
_AGAIN_S = 0.2
_TOLD_AT_ONCE = 64
"""So many nodes are told at a time: one by one thousands of them would take as many turns of a loop that is busy."""
_BACK_OFF_S = (0.1, 0.2, 0.5, 1.0, 2.0)
_MAX_PRESENCE_BYTES = 4096
_LOG = logging.getLogger("toprope.coordinator")


class Mqtt:
    """A ``BrokerPort``, and the loop that keeps it connected: ``run`` delivers each document that comes."""

    def __init__(
        self,
        broker: Address,
        *,
        job: str,
        topics: Sequence[str],
        deliver: Callable[[Document], None],
        connected: Callable[[], None],
    ) -> None:
        self.broker = broker
        self._topics = topics
        self.is_connected = False
        self._job = job
        self._deliver = deliver
        self._connected = connected
        self._client: aiomqtt.Client | None = None
        self._publishing: asyncio.Timeout | None = None
        self._extracts: Extracts | None = None
        self._whole = b""
        self._nodes: dict[str, Desired | None] = {}
        """Who was heard over this connection, and what each was told last."""

    async def publish(self, newest: Callable[[], Extracts]) -> None:
        """Publish the documents: to each node what it needs, where that has changed, and then the whole.

        Each node is told what is ``newest`` by then: what is decided meanwhile need not wait for the last of thousands.
        All are retained. Without a connection nothing is done: a new one publishes anew.
        """
        client = self._client
        while client is not None and self._client is client:
            extracts = self._extracts = newest()
            try:
                async with asyncio.timeout(_TIMEOUT_S) as self._publishing:
                    nodes = sorted(self._nodes)
                    for at in range(0, len(nodes), _TOLD_AT_ONCE):
                        extracts = self._extracts = newest()
                        await self._tell_all(client, nodes[at : at + _TOLD_AT_ONCE])
                        if self._client is client:  # else it is to end now
                            self._end_publishing_in(_TIMEOUT_S)
                    self._whole = encode(extracts.whole)
                    await client.publish(f"toprope/{self._job}/desired", self._whole, qos=1, retain=True)
            except (aiomqtt.MqttError, TimeoutError) as error:
                _LOG.warning(
                    "desired version %d was not published: %s",
                    extracts.whole.version,
                    str(error) or "no answer in time",
                )
            else:
                return
            finally:
                self._publishing = None  # before any pause: a time limit that is over can't be moved
            await asyncio.sleep(_AGAIN_S)

    async def _tell_all(self, client: aiomqtt.Client, nodes: Sequence[str]) -> None:
        try:
            async with asyncio.TaskGroup() as telling:
                for node in nodes:
                    telling.create_task(self._tell(client, node))
        except ExceptionGroup as group:
            raise group.exceptions[0] from group

    async def _tell(self, client: aiomqtt.Client, node: str) -> None:
        """Publish what a node needs. Nothing is waited for: the whole comes after it, and that is acknowledged."""
        if self._extracts is None:
            return
        extract, told = self._extracts.of(node), self._nodes.get(node)
        if told is not None and not is_news(extract, told):
            return
        await client.publish(f"toprope/{self._job}/nodes/{node}/desired", encode(extract), qos=0, retain=True)
        self._nodes[node] = extract

    def _end_publishing_in(self, seconds: float) -> None:
        if self._publishing is not None and not self._publishing.expired():
            self._publishing.reschedule(asyncio.get_running_loop().time() + seconds)

    async def beat(self, health: Health) -> None:
        """Publish the leader's presence, which is not retained: one that is old says nothing."""
        client = self._client
        if client is None:
            return
        with contextlib.suppress(aiomqtt.MqttError):  # the next one comes soon
            await client.publish(f"toprope/{self._job}/coordinator/presence", encode(health), qos=0, timeout=_TIMEOUT_S)

    async def run(self) -> None:
        """Stay connected until cancelled."""
        failures = 0
        while True:
            try:
                await self._serve_connection()
            except aiomqtt.MqttError as error:
                if _is_cancelled():
                    raise asyncio.CancelledError from error
                if failures == 0 or self.is_connected:
                    _LOG.warning("broker %s is away (%s); documents go by HTTP until it is back", self.broker, error)
                failures = 0 if self.is_connected else failures + 1
            finally:
                self._client, self.is_connected = None, False
                self._end_publishing_in(0.0)  # no answer will come any more
            delay_s = _BACK_OFF_S[min(failures, len(_BACK_OFF_S) - 1)]
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))  # noqa: S311 - jitter, no secret

    async def _serve_connection(self) -> None:
        client = aiomqtt.Client(
            self.broker.host,
            self.broker.port,
            identifier=f"toprope-{self._job}-coordinator-{secrets.token_hex(4)}",
            keepalive=_KEEPALIVE_S,
            timeout=_TIMEOUT_S,
        )
        client.pending_calls_threshold = 2 * _TOLD_AT_ONCE  # it warns of more calls at a time than that
        self._extracts, self._whole = None, b""
        self._nodes.clear()
        async with client:
            await client.subscribe([(f"toprope/{self._job}/{topic}", 1) for topic in self._topics])
            self._client, self.is_connected = client, True
            _LOG.info("broker %s is connected", self.broker)
            self._connected()
            async for message in client.messages:
                node = self._take(message)
                if node and node not in self._nodes:
                    self._nodes[node] = None
                    await self._tell(client, node)

    def _take(self, message: aiomqtt.Message) -> str:
        """Deliver a document; return the node that it is from, if it is from one."""
        body, topic = message.payload, str(message.topic)
        if not body or body == self._whole:  # what we have published ourselves
            return ""
        try:
            document = _document(topic, body)
        except DocumentError as error:
            _LOG.warning("a document on %s was ignored: %s", topic, error)
            return ""
        if isinstance(document, Desired):  # another coordinator's: it may have told the nodes as well
            self._nodes = dict.fromkeys(self._nodes)
        self._deliver(document)
        return document.node if isinstance(document, Inventory | Presence) else ""


def _is_cancelled() -> bool:
    """Say whether this task is to end: to leave a client may fail, and its error then hides the cancellation."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _document(topic: str, body: bytes) -> Document:
    kind = topic.rpartition("/")[2]
    if kind == "desired":
        return decode(body, Desired, limit=MAX_DESIRED_BYTES)
    node = topic.split("/")[-2]
    if topic.endswith("/coordinator/presence"):
        return decode(body, Health, limit=MAX_HEALTH_BYTES)
    if kind == "presence":
        presence = decode(body, Presence, limit=_MAX_PRESENCE_BYTES)
        _check_node(presence.node, node)
        return presence
    inventory = decode(body, Inventory, limit=MAX_INVENTORY_BYTES)
    _check_node(inventory.node, node)
    return inventory


def _check_node(said: str, topic_node: str) -> None:
    try:
        checked_id(said, what="node")
    except UsageError as error:
        raise DocumentError(str(error)) from error
    if said != topic_node:
        raise DocumentError(f"it names node {said}, its topic {topic_node}")


async def retained_url(broker: Address, *, job: str) -> str:
    """Return the url of the coordinator whose Desired is retained at a broker.

    Raises:
        UnavailableError: the broker does not answer, or has none for this job.
    """
    try:
        async with asyncio.timeout(_TIMEOUT_S), aiomqtt.Client(broker.host, broker.port, timeout=_TIMEOUT_S) as client:
            await client.subscribe(f"toprope/{job}/desired", qos=1)
            message = await anext(client.messages)
            return decode(message.payload, Desired, limit=MAX_DESIRED_BYTES).url
    except TimeoutError as error:
        raise UnavailableError(
            f"broker {broker} has no document of job {job}: is its coordinator connected?"
        ) from error
    except (aiomqtt.MqttError, DocumentError) as error:
        raise UnavailableError(f"broker {broker} does not tell where the coordinator of {job} is: {error}") from error
