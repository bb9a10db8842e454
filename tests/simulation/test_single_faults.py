"""Each call of the store, of a disk and of the network with each kind of fault: READY once or not, and nothing is lost.

The simulator's oracle sees every applied operation: it has one READY for a step at most, of whole shards with the
digests of what the trainers sealed, and none that was there before is gone; and it wants a later READY in the end.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from toprope.chaos.sim import disk_faults, net_faults, store_faults
from toprope.chaos.sim.journey import Call, Cell


@dataclass(frozen=True, slots=True)
class Medium:
    """What is called. ``make test`` runs one of ``in_short`` cells of each kind; ``make test-long`` all."""

    calls: Callable[[], tuple[Call, ...]]
    kinds: Callable[[Call], tuple[str, ...]]
    strike: Callable[[int, Any], Cell]
    in_short: int

    def cells(self) -> list[tuple[int, str]]:
        return [(at, kind) for at, call in enumerate(self.calls()) for kind in self.kinds(call)]

    def some_cells(self) -> list[tuple[int, str]]:
        by_kind: dict[str, list[tuple[int, str]]] = {}
        for cell in self.cells():
            by_kind.setdefault(cell[1], []).append(cell)
        parts = [cells[at % len(cells) :: self.in_short] for at, cells in enumerate(by_kind.values())]
        return [cell for part in parts for cell in part]


MEDIA = {
    "store": Medium(
        functools.cache(store_faults.calls_of_a_commit), lambda _: store_faults.KINDS, store_faults.strike, 23
    ),
    "disk": Medium(
        functools.cache(disk_faults.calls), lambda call: disk_faults.KINDS[call.operation], disk_faults.strike, 48
    ),
    "network": Medium(functools.cache(net_faults.calls), lambda _: net_faults.KINDS, net_faults.strike, 403),
}


def struck(name: str, cell: tuple[int, str]) -> Cell:
    return MEDIA[name].strike(*cell)


def in_processes(name: str, cells: list[tuple[int, str]]) -> Iterator[Cell]:
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(functools.partial(struck, name), cells, chunksize=8)


def check(name: str, done: Iterable[Cell]) -> str:
    """Check each cell: the fault came, to the call that it was meant for, and no promise was broken."""
    medium, kinds = MEDIA[name], Counter[str]()
    for cell in done:
        meant = medium.calls()[cell.at]
        assert cell.struck == meant, f"call {cell.at}: {cell.fault} befell {cell.struck} instead of {meant}"
        assert not cell.outcome.invariant, f"call {cell.at}, {meant}: {cell.fault}\n{cell.outcome}"
        kinds[cell.fault] += 1
    operations = Counter(call.operation for call in medium.calls())
    told = " + ".join(
        f"{count} {operation} x {len(medium.kinds(Call(who='', operation=operation, about='')))}"
        for operation, count in sorted(operations.items())
    )
    return (
        f"calls x kinds: {told} = {len(medium.cells())} runs, of which {kinds.total()}: {dict(sorted(kinds.items()))}"
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", MEDIA)
def test_a_part_of_all_faults_at_all_calls_breaks_no_promise(name: str) -> None:
    medium = MEDIA[name]
    cells = medium.some_cells()
    print(check(name, (struck(name, cell) for cell in cells)))  # noqa: T201 - the figure, which pytest shows with -s
    assert {kind for _, kind in cells} == {kind for _, kind in medium.cells()}


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", MEDIA)
def test_no_fault_at_any_call_breaks_a_promise(name: str, record_property: Callable[[str, object], None]) -> None:
    record_property(name, check(name, in_processes(name, MEDIA[name].cells())))


def test_a_commit_has_all_calls_that_faults_are_for() -> None:
    calls = MEDIA["store"].calls()
    seen = {(call.operation, call.about) for call in calls}
    for wanted in (("create", "log"), ("create", "shards"), ("create", "manifests"), ("create", "facts")):
        assert wanted in seen
    for wanted in (("read", "log"), ("read", "shards"), ("read", "manifests"), ("size", "shards")):
        assert wanted in seen
    assert sum(call == Call(who="c1", operation="create", about="manifests") for call in calls) >= 2


def test_the_way_of_a_job_has_all_calls_of_the_disk_and_messages_between_all() -> None:
    assert {call.operation for call in MEDIA["disk"].calls()} == set(disk_faults.KINDS)
    assert {call.about for call in MEDIA["disk"].calls()} == {"temporary", "data", "receipt", "directory"}
    links = {(call.who, call.about) for call in MEDIA["network"].calls()}
    assert links == {(one, other) for one in ("n0", "n1", "c1", "broker") for other in ("n0", "n1", "c1", "broker")} - {
        (same, same) for same in ("n0", "n1", "c1", "broker")
    }
