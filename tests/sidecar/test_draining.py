"""What a sidecar that is told to end has still to see to, reason by reason."""

from __future__ import annotations

from tests.support.core_driver import UID, Driver, shard

from toprope.coordinator.wire import Cadence, Kept
from toprope.sidecar import events as on
from toprope.sidecar.draining import left_to_do
from toprope.trainer_hooks.link import wire


def alone() -> Driver:
    """Return a node whose trainer has ended after it sealed step 5, which is hashed and due in no slow tier."""
    driver = Driver()
    driver.train()
    driver.frame(wire.Join(attempt_uid=UID))
    driver.seal(0, 5)
    assert left(driver) == "1 trainers are connected"
    driver.on(on.ConnectionClosed(connection=1))
    assert left(driver) == "a snapshot is being hashed"
    driver.hashed(0, 5)
    return driver


def left(driver: Driver) -> str:
    core = driver.core
    return left_to_do("a", core.desired, slots=core.slots, tiers=core.tiers, conversation=core.conversation)


def test_what_nobody_is_to_hold_a_copy_of_is_not_waited_for() -> None:
    driver = alone()
    assert left(driver) == ""
    driver.place("b", "a")
    assert left(driver) == "", "a holds for b, and nobody for a"


def test_a_step_that_a_peer_is_to_copy_is_waited_for_until_it_is_protected() -> None:
    driver = alone()
    driver.place("a", "b")
    driver.want(protected_step=4)
    assert left(driver) == "step 5 of rank 0 is not protected"
    driver.want(protected_step=5)
    assert left(driver) == ""


def test_a_step_that_the_job_has_dropped_is_not_waited_for() -> None:
    driver = alone()
    driver.place("a", "b")
    driver.want(dropped=(Kept(attempt_uid=UID, step=5),))
    assert left(driver) == ""


def test_what_is_on_its_way_to_a_slower_tier_is_waited_for_though_it_is_protected() -> None:
    driver = alone()
    driver.want(protected_step=5)
    assert left(driver) == ""
    driver.want(cadence=Cadence(from_step=0, every=1, local_every=5, object_every=100))
    assert left(driver) == "step 5 of rank 0 is on its way to a slower tier"
    driver.on(on.LocalStored(shard=shard(5), path="/local/5", slot=0))
    assert left(driver) == ""
