"""``ckpt chaos matrix``: the fault matrix, how each cell is shown, and what comes of those that are simulated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from toprope.chaos.matrix import CELLS, MEANS, PHASES, ROWS, Cell
from toprope.chaos.sim.cell_faults import faults
from toprope.chaos.sim.cells import complaint, strike
from toprope.store.errors import UsageError


def matrix(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    run: Annotated[
        bool, typer.Option("--run", help="Run the simulated cells; exit status 1 if one goes wrong.")
    ] = False,
    row: Annotated[str, typer.Option(metavar="WORD", help="Only rows with this in their name.")] = "",
    phase: Annotated[str, typer.Option(metavar="WORD", help="Only phases with this in their name.")] = "",
) -> None:
    """Print the fault matrix: what is right for each fault in each phase, and where it is shown to be so."""
    cells = [cell for cell in CELLS if row in cell.row and phase in cell.phase]
    if not cells:
        raise UsageError(f"--row {row!r} --phase {phase!r}: rows are {', '.join(ROWS)}; phases are {', '.join(PHASES)}")
    if run:
        raise typer.Exit(_run(cells, as_json=as_json))
    if as_json:
        _print_json([_about(cell) for cell in cells])
        return
    _print_table(cells)


def _about(cell: Cell) -> dict[str, object]:
    return {
        "row": cell.row,
        "phase": cell.phase,
        "right": sorted(cell.right),
        "simulated": [fault.name for fault in faults(cell.row, cell.phase)],
        "tests": list(cell.tests),
    }


def _print_json(value: object) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(value)).decode())


def _print_table(cells: Sequence[Cell]) -> None:
    table = Table(box=None, pad_edge=False)
    phases = [name for name in PHASES if any(cell.phase == name for cell in cells)]
    for name in ("", *phases):
        table.add_column(name)
    for row in ROWS:
        of_row = [cell for cell in cells if cell.row == row]
        if of_row:
            table.add_row(row, *map(_short, of_row))
    console = Console()
    console.print(table)
    for code, means in MEANS.items():
        console.print(f"{code}  {means}", highlight=False)
    console.print(_summary(cells), highlight=False, soft_wrap=True)


def _short(cell: Cell) -> str:
    """Return what is right, how many faults are simulated, and how many tests have real processes or files."""
    simulated = len(faults(cell.row, cell.phase))
    tests = f"+{len(cell.tests)}" if cell.tests else ""
    return (
        f"{'/'.join(code for code in MEANS if code in cell.right)} {simulated}{tests}"
        if simulated or tests
        else "not yet"
    )


def _summary(cells: Sequence[Cell]) -> str:
    counts = [len(faults(cell.row, cell.phase)) for cell in cells]
    missing = [f"{c.row} in {c.phase}" for c, count in zip(cells, counts, strict=True) if not count and not c.tests]
    real = sum(bool(cell.tests) for cell in cells)
    return (
        f"{len(cells)} cells: {sum(map(bool, counts))} simulated, by {sum(counts)} faults; {real} with real processes, "
        f"files or sockets (+n); not yet shown: {', '.join(missing) or 'none'}"
    )


def _run(cells: Sequence[Cell], *, as_json: bool) -> int:
    results, wrong = [], 0
    for cell in cells:
        for fault in faults(cell.row, cell.phase):
            seen = strike(cell.phase, fault)
            why = complaint(seen, fault.right or cell.right)
            wrong += bool(why)
            results.append(
                {
                    "row": cell.row,
                    "phase": cell.phase,
                    "fault": fault.name,
                    "right": sorted(fault.right or cell.right),
                    "came": sorted(seen.codes),
                    "witness": seen.witness,
                    "between_s": [seen.entered_s, seen.struck_s, seen.left_s],
                    "wrong": why,
                }
            )
            if not as_json:
                came = "/".join(sorted(seen.codes))
                typer.echo(f"{cell.row} | {cell.phase} | {fault.name} | {came} | {why or seen.witness}")
    if as_json:
        _print_json(results)
    else:
        simulated = len({(one["row"], one["phase"]) for one in results})
        typer.echo(f"{len(results)} faults in {simulated} cells, {wrong} went wrong")
    return 1 if wrong else 0
