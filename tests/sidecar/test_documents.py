"""What a sidecar lists comes to the coordinator, also by a broker that acknowledges it and then drops it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from tests.support.core_driver import Driver

from toprope.chaos.sim.loop import SimLoop
from toprope.coordinator.wire import Desired, Inventory, OpenAnswer, OpenRequest
from toprope.sidecar import events as on
from toprope.sidecar.documents import HTTP_CHECK_ROUNDS, RETRY_S, Documents
from toprope.sidecar.inventory import until_turn_s
from toprope.sidecar.shouts import Shouts

TURN_S = 2.0


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


@contextmanager
def publishing(driver: Driver) -> Iterator[tuple[SimLoop, Dropping, Documents]]:
    """Publish what a node of a large job has, whose turn has just been."""
    broker, coordinator = Dropping(), Hearing(driver.desired)
    documents = Documents(driver.core, coordinator=coordinator, broker=broker, post=lambda _: None, shouts=Shouts())
    loop = SimLoop(random.Random(1))
    try:
        loop.run_until_complete(asyncio.sleep(until_turn_s(TURN_S, node="a", now_s=loop.time()) + 0.1))
        task = loop.create_task(documents.publish())
        loop.run_until_complete(asyncio.sleep(0.1))
        yield loop, broker, documents
        task.cancel()
    finally:
        loop.drain()
        loop.close()


def large() -> Driver:
    driver = Driver()
    driver.train()
    driver.snapshot(2, 1)
    driver.want(report_every_s=TURN_S)
    return driver


def newest(driver: Driver, documents: Documents) -> int:
    """Say that there is something new, and return its version."""
    assert driver.core.published is not None
    documents.on_publish(driver.core.published)
    return driver.core.published.version


def test_in_a_large_job_a_node_tells_of_copies_in_its_turn_and_then_of_all_that_came_meanwhile() -> None:
    driver = large()
    with publishing(driver) as (loop, broker, documents):
        first = newest(driver, documents)
        assert broker.given == [first], "what a node has at first is told at once"
        driver.snapshot(0, 2)
        newest(driver, documents)
        loop.run_until_complete(asyncio.sleep(1.0))
        driver.snapshot(1, 3)
        last = newest(driver, documents)
        loop.run_until_complete(asyncio.sleep(TURN_S - 1.4))
        assert broker.given == [first]
        assert documents.is_untold()
        loop.run_until_complete(asyncio.sleep(0.4))
        assert broker.given == [first, last]
        assert not documents.is_untold()


def test_what_a_restart_waits_for_is_told_at_once_also_in_a_large_job() -> None:
    driver = large()
    with publishing(driver) as (loop, broker, documents):
        driver.snapshot(0, 2)
        newest(driver, documents)
        loop.run_until_complete(asyncio.sleep(0.1))
        assert len(broker.given) == 1
        driver.on(on.ConnectionClosed(connection=1))
        driver.hello(connection=2, launch_id="bb")
        last = newest(driver, documents)
        loop.run_until_complete(asyncio.sleep(0.1))
        assert broker.given[1:] == [last]


def test_a_sidecar_that_is_about_to_end_tells_at_once_what_it_has() -> None:
    driver = large()
    with publishing(driver) as (loop, broker, documents):
        driver.snapshot(0, 2)
        last = newest(driver, documents)
        loop.run_until_complete(asyncio.sleep(0.1))
        assert len(broker.given) == 1
        documents.hurry()
        loop.run_until_complete(asyncio.sleep(0.1))
        assert broker.given[1:] == [last]


def test_each_node_of_a_large_job_has_a_turn_of_its_own_and_they_lie_evenly() -> None:
    assert until_turn_s(0.0, node="n1", now_s=7.3) == 0.0
    waits = sorted(until_turn_s(2.0, node=f"n{number:05d}", now_s=7.3) for number in range(2048))
    assert 0.0 <= waits[0] < waits[-1] < 2.0
    in_each_tenth = [sum(0.2 * tenth <= wait < 0.2 * (tenth + 1) for wait in waits) for tenth in range(10)]
    assert all(150 < count < 260 for count in in_each_tenth)
    wait_s = until_turn_s(2.0, node="n00007", now_s=7.3)
    assert until_turn_s(2.0, node="n00007", now_s=9.3) == pytest.approx(wait_s), "the same moment, round after round"
