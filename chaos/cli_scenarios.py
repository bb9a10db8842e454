"""``ckpt chaos run``, ``list`` and ``soak``: scenarios against real processes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from toprope.chaos.defects import DEFECTS
from toprope.chaos.faults.kinds import KINDS
from toprope.chaos.live.processes import LiveError, ending_well
from toprope.chaos.live.scratch import DISK, Scratch
from toprope.chaos.permit import permit
from toprope.chaos.progress import Progress
from toprope.chaos.promises import PROMISES
from toprope.chaos.reports.files import as_json, write_reports
from toprope.chaos.reports.text import render
from toprope.chaos.running import Order, run
from toprope.chaos.scenario import ANY, Fault, Loaded, Scenario, Topology, Workload, load, shipped
from toprope.chaos.stage import Stage
from toprope.chaos.verdict import Verdict
from toprope.store.errors import CkptError, UsageError

AMONG = "kill rank 0; kill rank 1; kill node b; kill sidecar a; kill sidecar b; kill coordinator; kill broker"
_SPAN = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)")
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}

Break = Annotated[
    bool, typer.Option("--break", help="Yes, break things; CKPT_CHAOS=chaos in the environment must say so too.")
]
Seed = Annotated[int, typer.Option(metavar="S", min=0, help="Draws data, weights, and when faults come.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")]
Junit = Annotated[Path | None, typer.Option(metavar="FILE", help="Write JUnit XML to this file.")]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with a timeline to this file.")]
Keep = Annotated[Path | None, typer.Option(metavar="DIR", help="Leave logs, store and journals in this new directory.")]


class ChaosError(CkptError):
    """A scenario could not be carried through; the message says where it stopped."""


def run_scenario(  # noqa: PLR0913 - the options of a command
    scenario: Annotated[str, typer.Argument(metavar="NAME|FILE", help="As `ckpt chaos list` has it, or a .toml file.")],
    *,
    seed: Seed = 1,
    allowed: Break = False,
    as_json: AsJson = False,
    junit: Junit = None,
    html: Html = None,
    keep: Keep = None,
    defect: Annotated[
        str, typer.Option("--defect", metavar="NAME", help="Run without this safeguard: must be found out.")
    ] = "",
) -> None:
    """Train under a scenario's faults on real processes of this machine, and judge what came of it.

    It breaks only what it has started itself: services, ranks and a store of its own. Exit status 0 only when every
    planned fault happened and every promise held.
    """
    if defect and defect not in DEFECTS:
        raise UsageError(f"--defect {defect!r}: give one of {', '.join(DEFECTS)}")
    verdict = _run(load(scenario), seed, allowed=allowed, keep=keep, defect=defect)
    raise typer.Exit(_report(verdict, as_json=as_json, junit=junit, html=html))


def soak(  # noqa: PLR0913 - the options of a command
    *,
    mtbf: Annotated[str, typer.Option(metavar="TIME", help="Mean time between faults, as 60s or 5m.")] = "60s",
    length: Annotated[str, typer.Option("--for", metavar="TIME", help="How long to train, as 30m.")] = "30m",
    among: Annotated[str, typer.Option(help="What may happen, separated by semicolons.")] = AMONG,
    seed: Seed = 7,
    allowed: Break = False,
    as_json: AsJson = False,
    junit: Junit = None,
    html: Html = None,
    keep: Keep = None,
) -> None:
    """Train for a while under random faults: a game day. The report has goodput over time and its loss by cause."""
    scenario = soaking(mtbf_s=seconds(mtbf, "--mtbf"), length_s=seconds(length, "--for"), among=among)
    verdict = _run(Loaded(scenario=scenario, directory=Path.cwd()), seed, allowed=allowed, keep=keep)
    raise typer.Exit(_report(verdict, as_json=as_json, junit=junit, html=html))


def list_scenarios(
    *,
    faults: Annotated[bool, typer.Option("--faults", help="List the kinds of faults instead.")] = False,
    defects: Annotated[bool, typer.Option("--defects", help="List the safeguards that can be left out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the scenarios that come with toprope, and the promises that each attacks."""
    if faults:
        rows = [{"name": name, "about": _about(kind)} for name, kind in KINDS.items()]
    elif defects:
        rows = [{"name": name, "about": f"{one.safeguard} ({one.promise})"} for name, one in DEFECTS.items()]
    else:
        found = [load(name).scenario for name in shipped()]
        rows = [{"name": one.name, "about": one.about, "attacks": ", ".join(one.attacks)} for one in found]
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(rows)).decode())
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        attacks = f" Attacks: {row['attacks']}." if "attacks" in row else ""
        typer.echo(f"{row['name']:<{width}}  {row['about']}{attacks}")


def soaking(*, mtbf_s: float, length_s: float, among: str, step_s: float = 0.2) -> Scenario:
    """Return the scenario of a soak."""
    fault = Fault(do=ANY, mtbf_s=mtbf_s, for_s=min(3.0, mtbf_s / 4), how={"among": among})
    scenario = Scenario(
        name="soak",
        about=f"{length_s:g} s of training in which something breaks every {mtbf_s:g} s on average",
        attacks=tuple(name for name in PROMISES if name != "told"),
        label="chaos",
        fault=(fault,),
        topology=Topology(coordinator=("--retain", "last=3")),
        workload=Workload(steps=max(40, int(length_s / step_s)), step_s=step_s),
    )
    scenario.check()
    return scenario


def seconds(text: str, option: str) -> float:
    """Return the seconds in a text as 60s, 5m or 2h.

    Raises:
        UsageError: it is none.
    """
    match = _SPAN.fullmatch(text)
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"{option} {text!r}: give a time, as 60s, 30m or 2h")
    return float(match[1]) * _UNITS_S[match[2]]


def _about(kind: object) -> str:
    return " ".join((kind.__doc__ or "").split("\n\n")[0].split())


def _run(loaded: Loaded, seed: int, *, allowed: bool, keep: Path | None, defect: str = "") -> Verdict:
    given = permit(flag=allowed, label=loaded.scenario.label)
    given.check(f"chaos-{loaded.scenario.name}")
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise UsageError(f"--keep {keep}: give a directory that is new or empty")
    with _directory(keep) as directory, ending_well(), Progress(Console(stderr=True)) as progress, Stage() as stage:
        order = Order(loaded=loaded, seed=seed, permit=given, directory=directory, defect=defect)
        try:
            return run(order, stage, progress)
        except LiveError as error:
            raise ChaosError(f"{loaded.scenario.name} stopped: {error}") from error


@contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        yield keep.absolute()
        return
    with Scratch(DISK) as scratch:
        yield scratch.path


def _report(verdict: Verdict, *, as_json: bool, junit: Path | None, html: Path | None) -> int:
    write_reports(verdict, junit_xml=junit, html=html)
    if as_json:
        typer.echo(_json(verdict))
    else:
        render(verdict, Console())
    return verdict.exit_status


def _json(verdict: Verdict) -> str:
    return as_json(verdict).decode().rstrip()
