"""``ckpt diff``: from arguments to two checkpoints, and from their differences to text or JSON."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer

from toprope.store.checkpoint.assemble import read_indexes
from toprope.store.cli.shared import AsJson, JobOption, only_job, print_json, print_table, say, table
from toprope.store.errors import UsageError
from toprope.store.look.diff import Change, Diff, Side
from toprope.store.look.diff import diff as diff_sides
from toprope.store.look.show import read_job
from toprope.store.look.values import comparison
from toprope.store.objects.opening import open_store
from toprope.store.places import parse_selected
from toprope.store.transfer.restore import plan

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

_STEPS = 2


@app.command()
def diff(
    before: Annotated[
        str, typer.Argument(metavar="ROOT", help="The store, or the earlier checkpoint as ROOT/JOB@STEP.")
    ],
    after: Annotated[
        str | None, typer.Argument(metavar="[ROOT]", help="The later one as ROOT/JOB@STEP, of any store.")
    ] = None,
    *,
    job: JobOption = None,
    step: Annotated[list[int] | None, typer.Option("--step", min=1, help="Both steps: give it twice.")] = None,
    values: Annotated[bool, typer.Option("--values", help="Read what differs, and say by how much.")] = False,
    as_json: AsJson = False,
) -> int:
    """Say which tensors of two checkpoints differ: changed, added, removed, of another shape or dtype.

    Their digests tell, so no tensor is read; with --values those that differ are, every byte verified.

    Exit status: 0 all are the same; 1 some differ; 2 something is damaged; 3 there is no such checkpoint.
    """
    if after is not None:
        if job is not None or step:
            raise UsageError("give --job and --step, or two checkpoints as ROOT/JOB@STEP; not both")
        sides = [_side(*parse_selected(text)) for text in (before, after)]
    else:
        if step is None or len(step) != _STEPS:
            raise UsageError("give --step twice, or two checkpoints as ROOT/JOB@STEP")
        sides = [_side(before, job, one) for one in step]
    with_what, compare = comparison()
    found = diff_sides(*sides, compare=compare if values else None)
    if as_json:
        print_json({"same": found.same, "changes": found.changes, "values": with_what if values else None})
    else:
        _print(found)
        say(_summary(found, f"values compared with {with_what}" if values else "by digest; --values says by how much"))
    return 1 if found.changes else 0


def _side(root: str, job: str | None, step: int) -> Side:
    store = open_store(root)
    state = read_job(store, only_job(store, root, job)).state
    _, indexes = read_indexes(store, state, plan(state, step=step)[0])
    return Side(store=store, job=state.job, indexes=indexes)


def _print(found: Diff) -> None:
    rows = table("CHANGE", "TENSOR", "WHAT")
    for change in found.changes:
        rows.add_row(change.kind, change.name, _what(change))
    if found.changes:
        print_table(rows)


def _what(change: Change) -> str:
    if change.kind == "reshaped":
        return f"{change.before}, now {change.after}"
    apart = change.apart
    if apart is None:
        return change.after or change.before or ""
    words = f"{apart.different:,} of {apart.elements:,} elements, by at most {apart.max_abs:.6g}"
    return words + (f"; {apart.not_finite:,} not finite" if apart.not_finite else "")


def _summary(found: Diff, how: str) -> str:
    counts = Counter(change.kind for change in found.changes)
    words = [f"{counts[kind]} {kind}" for kind in ("changed", "added", "removed", "reshaped", "recut") if counts[kind]]
    return f"{', '.join([*words, f'{found.same} the same'])} ({how})"
