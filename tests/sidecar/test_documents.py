"""What a sidecar lists comes to the coordinator, also by a broker that acknowledges it and then drops it."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

from tests.support.core_driver import Driver

from toprope.chaos.sim.loop import SimLoop
from toprope.coordinator.pacing import until_turn_s
from toprope.coordinator.wire import Desired, Inventory, OpenAnswer, OpenRequest
from toprope.sidecar.documents import HTTP_CHECK_ROUNDS, RETRY_S, Documents
from toprope.sidecar.shouts import Shouts


@dataclass
class Dropping:
    """A broker that acknowledges all that it is given, and passes nothing on."""

    given: list[int] = field(default_factory=list)

    async def publish_inventory(self, inventory: Inventory) -> bool:
        self.given.append(inventory.version)
        return True

    def connected(self) -> bool:
        return True


@dataclass
class Hearing:
    """A coordinator that answers by HTTP, and keeps what it has heard."""

    desired: Desired
    heard: list[int] = field(default_factory=list)

    async def put_inventory(self, inventory: Inventory) -> Desired:
        self.heard.append(inventory.version)
        return self.desired

    async def get_desired(self, *, newer_than: Desired | None) -> Desired:
        return self.desired

    async def open_attempt(self, request: OpenRequest) -> OpenAnswer:
        raise AssertionError(request)


def test_what_a_broker_acknowledged_and_dropped_is_heard_all_the_same() -> None:
    driver = Driver()
    driver.train()
    assert driver.core.published is not None
    broker, coordinator = Dropping(), Hearing(driver.desired)
    documents = Documents(driver.core, coordinator=coordinator, broker=broker, post=lambda _: None, shouts=Shouts())
    loop = SimLoop(random.Random(1))
    try:
        loops = [loop.create_task(one) for one in documents.loops()]
        loop.run_until_complete(asyncio.sleep(1.1 * RETRY_S * HTTP_CHECK_ROUNDS))
        assert broker.given == [driver.core.published.version]
        assert coordinator.heard == [driver.core.published.version]
        for task in loops:
            task.cancel()
    finally:
        loop.drain()
        loop.close()


def test_in_a_large_job_a_node_tells_what_is_new_in_its_turn_and_then_the_newest() -> None:
    driver = Driver()
    driver.train()
    driver.want(report_every_s=2.0)
    broker, coordinator = Dropping(), Hearing(driver.desired)
    documents = Documents(driver.core, coordinator=coordinator, broker=broker, post=lambda _: None, shouts=Shouts())
    loop = SimLoop(random.Random(1))
    try:
        publishing = loop.create_task(documents.publish())
        turn_s = until_turn_s(2.0, node="a", now_s=loop.time())
        loop.run_until_complete(asyncio.sleep(turn_s - 0.05))
        assert broker.given == []
        driver.snapshot(0, 1)
        assert driver.core.published is not None
        loop.run_until_complete(asyncio.sleep(0.1))
        assert broker.given == [driver.core.published.version]
        driver.snapshot(1, 2)
        documents.on_publish(driver.core.published)
        loop.run_until_complete(asyncio.sleep(1.8))
        assert len(broker.given) == 1
        loop.run_until_complete(asyncio.sleep(0.2))
        assert broker.given[1:] == [driver.core.published.version]
        publishing.cancel()
    finally:
        loop.drain()
        loop.close()
