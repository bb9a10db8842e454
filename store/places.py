"""How a checkpoint, or a range of steps, is named on a command line: the one reading of JOB@STEP."""

from __future__ import annotations

import re

from toprope.store.errors import UsageError
from toprope.store.names import checked_id

_RANGE = re.compile(r"([^@]+)@([0-9]{1,15})(?:(\.\.)([0-9]{1,15})?)?")
_SELECTED = re.compile(r"(?P<root>.+)/(?P<job>[a-z0-9][a-z0-9._-]*)@(?P<step>[0-9]{1,15})(?P<query>\?.*)?")


def parse_range(text: str) -> tuple[str, int, int | None]:
    """Return job, first and last step of ``JOB@STEP``, ``JOB@FROM..TO`` or ``JOB@FROM..``.

    The last step is None where there is no range, and -1 where it has no end.

    Raises:
        UsageError: it is not of that form.
    """
    found = _RANGE.fullmatch(text)
    if found is None:
        _, at, step = text[:100].rpartition("@")
        why = f": {step!r} is no step" if at and not step.isdecimal() else ""
        raise UsageError(f"{text[:100]!r} is not usable{why}: give JOB@STEP, as run7@1200")
    end = None if not found[3] else int(found[4] or -1)
    return checked_id(found[1], what="job"), int(found[2]), end


def parse_place(text: str) -> tuple[str, int]:
    """Return job and step of ``JOB@STEP``.

    Raises:
        UsageError: it is not of that form, or a range.
    """
    name, step, end = parse_range(text)
    if end is not None:
        raise UsageError(f"{text!r} is a range: give one step, as {name}@{step}")
    return name, step


def parse_selected(text: str) -> tuple[str, str, int]:
    """Return root, job and step of ``ROOT/JOB@STEP``.

    Raises:
        UsageError: it is not of that form.
    """
    match = _SELECTED.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} names no checkpoint: give ROOT/JOB@STEP twice, or ROOT with --step A --step B")
    return match["root"] + (match["query"] or ""), match["job"], int(match["step"])


def parse_base(text: str) -> tuple[str, str, int]:
    """Return root, job and step of ``ROOT/JOB@STEP``, or of ``JOB@STEP``, whose root is empty.

    Raises:
        UsageError: it is neither, or a range.
    """
    return parse_selected(text) if _SELECTED.fullmatch(text) is not None else ("", *parse_place(text))


def selected(root: str, job: str | None, step: int | None) -> tuple[str, str | None, int | None]:
    """Return root, job and step, where ``root`` may be ``ROOT/JOB@STEP``.

    Raises:
        UsageError: it is, and a job or step is given beside it.
    """
    if _SELECTED.fullmatch(root) is None:
        return root, job, step
    if job is not None or step is not None:
        raise UsageError(f"{root} names job and step: leave out --job and --step")
    return parse_selected(root)
