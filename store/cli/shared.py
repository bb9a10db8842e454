"""What the words of ``ckpt`` that look at a store share: their options, and how they print.

Data goes to stdout, all else to stderr.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from toprope.store.errors import NothingToVerifyError, StoreError, UsageError
from toprope.store.log.fold import JobState
from toprope.store.look.show import JobNames, foreign_text, names_in, without_log_text
from toprope.store.look.unready import passed_over
from toprope.store.objects.metered import MeteredStore
from toprope.store.objects.protocol import ObjectStore
from toprope.store.places import parse_place, selected

RootOrAt = Annotated[
    str,
    typer.Argument(
        metavar="ROOT",
        help="The store: a directory, file:///path or s3://bucket/prefix?...; or one checkpoint as ROOT/JOB@STEP.",
        show_default=False,
    ),
]
Root = Annotated[
    str,
    typer.Argument(
        metavar="ROOT", help="The store: a directory, file:///path or s3://bucket/prefix?...", show_default=False
    ),
]
JobOption = Annotated[str | None, typer.Option("--job", help="The job; not needed where there is only one.")]
StepOption = Annotated[int | None, typer.Option("--step", min=1, help="Only this step.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

PASSED_OVER_SHOWN = 20
_WIDE = 10_000  # columns where the output is not a terminal, so that nothing is cut or folded


def only_job(store: ObjectStore, root: str, job: str | None) -> str:
    """Return the job that is meant: the one that was named, or the only one that there is.

    Raises:
        NothingToVerifyError: there are none.
        UsageError: there are several, and none was named; or ``root`` is itself the directory of a job.
    """
    if job is not None:
        return job
    found = names_of_jobs(store, root)
    names = found.jobs
    if len(names) == 1:
        return names[0]
    if not names:
        why = f"; {without_log_text(found.without_log)}" if found.without_log else ""
        raise NothingToVerifyError(f"{root}: no jobs{why}")
    raise UsageError(f"{root} holds {len(names)} jobs: give --job, one of {', '.join(names)}")


def names_of_jobs(store: ObjectStore, root: str, job: str | None = None) -> JobNames:
    """Return the names of all jobs in a store, in order, or just the one that was named; say what is foreign to it.

    Raises:
        UsageError: it has none, because ``root`` is itself the directory of a job.
    """
    if job is not None:
        return JobNames(jobs=(job,))
    names = names_in(store)
    if names.foreign:
        say(foreign_text(names.foreign))
    if not names.jobs and any(True for _ in store.list("log/")):
        raise UsageError(f"{root} is the directory of a job, not a store: give the one that it lies in")
    return names


def chosen(root: str, job: str | None, step: int | None) -> tuple[str, str | None, int | None]:
    """Return root, job and step as ``selected`` does, where a path that ends almost like ``JOB@STEP`` is there.

    Raises:
        UsageError: as ``selected``; or there is no such directory, and what is wrong with its end.
    """
    path = Path(root)
    try:
        if "@" in path.name and "://" not in root and (job, step) == (None, None) and not path.exists():
            parse_place(path.name)
    except UsageError as error:
        raise UsageError(f"there is no directory {root}, and {error}") from error
    except OSError:
        pass  # whoever opens it tells
    return selected(root, job, step)


def say_passed_over(state: JobState, *, past: int) -> None:
    """Say which READY steps past ``past`` no restore begins from, and why."""
    for line in islice(passed_over(state, past=past), PASSED_OVER_SHOWN):
        say(f"passed over {line}")


@contextlib.contextmanager
def saying_why_none(state: JobState, step: int | None) -> Iterator[None]:
    """Say what was passed over if no checkpoint can be had, unless a step was asked for."""
    try:
        yield
    except (NothingToVerifyError, StoreError):
        if step is None:
            say_passed_over(state, past=0)
        raise


def table(*columns: str) -> Table:
    """Return an empty table with these columns; those of numbers stand to the right."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    numbers = {"STEP", "READY", "ATTEMPT", "RANKS", "SIZE", "RANK", "TENSORS", "SHARDS", "INDEXES", "MANIFEST", "TOTAL"}
    for column in columns:
        made.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return made


def print_table(filled: Table) -> None:
    """Print a table, as wide as the terminal; elsewhere nothing is cut or folded."""
    console = Console(highlight=False, markup=False, emoji=False)
    if console.is_terminal:
        console.print(filled)
        return
    console.width = _WIDE
    with console.capture() as captured:
        console.print(filled)
    for line in captured.get().splitlines():
        put(line.rstrip())


@contextlib.contextmanager
def progress(what: str, *, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show how far something is, on stderr if that is a terminal; yield what to tell of bytes that are done."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda count: bar.advance(task, count)


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Show that something is being done of which nobody knows how far it is, on stderr if that is a terminal."""
    console = Console(stderr=True)
    with console.status(what) if console.is_terminal else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def metered(store: ObjectStore, what: str, *, total_bytes: int) -> Iterator[ObjectStore]:
    """Yield the store, showing how much of ``total_bytes`` has been read from it, as ``progress`` does."""
    with progress(what, total_bytes=total_bytes) as tell:
        yield MeteredStore(store, tell)


def print_json(value: object) -> None:
    """Print a value as JSON."""
    plain = msgspec.to_builtins(value, enc_hook=str)
    put(msgspec.json.format(msgspec.json.encode(plain), indent=2).decode())


def put(line: str) -> None:
    """Print a line of data."""
    sys.stdout.write(f"{line}\n")


def say(line: str) -> None:
    """Tell the user something that is not data."""
    sys.stderr.write(f"{line}\n")
