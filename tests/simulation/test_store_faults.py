"""Each call of the store in a commit with each kind of fault: READY exactly once or not at all, and nothing is lost."""

from __future__ import annotations

import functools
from collections import Counter

import pytest

from toprope.chaos.sim.store_faults import KINDS, Call, Kind, calls_of_a_commit, strike

IN_SHORT = 23
"""One of so many cells is run each time, and with it each kind; all of them by ``make test-long``."""


@functools.cache
def calls() -> tuple[Call, ...]:
    return calls_of_a_commit()


def run(cells: list[tuple[int, Kind]]) -> None:
    """Run these cells and check each: the fault came, to the call that it was meant for, and no promise was broken.

    The simulator's oracle sees every applied operation: it has one READY for a step at most, of whole shards with the
    digests of what the trainers sealed, and none that was there before is gone; and it wants a later READY in the end.
    """
    struck = Counter[str]()
    for at, kind in cells:
        cell = strike(at, kind)
        assert cell.struck == calls()[at], f"call {at}: {kind} befell {cell.struck} instead of {calls()[at]}"
        assert not cell.outcome.invariant, f"call {at}, {calls()[at]}: {kind}\n{cell.outcome}"
        struck[kind] += 1
    text = f"{len(calls())} calls x {len(KINDS)} kinds = {len(every_cell())} runs; of them {len(cells)}: {dict(struck)}"
    print(text)  # noqa: T201 - the figure, which pytest shows with -s
    assert struck.total() == len(cells)


def every_cell() -> list[tuple[int, Kind]]:
    return [(at, kind) for at in range(len(calls())) for kind in KINDS]


def test_a_commit_has_all_calls_that_faults_are_for() -> None:
    seen = {(call.operation, call.kind) for call in calls()}
    for wanted in (("create", "log"), ("create", "shards"), ("create", "manifests"), ("create", "facts")):
        assert wanted in seen
    for wanted in (("read", "log"), ("read", "shards"), ("read", "manifests"), ("size", "shards")):
        assert wanted in seen
    assert sum(call == Call(who="c1", operation="create", kind="manifests") for call in calls()) >= 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_part_of_all_faults_at_all_calls_breaks_no_promise() -> None:
    cells = every_cell()[::IN_SHORT]
    assert {kind for _, kind in cells} == set(KINDS)
    run(cells)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_no_fault_at_any_call_breaks_a_promise() -> None:
    run(every_cell())
