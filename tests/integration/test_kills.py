"""Things are killed at moments that a seed draws: nothing READY is lost, no byte is wrong, and nothing hangs.

What is lost, wrong or hangs is judged as in any scenario; that the judge can say no, ``test_scenarios`` proves.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tests.support.trials import Try, told

from toprope.chaos.scenario import Fault, Loaded, load

VICTIMS = {
    "rank": ("rank 0", "rank 1"),
    "sidecar": ("sidecar a", "sidecar b"),
    "node": ("node b",),
    "coordinator": ("coordinator",),
    "broker": ("broker",),
}
QUICK_SEED = 1
SEEDS = (QUICK_SEED, *range(101, 111))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def kill(target: str, chance: random.Random, *, at_s: float) -> Fault:
    return Fault(do="kill", target=target, at_s=at_s, for_s=chance.uniform(0.2, 2.5))


def assert_survived(attempt: Try, *faults: Fault, seed: int, record_property: Callable[[str, object], None]) -> None:
    """Play ``kill-any`` with these faults."""
    scenario = msgspec.structs.replace(load("kill-any").scenario, fault=faults)
    verdict = attempt(Loaded(scenario=scenario, directory=Path.cwd()), seed=seed)
    assert verdict.good, told(verdict)
    killed = ", ".join(f"{one.target} at {one.at_s:.2f} s" for one in verdict.injections)
    (verified,) = (one.evidence[0] for one in verdict.promises if one.name == "verified")
    record_property(f"seed {seed}: {killed}", verified)


@pytest.mark.parametrize("kind", VICTIMS)
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[] if seed == QUICK_SEED else pytest.mark.long) for seed in SEEDS]
)
def test_one_kill(seed: int, kind: str, attempt: Try, record_property: Callable[[str, object], None]) -> None:
    chance = random.Random(f"{seed} {kind}")
    fault = kill(chance.choice(VICTIMS[kind]), chance, at_s=chance.uniform(0.5, 3.5))
    assert_survived(attempt, fault, seed=seed, record_property=record_property)


@pytest.mark.long
@pytest.mark.parametrize("kinds", list(itertools.combinations(VICTIMS, 2)), ids="-".join)
@pytest.mark.parametrize("seed", [201, 202])
def test_two_kills_within_a_second(
    seed: int, kinds: tuple[str, str], attempt: Try, record_property: Callable[[str, object], None]
) -> None:
    """A rank dies first, since with a node all ranks are ended; what dies with the node is not killed beside it."""
    chance = random.Random(f"{seed} {kinds}")
    order = kinds if kinds[0] == "rank" else chance.sample(kinds, 2)
    at_s = chance.uniform(0.5, 3.0)
    faults = [
        kill(VICTIMS[kind][0], chance, at_s=at_s + number * chance.uniform(0.05, 1.0))
        for number, kind in enumerate(order)
    ]
    assert_survived(attempt, *faults, seed=seed, record_property=record_property)
