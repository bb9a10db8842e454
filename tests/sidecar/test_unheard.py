"""A sidecar that has just begun knows nothing of what is kept until the coordinator's document has come."""

from __future__ import annotations

from tests.support.core_driver import Driver, shard, sight

from toprope.sidecar import events as on
from toprope.trainer_hooks.link.slot import SlotState


def test_a_restarted_sidecar_gives_up_no_snapshot_before_it_has_heard_what_is_kept() -> None:
    driver = Driver()
    sights = [
        sight(n, SlotState.HASHED, seq=1, step=n + 1, launch_id="aa", lock_held=True, digest=shard(n + 1).digest)
        for n in range(3)
    ]
    driver.see(*sights)
    for number in range(3):
        driver.hashed(number, number + 1)

    driver.hello(launch_id="aa")
    driver.tick(100.0)

    assert driver.granted() == []
    assert sorted(record.shard.step for record, _ in driver.core.slots.hashed() if record.shard) == [1, 2, 3]


def test_a_restarted_sidecar_holds_only_the_newest_snapshot_of_a_rank_for_its_peer() -> None:
    driver = Driver()
    for number in range(3):
        seen = sight(number, SlotState.HASHED, seq=1, step=number + 1, launch_id="aa", digest=shard(number + 1).digest)
        driver.see(seen)
        driver.on(on.SlotHashed(slot=number, seq=1, shard=shard(number + 1)))
    driver.attempt()
    driver.place("a", "b")

    uses = {record.shard.step: set(record.uses) for record, _ in driver.core.slots.hashed() if record.shard}

    assert uses == {1: set(), 2: set(), 3: {"peer:b"}}
