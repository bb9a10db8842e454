"""Coordinators: the real performer, core, log and store adapter, in simulated processes.

Simulated: the HTTP server in front of it (a call of the network that ends in the same methods) and the MQTT client.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import msgspec

from toprope.chaos.sim.broker import BrokerClient
from toprope.chaos.sim.loop import Process
from toprope.chaos.sim.net import NetError
from toprope.chaos.sim.options import Options
from toprope.chaos.sim.oracle import HOLD_TTL_S
from toprope.coordinator.adapters.objects import ThreadedStore, collected
from toprope.coordinator.config import Config
from toprope.coordinator.extracts import Extracts
from toprope.coordinator.performer import BROKER_TOPICS
from toprope.coordinator.ports import BrokerPort, Document, Ports
from toprope.coordinator.serving import NotLeadingError
from toprope.coordinator.settings import Address
from toprope.coordinator.terms import Terms
from toprope.coordinator.wire import (
    Cadence,
    Desired,
    Health,
    Inventory,
    OpenAnswer,
    OpenRequest,
    Presence,
    Provisional,
)
from toprope.store.errors import CkptError
from toprope.store.keep.changes import ChangeAnswer, ChangeRequest
from toprope.store.keep.gc import GcPlan
from toprope.store.keep.holds import HoldWatch
from toprope.store.log.fold import JobState

if TYPE_CHECKING:
    from toprope.chaos.sim.world import World

VERDICT_DEADLINE_S = 40.0
_POLL_S = 4.0
_PATIENCE_S = 2.0
_TRIES = 20


class Host:
    """One coordinator process. ``url`` names it in documents; ``name`` is its place in the network.

    One that is ``deaf`` hears of no leader until it has been one, and so takes the place of one that lives.
    """

    def __init__(self, world: World, number: int, *, deaf: bool) -> None:
        self.deaf = deaf
        self._has_led = False
        self.name = f"c{number}"
        self.url = f"http://{self.name}"
        self.process = Process(world.loop, self.name)
        self._world = world
        options = world.options
        cadence = Cadence(
            from_step=0, every=options.every, local_every=options.local_every, object_every=options.object_every
        )
        self._real = Terms(_config(world.job, cadence, options), wall_s=lambda: int(world.loop.time()))
        self._stop = asyncio.Event()

    def start(self) -> None:
        """Begin to reign."""
        self.process.start(self._live())

    @property
    def leads(self) -> bool:
        """Say whether it reigns, or believes so."""
        return self._real.reign is not None

    def retire(self) -> None:
        """Take in nothing more: the history is over."""
        if self._real.reign is not None:
            self._real.reign.core = None

    async def _live(self) -> None:
        ports = Ports(
            store=_Store(self._world),
            nodes=_Nodes(self, self._world),
            coordinators=_Others(self, self._world),
            connect=self._connect,
        )
        await self._real.run(ports, url=self.url, stop=self._stop, on_serving=lambda: None)
        self.process.kill()

    def _connect(
        self, topics: Sequence[str], *, deliver: Callable[[Document], None], connected: Callable[[], None]
    ) -> BrokerPort | None:
        leads = topics == BROKER_TOPICS
        if self._has_led and not leads:
            self._world.trace.sometimes("a coordinator was fenced")
        if leads:
            self.deaf, self._has_led = False, True
        if not self._world.options.broker:
            return None
        wants = (Inventory, Presence, Desired) if leads else (Health,)
        return _Link(self, self._world, wants, deliver=deliver, connected=connected)

    async def health(self, standby: str) -> Health:
        """Return what it says of itself."""
        return self._real.health(standby=standby)

    # What its HTTP server would ask

    async def put_inventory(self, inventory: Inventory) -> Desired:
        """Take in an inventory."""
        with _leading():
            self._real.heard(inventory)
            return self._desired(inventory.node)

    async def get_desired(self, newer_than: tuple[int, int] | None, *, node: str) -> Desired:
        """Return what a node needs of the document, as soon as it is newer."""
        with _leading():
            if newer_than is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_S):
                        await self._real.desired_after(*newer_than)
            return self._desired(node)

    def _desired(self, node: str) -> Desired:
        desired = self._real.desired(node=node)
        if desired is None:
            raise NetError("503: not known yet")
        return desired

    async def open(self, request: OpenRequest) -> OpenAnswer:
        """Open an attempt."""
        with _leading():
            return await self._real.open(request)

    async def change(self, request: ChangeRequest) -> ChangeAnswer:
        """Change the job; what is refused, or can't be done now, is told to who asked.

        Raises:
            NetError: it is refused, or can't be done now.
        """
        try:
            with _leading():
                return await self._real.change(request)
        except CkptError as error:
            raise NetError(str(error)) from error

    async def declare_dead(self, node: str) -> None:
        """Take in that a person says that a node is dead.

        Raises:
            NetError: it can't be taken in.
        """
        try:
            with _leading():
                self._real.declare_dead(node)
        except CkptError as error:
            raise NetError(str(error)) from error


@contextlib.contextmanager
def _leading() -> Iterator[None]:
    """Answer 409 where the leader alone can answer."""
    try:
        yield
    except NotLeadingError as error:
        raise NetError(f"409: {error}") from error


class _Link:
    """The broker as one role of a coordinator has it: a ``BrokerPort``."""

    def __init__(
        self,
        host: Host,
        world: World,
        wants: tuple[type[Inventory | Presence | Desired | Health], ...],
        *,
        deliver: Callable[[Document], None],
        connected: Callable[[], None],
    ) -> None:
        def heard(document: msgspec.Struct) -> None:
            assert isinstance(document, Inventory | Presence | Desired | Health)
            if not (host.deaf and isinstance(document, Health)):
                deliver(document)

        self._client = BrokerClient(
            broker=world.broker,
            process=host.process,
            where=host.name,
            wants=wants,
            on_document=heard,
            on_connected=connected,
        )

    @property
    def is_connected(self) -> bool:
        """Say whether there is a session."""
        return self._client.session

    async def run(self) -> None:
        """Keep connected."""
        await self._client.run()

    async def publish(self, newest: Callable[[], Extracts]) -> None:
        """Publish the whole document."""
        extracts = newest()
        for _ in range(_TRIES):
            if not self._client.session or await self._client.publish("desired", extracts.whole):
                return
            await asyncio.sleep(0.5)

    async def beat(self, health: Health) -> None:
        """Publish the leader's presence."""
        if self._client.session:
            await self._client.publish("coordinator/presence", health, retain=False)


class _Store(ThreadedStore):
    """The object store as a coordinator has it, with less patience for holds that do not beat."""

    def __init__(self, world: World) -> None:
        super().__init__(world.objects)
        self._world = world
        self._watch = HoldWatch(ttl_s=HOLD_TTL_S)

    async def collect_garbage(self, state: JobState, _watch: HoldWatch, *, now_s: Callable[[], float]) -> GcPlan:
        """Delete what the log has condemned."""
        work = partial(collected, self._world.objects, state, self._watch, now_s)
        plan = await self._world.loop.stepwise(work)
        self._world.rounds += 1
        if plan.held:
            self._world.trace.sometimes("a reader held what is retired")
        return plan


@dataclass(frozen=True, slots=True)
class _Nodes:
    """The sidecars as a coordinator reaches them: a ``NodesPort``."""

    host: Host
    world: World

    async def inventory(self, url: str) -> Inventory | None:
        """Ask a sidecar."""
        try:
            return await self.world.ask_sidecar(self.host.name, url, lambda car: car.inventory_now(), timeout_s=2.0)
        except NetError:
            return None

    async def adopted(self, url: str) -> tuple[Provisional, ...] | None:
        """Ask a sidecar what it has adopted."""
        self.world.trace.sometimes("a coordinator learned what was opened without the log")
        try:
            return await self.world.ask_sidecar(self.host.name, url, lambda car: car.adopted(), timeout_s=2.0)
        except NetError:
            return None


@dataclass(frozen=True, slots=True)
class _Others:
    """The other coordinators as one reaches them: a ``CoordinatorsPort``."""

    host: Host
    world: World

    async def health(self, url: str, *, standby: str) -> Health | Literal["refused", "silent"]:
        """Ask a coordinator."""
        if self.host.deaf:
            return "silent"
        try:
            return await self.world.ask_health(self.host.name, url, standby=standby, timeout_s=2.0)
        except NetError as error:
            return "refused" if str(error).endswith("connection refused") else "silent"


def _config(job: str, cadence: Cadence, options: Options) -> Config:
    return Config(
        job=job,
        store="simulated",
        listen=Address(host="127.0.0.1", port=0),
        broker=None,
        embedded_broker=None,
        cadence=cadence,
        token="",
        ready_file=None,
        verdict_deadline_s=VERDICT_DEADLINE_S,
        tick_s=1.0,
        patience_s=_PATIENCE_S,
        retain=options.retain or None,
        copies=options.copies,
        on_log_outage=options.on_log_outage,
    )
