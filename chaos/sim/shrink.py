"""A broken history made small: fewer troubles, fewer machines, a quieter network, while the same promise breaks.

What is left is data, a ``Story``, that replays on the same source: ``ckpt chaos sim --replay FILE|TEXT``.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from toprope.chaos.sim.history import Outcome
from toprope.chaos.sim.history import run as run_one
from toprope.chaos.sim.mutants import MUTANTS, switched_off
from toprope.chaos.sim.options import Options, Trouble
from toprope.store.errors import UsageError

RUNS_MAX = 150
_SIMPLER: tuple[dict[str, object], ...] = (
    {"drop": 0.0},
    {"duplicate": 0.0},
    {"store_fault": 0.0},
    {"slow": 1.0},
    {"broker": False},
    {"bucket": False},
    {"retain": ""},
    {"ranks_per_node": 1},
    {"spares": 0},
    {"nodes": 1},
    {"nodes": 2},
)


class Story(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One history as data. It broke ``invariant`` on the source ``commit``; ``mutant`` is what was switched off."""

    seed: int
    options: Options
    invariant: str = ""
    mutant: str = ""
    commit: str = ""


def retold(text: str) -> Outcome:
    """Run the history that a story, or a file with one, tells.

    Raises:
        UsageError: it is none.
    """
    try:
        body = text.encode() if text.lstrip().startswith("{") else Path(text).read_bytes()
        story = msgspec.json.decode(body, type=Story)
    except (OSError, ValueError) as error:
        raise UsageError(f"--replay {text[:80]!r}: give the story that a broken history ended with: {error}") from error
    return tell(story.seed, story.options, mutant=story.mutant)


def tell(seed: int, options: Options | None, *, mutant: str = "") -> Outcome:
    """Run one history, without the safeguard of a mutant if one is named.

    Raises:
        UsageError: there is no such mutant.
    """
    if not mutant:
        return run_one(seed, options)
    off = next((each for each in MUTANTS if each.name == mutant), None)
    if off is None:
        raise UsageError(f"mutant {mutant!r}: give one of {', '.join(each.name for each in MUTANTS)}")
    with switched_off(off):
        return run_one(seed, options if options is not None else off.options(seed))


def shrunk(outcome: Outcome, again: Callable[[Options], Outcome], *, runs_max: int = RUNS_MAX) -> Outcome:
    """Return the smallest history found in so many runs that breaks the same promise; ``again`` runs one."""
    runs, best = 0, outcome
    moved = True
    while moved:
        moved = False
        for smaller in _smaller(best.options):
            if runs >= runs_max:
                return best
            runs += 1
            found = again(smaller)
            if found.invariant == outcome.invariant:
                best, moved = found, True
                break
    return best


def _smaller(options: Options) -> Iterator[Options]:
    """Yield options with less in them: half of the troubles gone, then a setting made plain, then one trouble gone."""
    script = options.script
    half = len(script) // 2
    if half > 1:
        yield _with(options, script[:half])
        yield _with(options, script[half:])
    for plain in _SIMPLER:
        simpler = msgspec.structs.replace(options, **plain)
        if simpler != options and simpler.spares < simpler.nodes <= options.nodes:
            yield simpler
    for at in reversed(range(len(script))):
        yield _with(options, script[:at] + script[at + 1 :])
    ends_s = script[-1].at_s if script else 0.0
    if options.chaos_s > ends_s + 1.0:
        yield msgspec.structs.replace(options, chaos_s=ends_s + 1.0)


def _with(options: Options, script: tuple[Trouble, ...]) -> Options:
    faults = tuple(sorted({trouble.what for trouble in script}))
    return msgspec.structs.replace(options, script=script, faults=faults)


def told(outcome: Outcome, *, mutant: str = "") -> str:
    """Return a broken history for people: what broke, its story, and how to see it again."""
    story = Story(
        seed=outcome.seed, options=outcome.options, invariant=outcome.invariant, mutant=mutant, commit=_commit()
    )
    return f"{outcome}\nagain: ckpt chaos sim --replay '{msgspec.json.encode(story).decode()}'"


def _commit() -> str:
    """Return the commit of the source that runs, or nothing where it is not a checkout."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ("git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "--short", "HEAD")
        return subprocess.run(command, capture_output=True, check=True, text=True, timeout=5.0).stdout.strip()
    return ""
