"""``ckpt copy``: a job, or one of its checkpoints, from one store into another."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from toprope.store.cli.shared import AsJson, JobOption, chosen, metered, only_job, print_json, put, say
from toprope.store.keep.holds import holding
from toprope.store.look.show import read_job
from toprope.store.look.verify import plan as plan_verify
from toprope.store.objects.opening import check_apart, open_store
from toprope.store.sizes import size_text
from toprope.store.transfer.copy import copy as copy_job
from toprope.store.transfer.copy import plan

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def copy(
    source: Annotated[
        str,
        typer.Argument(
            metavar="ROOT", help="The store to copy from, or one checkpoint of it as ROOT/JOB@STEP.", show_default=False
        ),
    ],
    target: Annotated[str, typer.Argument(metavar="ROOT2", help="The store to copy to.", show_default=False)],
    job: JobOption = None,
    step: Annotated[
        int | None, typer.Option("--step", min=1, help="Only this step, without the job's history.")
    ] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Copy a job into another store: every object checked on its way, the log last.

    Until the log is there, the destination has no checkpoint. What an earlier copy brought is checked and not copied
    again: so a copy that was interrupted goes on, and one that was finished brings over what is new.

    Exit status: 0 done; 2 something is damaged, and the log was not copied; 3 there is no such checkpoint; 4 a store
    can't be reached; 64 the destination has a job of that name with another history.
    """
    source, job, step = chosen(source, job, step)
    check_apart(target, source)
    read_from = open_store(source)
    name = only_job(read_from, source, job)
    before = read_job(read_from, name).state
    held = plan_verify(before, step=step) if before.live else ()
    write_to = open_store(target, write=True, patient=False)  # it is asked for what isn't there
    with contextlib.ExitStack() as holds:
        for seq in held:
            holds.enter_context(holding(read_from, before, seq))
        log = read_job(read_from, name)  # with the holds there, so that nothing it names is deleted under us
        objects = plan(read_from, log, step=step)
        total = sum(ready.bytes for seq, ready in log.state.readies.items() if seq in log.state.live)
        with metered(read_from, "copying", total_bytes=total) as watched:
            done = copy_job(watched, write_to, log, objects=objects, step=step)
    if as_json:
        print_json(done)
        return
    steps = ", ".join(str(one) for one in done.checkpoints) or "none"
    put(f"copied job {done.job} to {target}: steps {steps}")
    put(f"  {done.objects} objects, {size_text(done.bytes)}; {done.there} were there; {done.records} log records")
    if not done.checkpoints:
        say("the job has no READY checkpoint yet; its log was copied")
