"""The documents of a sidecar: its inventory up, the coordinator's down, by broker and by HTTP, until cancelled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from toprope.coordinator.wire import TIERS, Desired, Inventory, Skip
from toprope.sidecar import events as on
from toprope.sidecar import metrics
from toprope.sidecar.core import Core
from toprope.sidecar.events import Event
from toprope.sidecar.inventory import is_urgent, until_turn_s
from toprope.sidecar.ports import BrokerPort, CoordinatorError, CoordinatorPort
from toprope.sidecar.shouts import Shouts

HTTP_REPORT_AFTER_S = 1.0
HTTP_REPORT_EVERY_S = 1.0
HTTP_CHECK_ROUNDS = 10
RETRY_S = 0.5


class Documents:
    """Carries what the core publishes to those who want it, and what the coordinator says to the core."""

    def __init__(
        self,
        core: Core,
        *,
        coordinator: CoordinatorPort,
        broker: BrokerPort,
        post: Callable[[Event], None],
        shouts: Shouts,
    ) -> None:
        self._core = core
        self._coordinator = coordinator
        self._broker = broker
        self._post = post
        self._shouts = shouts
        self._changed = asyncio.Event()
        self._hurries = False
        self._told: Inventory | None = None
        """What was told last, by broker or by HTTP, and acknowledged."""
        self._broker_version = 0
        self._skips: frozenset[Skip] = frozenset()

    def loops(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """Return the work that goes on until the end."""
        return self.publish(), self.report(), self.watch_desired()

    async def fetch(self) -> None:
        """Ask the coordinator for its document now."""
        with self._asking():
            self.take_desired(await self._coordinator.get_desired(newer_than=None))
            self._post(on.DesiredConfirmed())

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except CoordinatorError as error:
            metrics.COORDINATOR_UP.set(0)
            self._shouts.shout("coordinator-away", str(error))
        else:
            metrics.COORDINATOR_UP.set(1)

    def take_desired(self, desired: Desired) -> None:
        """Take in the coordinator's document."""
        self._post(on.DesiredArrived(desired=desired))
        metrics.PROTECTED_STEP.set(desired.protected_step)
        metrics.READY_STEP.set(desired.ready_step)

    def on_publish(self, inventory: Inventory) -> None:
        """Count what the new inventory says, and wake those who wait for it."""
        skips = frozenset(inventory.skipped)
        for skip in skips - self._skips:
            metrics.SKIPS.labels(rank=str(skip.rank)).inc()
        self._skips = skips
        for tier in TIERS:
            metrics.COPIES.labels(tier=tier).set(sum(copy.tier == tier for copy in inventory.copies))
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def inventory_after(self, after: int, wait_s: float) -> Inventory | None:
        """Return the inventory once it is not version ``after``, or as it is after ``wait_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while (newest := self._core.published) is None or newest.version == after:
                    await self._changed.wait()
        return self._core.published

    async def publish(self) -> None:
        """Publish each inventory to the broker, the newest only if they come faster than it acknowledges."""
        while True:
            changed, newest = self._changed, self._core.published
            if newest is None or newest.version == self._broker_version:
                await changed.wait()
                continue
            newest = await self._in_turn(newest)
            if await self._broker.publish_inventory(newest):
                self._broker_version, self._told = newest.version, newest
            else:
                await asyncio.sleep(RETRY_S)

    def _report_every_s(self) -> float:
        desired = self._core.desired
        return desired.report_every_s if desired is not None else 0.0

    def hurry(self) -> None:
        """Tell all that is to be told at once from now on: this sidecar is about to end."""
        self._hurries = True
        self._wake()

    def is_untold(self) -> bool:
        """Say whether there is something that nobody has acknowledged yet."""
        newest = self._core.published
        return newest is not None and (self._told is None or self._told.version < newest.version)

    async def _in_turn(self, newest: Inventory) -> Inventory:
        """Return the newest inventory when it may be told: in a large job in the node's turn, unless it is urgent."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + until_turn_s(self._report_every_s(), node=newest.node, now_s=loop.time())
        while loop.time() < due_s and not self._hurries and not is_urgent(newest, self._told):
            changed = self._changed
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due_s):
                    await changed.wait()
            assert self._core.published is not None
            newest = self._core.published
        return newest

    async def report(self) -> None:
        """Tell the coordinator by HTTP what no broker takes: in turn without one, later by a second with a slow one."""
        reported = 0
        while True:
            changed, newest = self._changed, self._core.published
            if newest is None or newest.version in {reported, self._broker_version}:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(HTTP_REPORT_EVERY_S):
                        await changed.wait()
                reported = reported if self._broker.connected() else 0
                continue
            if self._broker.connected():
                await asyncio.sleep(HTTP_REPORT_AFTER_S + self._report_every_s())
                if self._broker_version >= newest.version:
                    continue
            newest = await self._in_turn(newest)
            if self._broker.connected() and self._broker_version >= newest.version:
                continue
            with self._asking():
                self.take_desired(await self._coordinator.put_inventory(newest))
                reported, self._told = newest.version, newest
            if reported != newest.version:
                await asyncio.sleep(RETRY_S)

    async def watch_desired(self) -> None:
        """Hear the coordinator's document by HTTP: at once while no broker brings it, now and then while one does.

        For the broker may be connected here and cut off from the coordinator, or drop what it had acknowledged, since
        too much waits for the coordinator already. So what was published is told again then.
        """
        while True:
            before = self._core.desired
            if self._broker.connected():
                for _ in range(HTTP_CHECK_ROUNDS):
                    await asyncio.sleep(RETRY_S + self._report_every_s())
                    if not self._broker.connected():
                        break
                before = None
            published = self._core.published if before is None else None
            with self._asking():
                if published is not None:
                    self.take_desired(await self._coordinator.put_inventory(published))
                else:
                    self.take_desired(await self._coordinator.get_desired(newer_than=before))
            if self._core.desired is before:
                await asyncio.sleep(RETRY_S)
