"""What ``ckpt status`` is told."""

from __future__ import annotations

import msgspec
from tests.support.reigns import Reign, training

from toprope.coordinator.overview import overview


def alarms_of(reign: Reign) -> list[str]:
    """Return the alarms about READY."""
    told = overview(reign.core, broker="connected", now_s=reign.now_s).alarms
    return [alarm for alarm in told if alarm.startswith("READY")]


def train_to(reign: Reign, step: int) -> None:
    """Let each rank tell of this step."""
    for node in reign.nodes.values():
        node.ranks = {rank: msgspec.structs.replace(state, step=step) for rank, state in node.ranks.items()}
    reign.hear()


def test_ranks_that_run_ahead_of_ready_by_more_than_two_intervals_are_an_alarm() -> None:
    reign = training()
    train_to(reign, 16)
    assert alarms_of(reign) == []
    train_to(reign, 18)
    assert alarms_of(reign) == ["READY is 18 steps behind the ranks: is the object store full or away?"]


def test_the_alarm_ends_when_a_newer_step_is_ready() -> None:
    reign = training()
    train_to(reign, 24)
    assert alarms_of(reign) != []
    reign.hold(24, tiers=("object",))
    reign.read_back()
    assert reign.ready_steps == [24]
    assert alarms_of(reign) == []
