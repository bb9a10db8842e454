"""What a trainer asks for that is about to end: told to the coordinator, or done here for its last step."""

from __future__ import annotations

from tests.support.core_driver import UID, Driver, shard, sight

from toprope.coordinator.wire import Cadence, StepAsk
from toprope.sidecar import effects as do
from toprope.sidecar import events as on
from toprope.trainer_hooks.link import wire
from toprope.trainer_hooks.link.slot import SlotState

SELDOM = Cadence(from_step=0, every=1, local_every=100, object_every=100)


def training() -> Driver:
    driver = Driver()
    driver.train()
    driver.frame(wire.Join(attempt_uid=UID))
    driver.want(cadence=SELDOM)
    return driver


def ask(driver: Driver, *, after: int, step: int, uid: str = UID) -> None:
    driver.frame(wire.Ask(attempt_uid=uid, after=after, step=step))


def told(driver: Driver) -> StepAsk | None:
    (rank,) = driver.inventory.ranks
    return rank.ask


def stored(driver: Driver) -> tuple[list[int], list[int]]:
    """Return the steps that are sent on their way to the local and the object tier."""
    return (
        [effect.shard.step for effect in driver.all(do.StoreLocal)],
        [effect.shard.step for effect in driver.all(do.StoreObject)],
    )


def test_a_step_to_come_is_told_to_the_coordinator_until_the_next_attempt() -> None:
    driver = training()
    assert told(driver) is None
    ask(driver, after=5, step=9)
    assert told(driver) == StepAsk(after=5, step=9)
    ask(driver, after=9, step=12)
    assert told(driver) == StepAsk(after=9, step=12)
    driver.frame(wire.Join(attempt_uid="2b" * 16))
    assert told(driver) is None


def test_it_is_still_told_when_the_trainer_has_gone_and_not_of_its_next_launch() -> None:
    driver = training()
    ask(driver, after=5, step=9)
    driver.on(on.ConnectionClosed(connection=1))
    assert told(driver) == StepAsk(after=5, step=9)
    driver.hello(connection=2, launch_id="bb")
    assert told(driver) is None


def test_what_makes_no_sense_is_not_told() -> None:
    driver = training()
    ask(driver, after=5, step=9, uid="2b" * 16)
    ask(driver, after=5, step=4)
    ask(driver, after=-1, step=4)
    assert told(driver) is None


def test_the_step_that_the_coordinator_names_is_passed_on() -> None:
    driver = training()
    driver.want(extra_step=9)
    assert [frame.extra_step for frame in driver.sent(wire.Desired)] == [9]
    assert [state.extra_step for state in driver.inventory.ranks] == [9], "the next coordinator hears of it from here"


def test_a_last_step_that_is_not_due_goes_to_each_tier_when_its_trainer_asks() -> None:
    driver = training()
    driver.snapshot(0, 7)
    assert stored(driver) == ([], [])
    ask(driver, after=7, step=7)
    assert stored(driver) == ([7], [7])
    assert told(driver) is None


def test_a_last_step_that_was_asked_for_before_it_was_hashed_goes_there_then() -> None:
    driver = training()
    driver.seal(0, 7)
    ask(driver, after=7, step=7)
    assert stored(driver) == ([], [])
    driver.hashed(0, 7)
    assert stored(driver) == ([7], [7])


def test_what_was_asked_for_is_no_more_than_that_step() -> None:
    driver = training()
    driver.snapshot(0, 6)
    ask(driver, after=7, step=7)
    driver.snapshot(1, 7)
    driver.snapshot(2, 8)
    assert stored(driver) == ([], [])
    assert {s.step for _, s in driver.core.slots.hashed() if s.asked} == {7}


def test_a_restarted_sidecar_hears_of_it_again() -> None:
    """Its trainer's greeting says it once more, and the slot was adopted by its page."""
    driver = Driver()
    driver.attempt()
    driver.want(cadence=SELDOM)
    driver.see(sight(0, SlotState.SEALED, seq=1, step=7, launch_id="aa", lock_held=True))
    driver.hello()
    driver.frame(wire.Join(attempt_uid=UID))
    ask(driver, after=7, step=7)
    driver.on(on.SlotHashed(slot=0, seq=1, shard=shard(7)))
    assert stored(driver) == ([7], [7])
