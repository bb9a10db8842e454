"""Ranks that are told to end, among all other troubles: one step for all, or none, and no promise broken."""

from __future__ import annotations

import asyncio
import random

import pytest

from toprope.chaos.sim import notices
from toprope.chaos.sim.broker import NAME as BROKER
from toprope.chaos.sim.history import run
from toprope.chaos.sim.options import Options, draw
from toprope.chaos.sim.world import World

FEW, MANY = range(4), range(4, 60)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [*FEW, *(pytest.param(seed, marks=pytest.mark.long) for seed in MANY)])
def test_notices_break_no_promise(seed: int) -> None:
    outcome = run(seed, trouble=notices.rage)
    assert outcome.invariant == "", outcome


def two_nodes(seed: int) -> Options:
    """Return a quiet world of two nodes with a rank on each, in which no step is due for a long time."""
    calm = {"drop": 0.0, "duplicate": 0.0, "slow": 1.0, "store_fault": 0.0, "retain": "", "faults": ()}
    rare = {"every": 64, "local_every": 64, "object_every": 64, "step_s": 0.5}
    return draw(random.Random(seed), nodes=2, ranks_per_node=1, **calm, **rare)


async def trained(world: World, step: int) -> None:
    """Wait until all ranks train and have come so far."""
    while world.launch is None or world.launch.step() < step:  # noqa: ASYNC110 - in virtual time
        await asyncio.sleep(0.1)


async def ended(world: World) -> None:
    """Wait until the launch is over, and another one trains."""
    launch = world.launch
    while world.launch is launch:  # noqa: ASYNC110 - in virtual time
        await asyncio.sleep(0.1)
    await trained(world, 1)


async def told(world: World) -> None:
    """One rank is told."""
    await trained(world, 3)
    assert world.launch is not None
    world.launch.ranks[1].notice()
    await ended(world)


async def told_while_the_other_hears_nothing(world: World) -> None:
    """One rank is told; the node of the other is cut off from those who would tell it, for some seconds."""
    await trained(world, 3)
    assert world.launch is not None
    links = {(other, "n1") for other in (BROKER, *(host.name for host in world.hosts))}
    links |= {(target, source) for source, target in links}
    world.net.cuts |= links
    world.launch.ranks[0].notice()
    await asyncio.sleep(5.0)
    world.net.cuts -= links
    await ended(world)


def test_all_end_at_one_step_and_the_next_launch_goes_on_from_there() -> None:
    outcome = run(1, two_nodes(1), trouble=told)
    assert outcome.invariant == "", outcome
    assert outcome.counts["a launch ended at a step that was safe"] >= 1
    assert outcome.counts["a rank restored"] == 2, "nothing else was ever saved"


def test_those_that_wait_go_on_to_a_later_step_when_one_had_not_heard_in_time() -> None:
    outcome = run(1, two_nodes(1), trouble=told_while_the_other_hears_nothing)
    assert outcome.invariant == "", outcome
    for what in (
        "a step to end at was heard of too late",
        "ranks went on to a later step to end at",
        "a launch ended at a step that was safe",
    ):
        assert outcome.counts[what] >= 1, outcome.counts
    assert outcome.counts["a rank restored"] == 2, "nothing else was ever saved"
