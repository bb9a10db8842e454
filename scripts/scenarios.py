"""``make scenarios``: runs each scenario that comes with Toprope once, and writes down what came of it.

The verdicts lie in ``.test-long/scenarios/`` as JSON, the page that people read is ``docs/results/scenarios.md``. One
whose verdict is there already, and good, isn't run again without ``--again``; names run only those.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
from rich.console import Console
from test_long import source_commit

from toprope.chaos.live.processes import LiveError
from toprope.chaos.live.scratch import DISK, Scratch
from toprope.chaos.permit import Permit
from toprope.chaos.progress import Progress
from toprope.chaos.running import Order, run
from toprope.chaos.scenario import load, shipped
from toprope.chaos.stage import Stage
from toprope.chaos.verdict import Verdict

ROOT = Path(__file__).resolve().parents[1]
STATE = ROOT / ".test-long" / "scenarios"
PAGE = ROOT / "docs" / "results" / "scenarios.md"
PERMIT = Permit(flag=True, environment="chaos", label="chaos")  # whoever starts this means it
FIGURES = {
    "detected_after_s": "noticed",
    "next_step_after_s": "next step",
    "longest_end_step_s": "longest end_step",
    "last_ready_after_s": "last READY",
}


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict, how long it took with the undisturbed run, and of which commit; ``failed``: why there is none."""

    commit: str
    seconds: float
    verdict: Verdict | None = None
    failed: str = ""

    @property
    def good(self) -> bool:
        """Whether all was kept."""
        return self.verdict is not None and self.verdict.good


def tried(name: str, stage: Stage, *, seed: int) -> Kept:
    """Run one scenario."""
    began_s = time.monotonic()
    verdict, failed = None, ""
    with Scratch(DISK) as scratch, Progress(Console(stderr=True)) as progress:
        order = Order(loaded=load(name), seed=seed, permit=PERMIT, directory=scratch.path)
        try:
            verdict = run(order, stage, progress)
        except LiveError as error:
            failed = str(error).splitlines()[0]
    return Kept(
        commit=source_commit(PAGE), seconds=round(time.monotonic() - began_s, 1), verdict=verdict, failed=failed
    )


def page(known: dict[str, Kept]) -> str:
    """Return the page; scenarios without a verdict are in it as not run."""
    head = ("scenario", "outcome", "faults", "seconds", *(f"{title}, s" for title in FIGURES.values()), "commit")
    rows = [head, tuple("---" for _ in head)]
    rows += [_row(name, known.get(name)) for name in shipped()]
    good = sum(one.good for one in known.values())
    trouble = [f"- `{name}`: {line}" for name, one in known.items() for line in _trouble(one)]
    return (
        "# Scenarios\n\n"
        f"Written by `make scenarios`: {good} of {len(shipped())} were survived, with seed 1. Python "
        f"{platform.python_version()}, {platform.machine()}, {os.cpu_count()} CPUs that others use too.\n\n"
        "`faults` counts those that happened. `noticed` is from a fault to the end of all ranks, `next step` from "
        "there to the first step done after it, `last READY` from the end of the last step until the last due one was "
        "READY. `seconds` are those of the whole command, with the undisturbed run to compare with.\n\n"
        + "\n".join(f"| {' | '.join(row)} |" for row in rows)
        + ("\n\n## What went wrong\n\n" + "\n".join(trouble) if trouble else "")
        + "\n"
    )


def _row(name: str, kept: Kept | None) -> tuple[str, ...]:
    if kept is None or kept.verdict is None:
        outcome = "not run" if kept is None else "**stopped**"
        return (f"`{name}`", outcome, "", "", *("" for _ in FIGURES), kept.commit if kept else "")
    verdict = kept.verdict
    fired = sum(one.fired for one in verdict.injections)
    figures = (verdict.figures.get(figure) for figure in FIGURES)
    return (
        f"`{name}`",
        "survived" if verdict.good else "**failed**",
        f"{fired} of {len(verdict.injections)}",
        f"{kept.seconds:.0f}",
        *("" if value is None else f"{value:.2f}" for value in figures),
        kept.commit,
    )


def _trouble(kept: Kept) -> Iterable[str]:
    if kept.verdict is None:
        yield kept.failed
        return
    verdict = kept.verdict
    if verdict.stopped:
        yield verdict.stopped
    for promise in verdict.promises:
        if promise.outcome == "broken" or (promise.attacked and promise.outcome == "not judged"):
            yield f"{promise.name} {promise.outcome}: {'; '.join(promise.evidence)}"
    for one in verdict.unfired:
        yield f"{one.fault} {one.target} did not happen: {one.witness}"


def main() -> int:
    """Run what has not been survived yet; exit status 1 when one was not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *shipped()], metavar="NAME", help="only these")
    parser.add_argument("--again", action="store_true", help="run those that were survived, too")
    options = parser.parse_args()
    STATE.mkdir(parents=True, exist_ok=True)
    known = {
        path.stem: msgspec.json.decode(path.read_bytes(), type=Kept)
        for path in sorted(STATE.glob("*.json"))
        if path.stem in shipped()
    }
    wanted = options.names or shipped()
    with Stage() as stage:
        for name in wanted:
            if options.again or name not in known or not known[name].good:
                known[name] = tried(name, stage, seed=1)
                (STATE / f"{name}.json").write_bytes(msgspec.json.encode(known[name]))
                say(f"{'survived' if known[name].good else 'FAILED'}  {known[name].seconds:6.1f} s  {name}")
                for line in _trouble(known[name]):
                    say(f"  {line}")
            PAGE.write_text(page(known))
    return int(not all(known[name].good for name in wanted))


def say(text: str) -> None:
    """Print a line of progress."""
    sys.stderr.write(f"scenarios: {text}\n")


if __name__ == "__main__":
    sys.exit(main())
