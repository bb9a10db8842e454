"""Retention: which READY checkpoints a job keeps. A policy is a value, and so is the plan; nothing is deleted here.

What the log needs (head, its parent, the newest untainted READY, what is pinned, the source of the current attempt) is
kept under every policy, as the rules of the log have it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from msgspec import UNSET

from toprope.store.errors import UsageError
from toprope.store.log.fold import METRIC_NAME, JobState, needed_by
from toprope.store.log.records import Ready, Retire

RETIRED_AT_ONCE_MAX = 2000
_HOW = (
    "give last=N, every=K, within=TIME, best=N:min:METRIC (or max) or several, as in last=3,every=1000,within=12h, "
    "or 'all' to keep everything"
)
_BEST = re.compile(rf"([1-9][0-9]{{0,8}}):(min|max):({METRIC_NAME.pattern})")
_UNITS_S = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_LONGEST_GAPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Keep the newest ``last``, and the first at or past each multiple of ``every`` steps (0: none for that).

    And those of the last ``within_s`` seconds before the newest (0: none for that), by the times in the log. A clock
    that jumps must not retire them all: between two that follow one another at most a quarter of that time counts, and
    nothing where it went back or a time is missing.

    And of those whose ``metric`` is known the ``best`` (0: none for that): the ``lowest``, or else the highest; of
    equal ones the newer.
    """

    last: int = 1
    every: int = 0
    within_s: int = 0
    best: int = 0
    lowest: bool = True
    metric: str = ""

    def __str__(self) -> str:
        unit = next(unit for unit, seconds in _UNITS_S.items() if self.within_s % seconds == 0)
        within = f",within={self.within_s // _UNITS_S[unit]}{unit}" if self.within_s else ""
        best = f",best={self.best}:{'min' if self.lowest else 'max'}:{self.metric}" if self.best else ""
        return f"last={self.last}" + (f",every={self.every}" if self.every else "") + within + best


def parse_policy(text: str) -> Policy | None:
    """Return the policy that a text such as ``last=3,every=1000`` says; None for ``all`` or nothing: keep everything.

    Raises:
        UsageError: it is none.
    """
    if text in {"", "all"}:
        return None
    given: dict[str, int] = {}
    best: tuple[int, bool, str] | None = None
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        if name == "best" and best is None and (found := _BEST.fullmatch(number)) is not None:
            best = int(found[1]), found[2] == "min", found[3]
            continue
        unit_s = 1
        if name == "within":
            unit_s = _UNITS_S.get(number[-1:], 0)
            name, number = "within_s", number[:-1]
        known = name in {"last", "every", "within_s"} and name not in given
        if not known or not number.isascii() or not number.isdecimal() or not 1 <= int(number[:20]) * unit_s < 1 << 53:
            raise UsageError(f"retention {text[:80]!r} is not usable at {part[:40]!r}: {_HOW}")
        given[name] = int(number) * unit_s
    count, lowest, metric = best or (0, True, "")
    return Policy(**given, best=count, lowest=lowest, metric=metric)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Why a READY is kept or retired."""

    seq: int
    attempt: int
    step: int
    bytes: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPlan:
    """What is to be kept and what retired, oldest first."""

    kept: tuple[Verdict, ...] = ()
    retired: tuple[Verdict, ...] = ()


def plan_retention(state: JobState, policy: Policy | None) -> RetentionPlan:
    """Return which live READYs a policy keeps and which it retires, each with the reason."""
    keep = dict(_wanted(state, policy)) | needed_by(state)
    kept: list[Verdict] = []
    retired: list[Verdict] = []
    for seq in state.live:
        ready = state.readies[seq]
        why = keep.get(seq) or _why_retired(state, seq, policy)
        verdict = Verdict(seq=seq, attempt=ready.attempt, step=ready.step, bytes=ready.bytes, why=why)
        (kept if seq in keep else retired).append(verdict)
    return RetentionPlan(kept=tuple(kept), retired=tuple(retired))


def _wanted(state: JobState, policy: Policy | None) -> Iterator[tuple[int, str]]:
    if policy is None:
        yield from ((seq, "everything is kept") for seq in state.live)
        return
    restorable = state.restorable()
    if policy.every:
        windows: dict[int, int] = {}
        for seq, ready in reversed(restorable):
            windows.setdefault(ready.step // policy.every, seq)
        first = {seq: f"the first past step {window * policy.every}" for window, seq in windows.items() if window}
        yield from first.items()
    if policy.within_s:
        yield from ((seq, f"of the last {policy.within_s} s") for seq in _within(restorable, policy.within_s))
    yield from _best(state, restorable, policy)
    yield from ((seq, f"one of the newest {policy.last}") for seq, _ in islice(restorable, policy.last))


def _best(state: JobState, restorable: Sequence[tuple[int, Ready]], policy: Policy) -> Iterator[tuple[int, str]]:
    values = state.values_of(policy.metric)
    known = [seq for seq, _ in restorable if seq in values]
    ranked = sorted(known, key=lambda seq: values[seq] if policy.lowest else -values[seq])  # of equal ones the newer
    which = f"one of the {policy.best} with the {'lowest' if policy.lowest else 'highest'} {policy.metric}"
    yield from ((seq, f"{which}, {values[seq]:.6g}") for seq in ranked[: policy.best])


def _within(restorable: Sequence[tuple[int, Ready]], within_s: int) -> Iterator[int]:
    """Yield those that are no older than that, newest first; the age is that of the newest less what lies between."""
    age_s, after_s = 0, None
    for seq, ready in restorable:
        at_s = None if ready.at_s is UNSET else ready.at_s
        if at_s is not None and after_s is not None:
            age_s += min(max(after_s - at_s, 0), within_s // _LONGEST_GAPS)
        if age_s > within_s:
            return
        yield seq
        after_s = after_s if at_s is None else at_s


def _why_retired(state: JobState, seq: int, policy: Policy | None) -> str:
    ready = state.readies[seq]
    if state.is_tainted(attempt=ready.attempt, step=ready.step):
        return "tainted"
    if not state.is_on_lineage(attempt_uid=ready.attempt_uid, step=ready.step):
        return "left behind by a rollback"
    return f"not kept by {policy}"


def make_retire(state: JobState) -> Retire | None:
    """Return the record that retires what the job's own policy does not keep, or None if that is nothing."""
    plan = plan_retention(state, parse_policy(state.retain))
    seqs = tuple(verdict.seq for verdict in plan.retired[:RETIRED_AT_ONCE_MAX])
    return Retire(seqs=seqs) if seqs else None
