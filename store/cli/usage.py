"""``ckpt du``: what a store weighs, as text or JSON."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from toprope.store.cli.shared import AsJson, Root, print_json, print_table, put, say, table
from toprope.store.look.show import foreign_text
from toprope.store.look.usage import JobUse, Pile, damages
from toprope.store.look.usage import usage as usage_of
from toprope.store.objects.opening import open_store
from toprope.store.sizes import size_text

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def du(
    root: Root,
    job: Annotated[str | None, typer.Option("--job", help="Only this job.")] = None,
    *,
    as_json: AsJson = False,
) -> int:
    """Say what a store weighs: by job, attempt, step and kind, and apart what no record of a log names.

    Such objects are left over, or belong to a step that is on its way to READY.

    No shard is read: of its damage only the length tells here, and `ckpt verify` finds the rest.

    Exit status: 0 done; 2 something that a log names is missing or damaged; what is known is counted all the same.
    """
    found = usage_of(open_store(root), job=job)
    wrong = list(damages(found))
    if found.foreign:
        say(foreign_text(found.foreign))
    if as_json:
        print_json({"jobs": [_job_json(one) for one in found.jobs], "others": found.others, "damages": wrong})
        return 2 if wrong else 0
    for one in found.jobs:
        _print_job(one)
    if found.others.objects:
        put(f"of no job that has a log: {_pile(found.others)}")
    total = sum(one.bytes for one in found.jobs) + found.others.bytes
    put(f"total {size_text(total)}")
    for damage in wrong:
        say(f"  {damage}")
    return 2 if wrong else 0


def _print_job(job: JobUse) -> None:
    put(f"job {job.job}: {size_text(job.bytes)}, of it log {size_text(job.log)}, facts {size_text(job.facts)}")
    rows = table("ATTEMPT", "STEP", "READY", "SHARDS", "INDEXES", "MANIFEST", "TOTAL", "NOTE")
    for step in job.steps:
        sizes = (size_text(size) for size in (step.shard, step.index, step.manifest, step.bytes))
        rows.add_row(str(step.attempt), str(step.step), str(step.seq), *sizes, "retired" if step.retired else "")
    if job.steps:
        print_table(rows)
    if job.orphans.objects:
        put(f"named by no record: {_pile(job.orphans)}")
    if job.unknown.objects:
        put(f"not known, for what may name it is damaged: {_pile(job.unknown)}")
    put("")


def _pile(pile: Pile) -> str:
    return f"{size_text(pile.bytes)} in {pile.objects:,} object{'s' * (pile.objects != 1)}"


def _job_json(job: JobUse) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(job)
    del plain["damages"]
    steps = [msgspec.to_builtins(step) | {"bytes": step.bytes} for step in job.steps]
    return plain | {"bytes": job.bytes, "steps": steps}
