"""For each promise a defect was planted that must be found: a judge who never says no proves nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.meta.test_imports import without
from tests.support.source import ROOT

from toprope.chaos.defects import DEFECTS
from toprope.chaos.sim.mutants import MUTANTS

SCENARIOS = "tests/integration/test_scenarios.py::test_a_safeguard_that_is_left_out_is_found_and_its_promise_named"
HISTORIES = "tests/simulation/test_mutants.py::test_a_safeguard_switched_off_breaks_its_invariant_and_on_it_breaks_none"
PLANTED: dict[str, dict[str, tuple[str, ...]]] = {
    "No torn step": {SCENARIOS: ("unapplied",), HISTORIES: ("first-word", "half-staged")},
    "Verified end to end": {SCENARIOS: ("believed",), HISTORIES: ("read-back", "scan", "pull-or-stage")},
    "READY exactly once": {SCENARIOS: ("written-twice", "names-unsynced"), HISTORIES: ("guess", "whose-record")},
    "Fenced": {HISTORIES: ("fence", "dead-attempt", "fresh-term")},
    "Saving never stops training": {SCENARIOS: ("raises", "waits", "silent")},
    "Observing changes nothing": {SCENARIOS: ("draws-while-saving", "one-draw-ahead")},
    "No lock-in": {
        "tests/meta/test_guards.py::test_code_that_unpickles_is_found": (),
        "tests/store/test_cli.py::test_xxhsum_accepts_the_check_file": (),
    },
    "Light in the trainer": {
        "tests/meta/test_guards.py::test_an_object_collective_is_found": (),
        "tests/meta/test_promises.py::test_a_hook_that_needs_more_than_torch_is_found": (),
    },
}
"""By promise the tests that plant a defect, and its names where one test plants several."""


def test_for_each_promise_a_defect_is_planted() -> None:
    page = (ROOT / "docs" / "concepts" / "promises.md").read_text()
    assert re.findall(r"^\d\. \*\*(.+?)\.\*\*", page, re.MULTILINE) == list(PLANTED)


@pytest.mark.parametrize("promise", PLANTED)
def test_what_plants_it_is_there(promise: str) -> None:
    known = {SCENARIOS: set(DEFECTS), HISTORIES: {mutant.name for mutant in MUTANTS}}
    for test, names in PLANTED[promise].items():
        file, _, function = test.partition("::")
        assert f"def {function}(" in (ROOT / Path(file)).read_text(), test
        assert set(names) <= known.get(test, set())
        assert bool(names) == (test in known), test


def test_a_hook_that_needs_more_than_torch_is_found() -> None:
    with pytest.raises(AssertionError, match=r"No module named 'msgspec' \(blocked\)"):
        without(("msgspec",), ["toprope.coordinator.wire"])
