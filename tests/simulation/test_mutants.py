"""Each safeguard that is switched off is found out, by the invariant that it is for, on its pinned seed."""

from __future__ import annotations

import pytest

from toprope.chaos.sim.history import run
from toprope.chaos.sim.mutants import MUTANTS, Mutant, switched_off


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_safeguard_switched_off_breaks_its_invariant_and_on_it_breaks_none(mutant: Mutant) -> None:
    with switched_off(mutant):
        without = run(mutant.seed)
    assert (without.invariant, run(mutant.seed).invariant) == (mutant.invariant, ""), without


def test_there_are_ten_mutants_or_more_of_different_names() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 10
