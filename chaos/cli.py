"""``ckpt demo``: the one command that shows what Toprope is for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from toprope.chaos import cli_matrix, cli_reports, cli_scenarios, survival
from toprope.chaos import demo as the_demo
from toprope.chaos.live.processes import LiveError, ending_well
from toprope.chaos.live.scratch import DISK, Scratch
from toprope.chaos.progress import Progress
from toprope.chaos.report import render
from toprope.chaos.sim import search, shrink
from toprope.store.errors import CkptError, UsageError

app = typer.Typer(add_completion=False, rich_markup_mode=None)
chaos = typer.Typer(add_completion=False, rich_markup_mode=None, help="Break things on purpose, and judge the result.")
app.add_typer(chaos, name="chaos")
chaos.command("run")(cli_scenarios.run_scenario)
chaos.command("list")(cli_scenarios.list_scenarios)
chaos.command()(cli_scenarios.soak)
chaos.command()(cli_matrix.matrix)
chaos.command()(cli_reports.report)
_STEPS_MIN = 12


class DemoError(CkptError):
    """The demo could not be carried through; the message says where it stopped."""


@chaos.callback()
def searches() -> None:
    """Break things on purpose, and judge the result."""


@chaos.command()
def sim(
    *,
    seeds: Annotated[str, typer.Option(metavar="N|A:B", help="How many histories to run, or from which to which.")] = (
        "100"
    ),
    seed: Annotated[int, typer.Option(metavar="S", min=0, help="The first seed; the others follow it.")] = 0,
    jobs: Annotated[int, typer.Option(min=0, help="Processes to run them in; 0: one for each core.")] = 0,
    mutant: Annotated[str, typer.Option(metavar="NAME", help="Switch this safeguard off: must be found out.")] = "",
    replay: Annotated[
        str, typer.Option(metavar="FILE|TEXT", help="Run the one history again that a search printed.")
    ] = "",
) -> None:
    """Run simulated histories, each from its seed, and judge them from outside.

    Exit status 0 only when no promise was broken; else each broken one is made small and told with its seed, options
    and story.
    """
    if mutant and mutant not in search.names():
        raise UsageError(f"--mutant {mutant!r}: give one of {', '.join(search.names())}")
    if replay:
        outcome = shrink.retold(replay)
        print(outcome)
        raise typer.Exit(1 if outcome.invariant else 0)
    found = search.run(_seeds(seeds, seed), mutant=mutant, jobs=jobs or len(os.sched_getaffinity(0)), tell=print)
    print(found.summary())
    raise typer.Exit(1 if found.broken else 0)


@chaos.command()
def survive(
    *,
    nodes: Annotated[int, typer.Option(min=2, max=8, help="Every world of at most so many nodes is tried.")] = (
        survival.NODES_MAX
    ),
) -> None:
    """Try every set of losses that placements claim to survive, in every small world, and say what memory that takes.

    Exit status 0 only when no snapshot was lost.
    """
    rows = survival.table(nodes_max=nodes)
    print(survival.as_markdown(rows))
    raise typer.Exit(1 if any(row.lost for row in rows) else 0)


def _seeds(text: str, first: int) -> range:
    begin, colon, end = text.rpartition(":")
    if (begin.isdecimal() or not colon) and end.isdecimal():
        seeds = range(int(begin), int(end)) if colon else range(first, first + int(end))
        if seeds:
            return seeds
    raise UsageError(f"--seeds {text!r}: give a number of histories, as in 100, or a range, as in 1000:2000")


@app.callback()
def programs() -> None:
    """Break things on purpose and judge the result."""


@app.command()
def demo(
    *,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report as JSON to this file too.")
    ] = None,
    keep: Annotated[Path | None, typer.Option(metavar="DIR", help="Leave everything in this new directory.")] = None,
    spoil: Annotated[str, typer.Option(metavar="rng|weights", help="Make the restore wrong: must end in 'no'.")] = "",
    store: Annotated[str, typer.Option(metavar="directory|s3", help="The object store to use.")] = "directory",
    steps: Annotated[int, typer.Option(help="Steps to train.")] = 60,
    seed: Annotated[int, typer.Option(help="Draws data order, initial weights and the step of the kill.")] = 1,
) -> None:
    """Train on two nodes, kill one in the middle, go on, and compare with an uninterrupted run.

    Exit status 0 only when the two runs are bit-identical.
    """
    if spoil not in ("", "rng", "weights"):
        raise UsageError(f"--spoil {spoil!r}: give rng or weights")
    if store not in ("directory", "s3"):
        raise UsageError(f"--store {store!r}: give directory or s3")
    if steps < _STEPS_MIN:
        raise UsageError(f"--steps {steps}: give {_STEPS_MIN} or more, to have a middle to kill in")
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise UsageError(f"--keep {keep}: give a directory that is new or empty")
    plan = the_demo.Plan(steps=steps, seed=seed, spoil=spoil, store=store)
    if keep is not None:
        good = _run(plan, keep.absolute(), json)
    else:
        with Scratch(DISK) as scratch:
            good = _run(plan, scratch.path, json)
    raise typer.Exit(0 if good else 1)


def _run(plan: the_demo.Plan, directory: Path, json: Path | None) -> bool:
    console = Console(stderr=True)
    try:
        with ending_well(), Progress(console) as progress:
            report = the_demo.run(plan, directory, progress)
    except LiveError as error:
        raise DemoError(f"the demo stopped: {error}") from error
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    render(report, Console())
    return report.good
