"""``make kills SEEDS=1:51``: kills one thing of a training at a random moment, seed by seed, and writes down the sum.

Each seed is a run of the scenario ``kill-any``, which draws from it what dies and when. What came of each lies in
``.test-long/kills.jsonl``, and a seed that is there isn't run again, unless its run failed before anything was killed;
the page that people read is ``docs/results/kills.md``.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from scenarios import Kept, tried
from test_long import ROOT, source_commit

from toprope.chaos.stage import Stage

SCENARIO = "kill-any"
STATE = ROOT / ".test-long" / "kills.jsonl"
PAGE = ROOT / "docs" / "results" / "kills.md"
FIGURES = ("longest_end_step_s", "next_step_after_s")
LOST, WRONG = {"verified", "READY once"}, {"bit-identical", "no torn step"}


class Killed(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one seed: ``victim`` was killed; ``read_back`` READY checkpoints were read in full.

    ``hung``: why it could not be carried through; ``failed``: why it could not even begin, so that it counts for
    nothing; ``unproved``: why it is not good though it broke nothing.
    """

    seed: int
    commit: str
    seconds: float
    victim: str = ""
    good: bool = False
    broken: tuple[str, ...] = ()
    hung: str = ""
    failed: str = ""
    unproved: tuple[str, ...] = ()
    read_back: int = 0
    figures: dict[str, float] = {}


def summed_up(seed: int, kept: Kept) -> Killed:
    """Return of a verdict what the page needs."""
    result = Killed(seed=seed, commit=source_commit(PAGE), seconds=kept.seconds, failed=kept.failed)
    if kept.verdict is None:
        return result
    verdict = kept.verdict
    if verdict.stopped and not verdict.injections:  # it came to an end before it had come to the kill
        return msgspec.structs.replace(result, failed=verdict.stopped)
    (verified,) = (one for one in verdict.promises if one.name == "verified")
    return msgspec.structs.replace(
        result,
        victim=", ".join(f"{one.target}{'' if one.fired else ' (not hit)'}" for one in verdict.injections),
        good=verdict.good,
        broken=verdict.broken,
        hung=verdict.stopped,
        unproved=(
            *(f"{one.name} was not judged" for one in verdict.promises if one.attacked and one.outcome == "not judged"),
            *(f"{one.target} was not hit: {one.witness}" for one in verdict.unfired),
        ),
        read_back=int(verified.evidence[0].split()[0]) if verified.outcome == "held" else 0,
        figures=verdict.figures,
    )


def page(known: Sequence[Killed]) -> str:
    """Return the page: a row for each commit and what died, and each seed that went wrong."""
    runs = [one for one in known if not one.failed]
    head = ("commit", "seeds", "killed", "runs", "survived", "READY read back", "longest end_step, s", "next step, s")
    groups = sorted({(one.commit, one.victim) for one in runs})
    rows = [_row([one for one in runs if (one.commit, one.victim) == group]) for group in groups]
    trouble = [f"- seed {one.seed}, {one.victim}: {_reason(one)}" for one in runs if not one.good]
    trouble += [f"- seed {one.seed} failed before anything was killed: {one.failed}" for one in known if one.failed]
    return (
        "# Kills at random moments\n\n"
        f"Written by `make kills`: {sum(one.good for one in runs)} of {len(runs)} kills were survived. READY "
        f"checkpoints lost or damaged in {_count(runs, LOST)} of them, wrong bytes in {_count(runs, WRONG)}, hung: "
        f"{sum(bool(one.hung) for one in runs)}. {sum(one.read_back for one in runs)} READY checkpoints were read "
        f"back in full. Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} CPUs that others "
        "use too.\n\n"
        "Each is a run of the scenario `kill-any` on real processes: the seed draws what dies, and at which moment of "
        "the first seconds. `next step` is the longest time from the end of all ranks to the next new step.\n\n"
        + "\n".join(f"| {' | '.join(row)} |" for row in (head, tuple("---" for _ in head), *rows))
        + ("\n\n## What went wrong\n\n" + "\n".join(trouble) if trouble else "")
        + "\n"
    )


def _reason(one: Killed) -> str:
    return one.hung or ", ".join((*one.broken, *one.unproved))


def _count(known: Sequence[Killed], promises: set[str]) -> int:
    return sum(not promises.isdisjoint(one.broken) for one in known)


def _row(those: Sequence[Killed]) -> tuple[str, ...]:
    seeds = [one.seed for one in those]
    longest = (max((one.figures.get(name, 0.0) for one in those), default=0.0) for name in FIGURES)
    return (
        those[0].commit,
        f"{min(seeds)} to {max(seeds)}",
        those[0].victim or "nothing",
        str(len(those)),
        str(sum(one.good for one in those)),
        str(sum(one.read_back for one in those)),
        *(f"{figure:.2f}" if figure else "" for figure in longest),
    )


def recorded(state: Path) -> list[Killed]:
    """Return what is known of earlier runs, of each seed what came last."""
    lines = state.read_bytes().splitlines() if state.exists() else []
    return list({one.seed: one for one in (msgspec.json.decode(line, type=Killed) for line in lines)}.values())


def to_run(seeds: range, known: Sequence[Killed]) -> list[int]:
    """Return the seeds of which nothing is known but that a run failed before anything was killed."""
    return sorted({*seeds} - {one.seed for one in known if not one.failed})


def main() -> int:
    """Run the seeds that have not been run yet; exit status 1 when one was not survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", metavar="BEGIN:END", help="seeds from BEGIN on, before END")
    begin, end = map(int, parser.parse_args().seeds.split(":"))
    STATE.parent.mkdir(exist_ok=True)
    known = recorded(STATE)
    with Stage() as stage:
        for seed in to_run(range(begin, end), known):
            known = [one for one in known if one.seed != seed]
            known.append(summed_up(seed, tried(SCENARIO, stage, seed=seed)))
            with STATE.open("ab") as stream:
                stream.write(msgspec.json.encode(known[-1]) + b"\n")
            sys.stderr.write(f"kills: seed {seed}, {known[-1].victim}: {'good' if known[-1].good else 'FAILED'}\n")
            PAGE.write_text(page(known))
    return int(not all(one.good for one in known if begin <= one.seed < end))


if __name__ == "__main__":
    sys.exit(main())
