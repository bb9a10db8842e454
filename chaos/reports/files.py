"""Verdicts as files, and back: all that a run leaves behind is made from the one value."""

from __future__ import annotations

from pathlib import Path

import msgspec

from toprope.chaos.reports.junit import junit
from toprope.chaos.reports.page import page
from toprope.chaos.verdict import Verdict
from toprope.store.errors import UsageError


class _Judged(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader of the JSON wants to know before all else."""

    good: bool
    exit_status: int
    verdict: Verdict


def as_json(verdict: Verdict) -> bytes:
    """Return ``{good, exit_status, verdict}``, indented, with a line feed at the end."""
    judged = _Judged(good=verdict.good, exit_status=verdict.exit_status, verdict=verdict)
    return msgspec.json.format(msgspec.json.encode(judged)) + b"\n"


def read_verdict(path: Path) -> Verdict:
    """Return the verdict that a file of JSON holds.

    Raises:
        UsageError: it can't be read, or holds none.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Judged).verdict
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{path}: {error}; give a file that `ckpt chaos run --json` has written") from error


def write_reports(
    verdict: Verdict, *, json: Path | None = None, junit_xml: Path | None = None, html: Path | None = None
) -> None:
    """Write the reports that are asked for, each to its file; a directory that is missing is made."""
    if json is not None:
        _write(json, as_json(verdict))
    if junit_xml is not None:
        _write(junit_xml, junit(verdict))
    if html is not None:
        _write(html, page(verdict).encode())


def _write(path: Path, body: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)
