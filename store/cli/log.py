"""``ckpt log``: the job log in words, a record a line. ``ckpt show`` prints it the same way."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Iterable
from typing import Annotated

import msgspec
import typer

from toprope.store.cli.shared import JobOption, Root, only_job, put
from toprope.store.errors import StoreError
from toprope.store.log.chain import Entry, follow_entries, read_entries
from toprope.store.look.show import read_job, record_lines
from toprope.store.objects.opening import open_store

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

_POLL_S = 1.0


@app.command()
def log(
    root: Root,
    job: JobOption = None,
    *,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with records as they come, until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, an object a line.")] = False,
) -> None:
    """Print the job log, oldest record first, each on its line.

    Exit status: 0 done; 2 a record is damaged, and none after it is shown; 130 after Ctrl-C.
    """
    store = open_store(root)
    name = only_job(store, root, job)
    show = _print_json_lines if as_json else print_records
    try:
        found = read_job(store, name)
    except StoreError:
        for entry, _ in read_entries(store, name):  # what stands before the damage, which it then raises again
            show([entry])
        raise
    show(found.entries)
    if not follow:
        return
    sys.stdout.flush()
    for entry in follow_entries(store, found.state, wait=lambda: time.sleep(_POLL_S)):
        show([entry])
        sys.stdout.flush()


def print_records(entries: Iterable[Entry]) -> None:
    """Print records in words, a line each; in a terminal long ones go on below their own words."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for line in record_lines(tuple(entries)):
        if line.number == 0:
            put("RECORD  TERM  KIND     WHAT")
        head = f"{line.number:>6}  {line.term:>4}  {line.kind:<7}  "
        first, *more = textwrap.wrap(line.what, max(20, width - len(head))) if width else [line.what]
        for one in (head + first, *(" " * len(head) + rest for rest in more)):
            put(one)


def _print_json_lines(entries: Iterable[Entry]) -> None:
    for entry in entries:
        put(msgspec.json.encode({"number": entry.number, **msgspec.to_builtins(entry.record)}).decode())
