"""The broker, the coordinators and people, as a simulated sidecar reaches them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from toprope.chaos.sim.broker import BrokerClient
from toprope.chaos.sim.net import NetError
from toprope.coordinator.wire import Desired, Inventory, OpenAnswer, OpenRequest
from toprope.sidecar.ports import CoordinatorError
from toprope.sidecar.shouts import Shouts

if TYPE_CHECKING:
    from toprope.chaos.sim.coordinator import Host
    from toprope.chaos.sim.sidecar import SimSidecar
    from toprope.chaos.sim.world import World

T = TypeVar("T")
ASK_S = 3.0
POLL_S = 5.0
_OPEN_S = 65.0


@dataclass(frozen=True, slots=True)
class Link:
    """The broker as a sidecar has it: a ``BrokerPort``."""

    client: BrokerClient

    async def publish_inventory(self, inventory: Inventory) -> bool:
        """Publish the document."""
        return await self.client.publish(f"inventory/{inventory.node}", inventory)

    def connected(self) -> bool:
        """Say whether there is a session."""
        return self.client.session


@dataclass(frozen=True, slots=True)
class Coordinators:
    """The coordinators as a sidecar reaches them, the one of its document first: a ``CoordinatorPort``."""

    car: SimSidecar

    async def put_inventory(self, inventory: Inventory) -> Desired:
        """Tell it what this node holds."""
        return await self._ask(lambda host: host.put_inventory(inventory), timeout_s=ASK_S)

    async def get_desired(self, *, newer_than: Desired | None) -> Desired:
        """Return its document."""
        at = (newer_than.term, newer_than.version) if newer_than is not None else None
        node = self.car.node.name
        return await self._ask(lambda host: host.get_desired(at, node=node), timeout_s=POLL_S + 2.0)

    async def open_attempt(self, request: OpenRequest) -> OpenAnswer:
        """Ask for an attempt."""
        return await self._ask(lambda host: host.open(request), timeout_s=_OPEN_S)

    async def _ask(self, work: Callable[[Host], Awaitable[T]], *, timeout_s: float) -> T:
        car = self.car
        try:
            return await car.world.ask_coordinator(car.node.name, car.core.coordinator_url(), work, timeout_s=timeout_s)
        except NetError as error:
            raise CoordinatorError(str(error)) from error


class SimShouts(Shouts):
    """What costs protection, said in the trace: the real one goes by a clock."""

    def __init__(self, world: World, who: str) -> None:
        super().__init__()
        self._world = world
        self._who = who

    def shout(self, kind: str, text: str) -> None:
        """Note it."""
        self._world.trace.note(self._who, f"{kind}: {text}")
        self._world.trace.sometimes(f"shout: {kind}")
