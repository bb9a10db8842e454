"""A short way through all that a job does, on which each call of a kind is met with each fault of its kind in turn.

Two nodes train and save; the sidecar of one dies and reads its disk again; the other loses power, and with it its
memory, and a new attempt begins from what is left. Up to the call that is struck each run is the same, so the calls of
the run without a fault tell where faults can be put; the oracle judges each run, and wants a later READY at its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from toprope.chaos.sim.history import Outcome, run
from toprope.chaos.sim.options import Options
from toprope.chaos.sim.world import World

SEED = 4
_LOOKS, _LOOK_EVERY_S = 300, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call: who made it, what it is, and what it is about: a kind of object or file, or whom a message is for."""

    who: str
    operation: str
    about: str

    def __str__(self) -> str:
        return f"{self.who} {self.operation} {self.about}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What came of one fault. ``struck`` is the call that it befell; None: it did not happen."""

    at: int
    fault: str
    struck: Call | None
    outcome: Outcome


class Plan(Protocol):
    """Sees all calls of a kind in one world. ``struck`` is the call that met with the fault that it has in store."""

    calls: list[Call]
    struck: Call | None


def travel(options: Options, plan_in: Callable[[World], Plan]) -> tuple[Plan, tuple[Call, ...], Outcome]:
    """Go the way once, in a world in which ``plan_in`` has made a plan; return it, the calls on the way, the end."""
    plans: list[Plan] = []
    calls: list[Call] = []

    async def trouble(world: World) -> None:
        plans.append(plan_in(world))
        await _go(world)
        calls.extend(plans[0].calls)

    outcome = run(SEED, options, trouble=trouble)
    return plans[0], tuple(calls), outcome


def calls_of(options: Options, plan_in: Callable[[World], Plan]) -> tuple[Call, ...]:
    """Return the calls of the way without a fault."""
    _, calls, outcome = travel(options, plan_in)
    assert not outcome.invariant, f"without any fault: {outcome}"
    return calls


def struck(options: Options, plan_in: Callable[[World], Plan], *, at: int, fault: str) -> Cell:
    """Go the way with the one fault that the plan has in store."""
    plan, _, outcome = travel(options, plan_in)
    return Cell(at=at, fault=fault, struck=plan.struck, outcome=outcome)


async def _go(world: World) -> None:
    """Go the way; what does not come about in time because of a fault is not waited for."""
    await _until(lambda: len(world.oracle.state.readies) >= 1)
    if (sidecar := world.nodes[0].sidecar) is not None:
        sidecar.process.kill()
    await _until(lambda: world.nodes[0].up and len(world.oracle.state.readies) >= 2)  # noqa: PLR2004 - another one
    before = world.oracle.state.attempt_number
    world.cut_power(world.nodes[1], replaced=False)
    await _until(lambda: _is_ready_again(world, after=before))


def _is_ready_again(world: World, *, after: int) -> bool:
    state = world.oracle.state
    return state.attempt_number > after and state.head is not None and state.readies[state.head].attempt > after


async def _until(true: Callable[[], bool]) -> None:
    for _ in range(_LOOKS):
        if true():
            return
        await asyncio.sleep(_LOOK_EVERY_S)
