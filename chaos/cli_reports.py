"""``ckpt chaos report``: a verdict that was kept as JSON, shown again or as another kind of file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from toprope.chaos.reports.files import read_verdict, write_reports
from toprope.chaos.reports.text import render


def report(
    verdict: Annotated[Path, typer.Argument(metavar="FILE", help="What `ckpt chaos run --json` printed.")],
    *,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write JUnit XML to this file.")] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with a timeline to this file.")
    ] = None,
) -> None:
    """Show a verdict again that was kept as JSON; the exit status is that of its run."""
    read = read_verdict(verdict)
    write_reports(read, junit_xml=junit, html=html)
    render(read, Console())
    raise typer.Exit(read.exit_status)
