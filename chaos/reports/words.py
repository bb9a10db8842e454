"""What all reports call things."""

from __future__ import annotations

import re
from html import escape

from toprope.chaos.verdict import NO_RANK, Injection, Outcome, Verdict

_UNITS = {"_s": "s", "_ms": "ms", "_bytes": "bytes", "_steps": "steps", "_share": ""}
_MARKS: dict[Outcome, str] = {"held": "\N{CHECK MARK}", "broken": "\N{MULTIPLICATION X}", "not judged": "?"}
_CONTROLS = re.compile("[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML can't hold, a page should not and a terminal would obey: a witness may quote any bytes."""


def plain(text: str) -> str:
    """Return a text without control characters, each of them replaced."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


def quoted(text: str) -> str:
    """Return a text as HTML that shows it."""
    return escape(plain(text))


def fault_of(injection: Injection) -> str:
    """Return what was done to what."""
    return f"{injection.fault}: {injection.target}"


def headline(verdict: Verdict) -> str:
    """Return what came of it in one sentence."""
    if verdict.stopped:
        return f"not carried through: {verdict.stopped}"
    parts = []
    if verdict.broken:
        parts.append(f"broken: {', '.join(verdict.broken)}")
    if count := len(verdict.unfired):
        parts.append(f"{count} of {len(verdict.injections)} planned faults did not happen")
    unjudged = [one.name for one in verdict.promises if one.attacked and one.outcome == "not judged"]
    if unjudged:
        parts.append(f"attacked and not judged: {', '.join(unjudged)}")
    if not verdict.promises:
        parts.append("no promise was judged")
    return "; ".join(parts) or "every promise held"


def verdict_word(verdict: Verdict) -> str:
    """Return the verdict in one or two words."""
    if verdict.stopped:
        return "stopped"
    if verdict.broken:
        return "broken"
    return "held" if verdict.good else "nothing proved"


def mark_of(outcome: Outcome) -> str:
    """Return a sign that tells an outcome without colour."""
    return _MARKS[outcome]


def title_of(name: str) -> str:
    """Return a name for people: ``no-torn-step`` becomes "no torn step"."""
    return name.replace("-", " ").replace("_", " ")


def figure(name: str, value: float) -> tuple[str, str]:
    """Return a figure's name and its value with the unit that the name ends with."""
    suffix = next((one for one in sorted(_UNITS, key=len, reverse=True) if name.endswith(one)), "")
    text = f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2f}"
    return title_of(name.removesuffix(suffix)), f"{text} {_UNITS.get(suffix, '')}".strip()


def row_of(rank: int) -> str:
    """Return what a row of the timeline is called."""
    return "services" if rank == NO_RANK else f"rank {rank}"
