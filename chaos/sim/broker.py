"""The message broker: retained documents by topic, sessions that end, last wills. A restart may forget all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

from toprope.chaos.sim.loop import Process, SimLoop
from toprope.chaos.sim.net import Net, NetError

NAME = "broker"
_ASK_S = 2.0


class Broker:
    """The broker. ``life`` grows with each restart; a session belongs to one life."""

    def __init__(self, loop: SimLoop, net: Net) -> None:
        self.loop = loop
        self.net = net
        self.process = Process(loop, NAME)
        self.retained: dict[str, msgspec.Struct] = {}
        self.clients: list[BrokerClient] = []

    def restart(self) -> None:
        """Lose all sessions, and with luck not the documents."""
        self.process.kill()
        self.process = Process(self.loop, NAME)
        if self.loop.rng.random() < 0.5:  # noqa: PLR2004 - either
            self.retained = {}
        for client in self.clients:
            client.session = False

    def take(self, topic: str, document: msgspec.Struct, retain: bool = True) -> None:  # noqa: FBT001, FBT002 - as MQTT has it
        """Keep a document, unless it is not to be retained, and pass it on."""
        if retain:
            self.retained[topic] = document
        for client in self.clients:
            if client.session:
                self.pass_on(client, document)

    def pass_on(self, client: BrokerClient, document: msgspec.Struct) -> None:
        """Let a client hear a document."""

        def heard() -> None:
            if client.process.alive:
                client.process.start(client.hear(document))

        if isinstance(document, client.wants):
            self.net.send(NAME, client.where, heard)


@dataclass(slots=True, eq=False)
class BrokerClient:
    """One client. ``where`` is its place in the network, ``wants`` the kinds of documents it subscribes to."""

    broker: Broker
    process: Process
    where: str
    wants: tuple[type[msgspec.Struct], ...]
    on_document: Callable[[msgspec.Struct], None]
    on_connected: Callable[[], None]
    will: tuple[str, msgspec.Struct] | None = None
    session: bool = field(default=False)

    async def run(self) -> None:
        """Connect, and again whenever the session has ended."""
        self.broker.clients.append(self)
        self.process.at_death(self._died)
        try:
            while True:
                if not self.session:
                    await self._connect()
                elif self._is_cut_off():
                    self.session = False
                await asyncio.sleep(1.0)
        finally:
            self._gone()

    def _is_cut_off(self) -> bool:
        return self.broker.net.is_cut(self.where, NAME) or self.broker.net.is_cut(NAME, self.where)

    async def _connect(self) -> None:
        async def work() -> bool:
            self.session = True
            for _, document in sorted(self.broker.retained.items(), key=lambda item: item[0]):
                self.broker.pass_on(self, document)
            return True

        try:
            await self._ask(work)
        except NetError:
            return
        self.on_connected()

    async def _ask(self, work: Callable[[], Awaitable[bool]]) -> bool:
        return await self.broker.net.call(
            self.where,
            NAME,
            process=lambda: self.broker.process,
            work=work,
            timeout_s=_ASK_S,
        )

    async def publish(self, topic: str, document: msgspec.Struct, *, retain: bool = True) -> bool:
        """Publish a document; say whether the broker has it."""
        if not self.session:
            return False

        async def work() -> bool:
            self.broker.take(topic, document, retain)
            return True

        try:
            return await self._ask(work)
        except NetError:
            return False

    async def hear(self, document: msgspec.Struct) -> None:
        """Take in a document, if the session still is."""
        if self.session:
            self.on_document(document)

    def _died(self) -> None:
        if self.session and self.will is not None:
            self.broker.loop.outside(self.broker.loop.rng.uniform(0.0, 3.0), self.broker.take, *self.will)
        self._gone()

    def _gone(self) -> None:
        self.session = False
        if self in self.broker.clients:
            self.broker.clients.remove(self)
