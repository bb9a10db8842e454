"""The fault matrix in the simulator: each fault in each phase has an outcome that is right, and breaks no promise."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import msgspec
import pytest
from tests.support.source import ROOT

from toprope.__main__ import main
from toprope.chaos.matrix import CELLS, MEANS, PHASES, ROWS, Cell, Phase, Row
from toprope.chaos.phases import PHASES as LIVE_PHASES
from toprope.chaos.sim.cell_faults import faults
from toprope.chaos.sim.cells import Fault, Scene, Seen, complaint, outcomes, strike
from toprope.chaos.sim.history import Outcome
from toprope.chaos.sim.mutants import MUTANTS, switched_off
from toprope.chaos.sim.trace import Edge, Mark
from toprope.chaos.sim.world import World

SHORT: tuple[tuple[Row, Phase, int], ...] = (
    ("trainer killed", "shm copy", 0),
    ("sidecar killed", "object upload", 0),
    ("node lost", "local write", 0),
    ("coordinator crash", "manifest commit", 0),
    ("partition", "restore", 0),
    ("disk errors", "local write", 1),
    ("bit flip, torn write", "peer replication", 0),
    ("store errors", "garbage collection", 1),
)
"""What ``make test`` runs; ``make test-long`` runs all."""


def cell_of(row: Row, phase: Phase) -> Cell:
    return next(cell for cell in CELLS if (cell.row, cell.phase) == (row, phase))


def check(cell: Cell, fault: Fault) -> Seen:
    seen = strike(cell.phase, fault)
    why = complaint(seen, fault.right or cell.right)
    assert not why, f"{cell.row}, {cell.phase}, {fault.name}: {why}; {seen.witness}\n{seen.outcome}"
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(("row", "phase", "number"), SHORT)
def test_a_fault_in_a_phase_has_an_outcome_that_is_right(row: Row, phase: Phase, number: int) -> None:
    assert check(cell_of(row, phase), faults(row, phase)[number]).witness


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("row", ROWS)
def test_each_fault_in_each_phase_has_an_outcome_that_is_right(
    row: Row, record_property: Callable[[str, object], None]
) -> None:
    done = {phase: [check(cell_of(row, phase), fault) for fault in faults(row, phase)] for phase in PHASES}
    told = [
        f"{phase}: {', '.join(sorted({code for one in seen for code in one.codes}))}" for phase, seen in done.items()
    ]
    record_property(
        row, f"{sum(map(len, done.values()))} faults in {sum(map(bool, done.values()))} phases; {'; '.join(told)}"
    )
    assert sum(map(bool, done.values())) >= len(PHASES) - 1


def test_the_matrix_has_88_cells_and_each_is_shown_but_for_those_that_are_named_here() -> None:
    assert len({(cell.row, cell.phase) for cell in CELLS}) == len(CELLS) == 88
    assert all(cell.right <= MEANS.keys() and cell.right for cell in CELLS)
    assert tuple(LIVE_PHASES) == PHASES
    missing = [(cell.row, cell.phase) for cell in CELLS if not faults(cell.row, cell.phase) and not cell.tests]
    assert missing == []


def test_each_test_that_a_cell_names_is_there() -> None:
    named = {test for cell in CELLS for test in cell.tests}
    assert named
    assert [test for test in named if test.partition("::")[2] not in functions(ROOT / test.partition("::")[0])] == []


@functools.cache
def functions(path: Path) -> frozenset[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds))


# The judge

HERE = ("a", 4, 1)
LATER = ("a", 6, 1)
OTHER = ("a", 4, 0)
READ: dict[str, tuple[Phase, list[tuple[str, str, Edge, tuple[str, int, int]]], set[str]]] = {
    "ended there": ("object upload", [("n1", "object upload", "ends", HERE)], {"N"}),
    "nothing more": ("object upload", [], {"D"}),
    "a copy that was never sealed": ("shm copy", [], {"S"}),
    "only that of another rank ended": ("object upload", [("n1", "object upload", "ends", OTHER)], {"D"}),
    "failed and done again": (
        "hashing",
        [("n1", "hashing", "fails", HERE), ("n1", "hashing", "begins", HERE), ("n1", "hashing", "ends", HERE)],
        {"R"},
    ),
    "died and done again": ("hashing", [("n1", "hashing", "begins", HERE), ("n1", "hashing", "ends", HERE)], {"R"}),
    "ended by another": ("manifest commit", [("n2", "manifest commit", "ends", HERE)], {"R"}),
    "ended and begun again": (
        "object upload",
        [("n1", "object upload", "ends", HERE), ("n1", "object upload", "begins", HERE)],
        {"R"},
    ),
    "failed, and a peer has it": (
        "local write",
        [("n1", "local write", "fails", HERE), ("n0", "peer replication", "ends", HERE)],
        {"T"},
    ),
    "late, and a peer had it before": (
        "local write",
        [("n0", "peer replication", "ends", HERE), ("n1", "local write", "ends", HERE)],
        {"N", "T"},
    ),
    "a pull that was made up for": (
        "peer replication",
        [("n1", "peer replication", "fails", HERE), ("n1", "peer replication", "ends", LATER)],
        {"R"},
    ),
    "a pull by another node": (
        "peer replication",
        [("n1", "peer replication", "fails", HERE), ("n2", "peer replication", "ends", LATER)],
        {"T"},
    ),
}


@pytest.mark.parametrize(("phase", "marks", "codes"), READ.values(), ids=READ.keys())
def test_an_outcome_is_read_from_what_processes_did_since(
    phase: Phase, marks: list[tuple[str, str, Edge, tuple[str, int, int]]], codes: set[str]
) -> None:
    struck = Mark(1.0, "n1", phase, "begins", HERE)
    scene = Scene(world=cast("World", None), phase=phase, mark=struck, at_s=1.0)
    assert outcomes(scene, [Mark(2.0 + number, *mark) for number, mark in enumerate(marks)]) == codes


GOOD = Seen(
    phase="hashing",
    fault="x",
    fired=True,
    witness="w",
    entered_s=1.0,
    struck_s=2.0,
    left_s=3.0,
    codes=frozenset({"R", "S"}),
    outcome=cast("Outcome", type("Good", (), {"invariant": "", "text": ""})),
)


def test_a_cell_that_went_wrong_is_told_with_the_reason() -> None:
    broken = cast("Outcome", type("Broken", (), {"invariant": "I1", "text": "wrong bytes"}))
    assert complaint(GOOD, {"R"}) == ""
    assert "did not fire: w" in complaint(replace(GOOD, fired=False), {"R"})
    assert complaint(replace(GOOD, outcome=broken), {"R"}) == "I1: wrong bytes"
    assert "from 1.00 to 3.00 s" in complaint(replace(GOOD, struck_s=0.5), {"R"})
    assert "from 1.00 to 3.00 s" in complaint(replace(GOOD, struck_s=3.5), {"R"})
    assert complaint(GOOD, {"N", "L"}) == "R, S came of it, not L or N"


@pytest.mark.slow
def test_a_cell_notices_that_its_safeguard_is_off() -> None:
    mutant = next(one for one in MUTANTS if one.name == "pull-or-stage")
    cell = cell_of("bit flip, torn write", "restore")
    with switched_off(mutant):
        seen = strike(cell.phase, faults(cell.row, cell.phase)[0])
    assert complaint(seen, cell.right).startswith("I10: ")


# The command


def test_the_matrix_is_printed_with_what_shows_each_cell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "matrix"]) == 0
    assert "88 cells" in capsys.readouterr().out
    assert main(["chaos", "matrix", "--json", "--row", "sidecar"]) == 0
    cells = msgspec.json.decode(capsys.readouterr().out)
    assert [cell["phase"] for cell in cells] == list(PHASES)
    assert cells[4] == {
        "row": "sidecar killed",
        "phase": "object upload",
        "right": ["R"],
        "simulated": ["SIGKILL of the sidecar"],
        "tests": list(cell_of("sidecar killed", "object upload").tests),
    }


@pytest.mark.slow
def test_cells_are_run_on_demand_and_told_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "matrix", "--run", "--row", "trainer", "--phase", "copy"]) == 0
    told = capsys.readouterr().out
    assert "trainer killed | shm copy | SIGKILL of the trainer | S | l1.r1 is dead: True" in told
    assert "1 faults in 1 cells, 0 went wrong" in told


def test_a_row_that_is_none_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "matrix", "--row", "meteorite"]) == 64
    assert "node lost" in capsys.readouterr().err
