"""A world under torchrun ends with its agents, but for one that was killed and is to come back; restarts are noted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from toprope.chaos.journal import Event
from toprope.chaos.live.agents import Agents
from toprope.chaos.live.training import Training
from toprope.chaos.running import Course


class Cluster:
    """Nodes a and b, whose agents are as a test says."""

    def __init__(self) -> None:
        self.statuses: dict[str, int | None] = {"a": None, "b": None}
        self.nodes = {
            name: SimpleNamespace(agent=SimpleNamespace(status=lambda name=name: self.statuses[name])) for name in "ab"
        }


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def agents(cluster: Any, *, down: str = "") -> Agents:  # noqa: ANN401 - stands in for a cluster
    training = Training(script=Path("train.py"), arguments=(), nodes=2, ranks=2)
    return Agents(cluster=cluster, out=Path("out"), training=training, is_down=lambda name: name == down)


def test_the_ranks_of_an_agent_that_has_ended_have_ended_as_it_has(cluster: Cluster) -> None:
    world = agents(cluster)
    assert (world.world, world.statuses()) == (4, {})
    cluster.statuses["b"] = 1
    assert world.statuses() == {2: 1, 3: 1}
    cluster.statuses |= {"a": 0, "b": 0}
    assert world.statuses() == dict.fromkeys(range(4), 0)


def test_an_agent_that_was_killed_and_is_to_come_back_ends_nothing(cluster: Cluster) -> None:
    cluster.statuses["b"] = -9
    assert agents(cluster, down="b").statuses() == {}
    assert agents(cluster).statuses() == {2: -9, 3: -9}


def test_each_time_that_a_launcher_starts_ranks_again_is_a_restart_with_all_of_them() -> None:
    course = Course(cast("Any", None), cast("Any", None), protected_step=8)
    starts = [(0, 10), (1, 11), (1, 21), (0, 20), (0, 30), (1, 31)]
    for number, (rank, pid) in enumerate(starts):
        course.was_started(Event(event="start", rank=rank, pid=pid, monotonic_s=float(number)), newest=10)
    assert [(one.at_s, one.newest_step, one.protected_step, one.pids) for one in course.restarts] == [
        (2.0, 10, 8, (21, 20)),
        (4.0, 10, 8, (30, 31)),
    ]
