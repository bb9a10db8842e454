"""With c copies every set of c nodes may be lost at once: the next attempt goes on from what was protected."""

from __future__ import annotations

import asyncio
import random
from itertools import combinations
from typing import Any

import pytest

from toprope.chaos.sim.history import run
from toprope.chaos.sim.options import PAIR, draw
from toprope.chaos.sim.world import World

MEMORY_ONLY: dict[str, Any] = {**PAIR, "local_every": 16, "object_every": 16, "faults": (), "store_fault": 0.0}
"""Neither disk nor store has any of it when nodes are lost."""


class Loss:
    """Waits until a step is protected, and then cuts the power of some nodes at once."""

    def __init__(self, lost: tuple[int, ...]) -> None:
        self.lost = lost
        self.protected = self.attempts = 0
        self.world: World | None = None

    async def __call__(self, world: World) -> None:
        self.world = world
        while (protected := world.oracle._protected[1]) < 3:  # noqa: ASYNC110 - the simulated world has no event for it
            await asyncio.sleep(0.5)
        self.protected, self.attempts = protected, len(world.oracle.state.attempts)
        for number in self.lost:
            world.cut_power(world.nodes[number])

    def went_on_from(self) -> int:
        """Return the least step from which an attempt began after the loss."""
        assert self.world is not None
        return min(one.from_step for one in self.world.oracle.state.attempts[self.attempts :])


def lose(lost: tuple[int, ...], *, nodes: int, copies: int) -> Loss:
    """Run a history in which these nodes are lost once a step is protected."""
    loss = Loss(lost)
    options = draw(random.Random(7), **{**MEMORY_ONLY, "nodes": nodes, "copies": copies})
    outcome = run(7, options, trouble=loss)
    assert not outcome.invariant, str(outcome)
    assert loss.protected >= 3
    return loss


def every_loss(nodes: int, copies: int) -> list[tuple[int, ...]]:
    return [lost for size in range(1, copies + 1) for lost in combinations(range(nodes), size)]


def test_two_copies_survive_the_loss_of_any_two_nodes_that_are_lost_at_once() -> None:
    loss = lose((0, 1), nodes=3, copies=2)
    assert loss.went_on_from() >= loss.protected


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("nodes", "copies"), [(3, 1), (3, 2), (4, 1), (4, 2), (4, 3)])
def test_every_loss_of_as_many_nodes_as_there_are_copies_is_survived(nodes: int, copies: int) -> None:
    for lost in every_loss(nodes, copies):
        loss = lose(lost, nodes=nodes, copies=copies)
        assert loss.went_on_from() >= loss.protected, f"nodes {lost} were lost"


def test_one_loss_more_is_not_survived() -> None:
    assert lose((0, 1), nodes=2, copies=1).went_on_from() == 0
