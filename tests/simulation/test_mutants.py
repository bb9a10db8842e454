"""Each safeguard that is switched off is found out, by the invariant that it is for, on its pinned seed."""

from __future__ import annotations

import pytest

from toprope.chaos.sim.history import run
from toprope.chaos.sim.mutant import Mutant
from toprope.chaos.sim.mutants import MUTANTS, switched_off

SEEDS = 6
"""The pinned seed leads to the trouble; when the programs have changed, one of the next ones may in its place."""


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_safeguard_switched_off_breaks_its_invariant_and_on_it_breaks_none(mutant: Mutant) -> None:
    with switched_off(mutant):
        tried = (run(seed, mutant.options(seed)) for seed in range(mutant.seed, mutant.seed + SEEDS))
        without = next(outcome for outcome in tried if outcome.invariant or outcome.seed == mutant.seed + SEEDS - 1)
    with_it = run(without.seed, mutant.options(without.seed))
    assert (without.invariant, with_it.invariant) == (mutant.invariant, ""), without


def test_there_are_twenty_five_mutants_or_more_of_different_names() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 25
