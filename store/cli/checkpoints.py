"""``ckpt ls``, ``show`` and ``restore``: from arguments to a store, and from values to text or JSON.

They need nothing but the store. Data goes to stdout, all else to stderr.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from toprope.store.checkpoint.manifest import Index, Manifest
from toprope.store.checkpoint.ready import read_index, read_manifest
from toprope.store.cli.log import print_records
from toprope.store.cli.shared import (
    PASSED_OVER_SHOWN,
    AsJson,
    JobOption,
    Root,
    RootOrAt,
    StepOption,
    chosen,
    metered,
    names_of_jobs,
    only_job,
    print_json,
    print_table,
    say,
    say_passed_over,
    saying_why_none,
    table,
)
from toprope.store.errors import UnavailableError, UsageError
from toprope.store.log.fold import JobState
from toprope.store.look.show import (
    CheckpointLine,
    JobLog,
    checkpoint_lines,
    named_objects,
    read_job,
    read_jobs,
    without_log_text,
    xxhsum_lines,
)
from toprope.store.look.unready import unready
from toprope.store.look.verify import plan
from toprope.store.objects.opening import check_outside, empty_folders, open_store
from toprope.store.objects.protocol import ObjectStore
from toprope.store.sizes import size_text
from toprope.store.transfer.partial import PartlyRestored, restore_part
from toprope.store.transfer.restore import Restored
from toprope.store.transfer.restore import plan as plan_restore
from toprope.store.transfer.restore import restore as restore_checkpoint

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback()
def _group() -> None:
    """Look at a store and get checkpoints out of it. No service needs to run."""


@app.command("ls")
def list_jobs(root: Root, job: JobOption = None, *, as_json: AsJson = False) -> int:
    """List jobs and their READY checkpoints, newest last.

    Exit status: 0; 2 if the log of one of several jobs is damaged, 3 if one has objects and no log, which is said; the
    others are listed.
    """
    store = open_store(root)
    names = names_of_jobs(store, root, job)
    logs, broken = read_jobs(store, names.jobs)
    for damage in broken:
        say(str(damage))
    if names.without_log:
        say(without_log_text(names.without_log))
    if as_json:
        print_json([_job_json(log.state) for log in logs])
    elif logs:
        _print_jobs([log.state for log in logs])
    elif not broken and not names.without_log:
        say(f"{root}: no jobs yet")
    return 2 if broken else 3 if names.without_log else 0


def _print_jobs(states: Sequence[JobState]) -> None:
    rows = table("JOB", "STEP", "READY", "ATTEMPT", "RANKS", "SIZE", "NOTE")
    for state in states:
        lines = checkpoint_lines(state)
        for line in lines:
            rows.add_row(state.job, *_checkpoint_cells(line))
        if not lines:
            rows.add_row(state.job, "-", "-", str(state.attempt_number), "-", "-", "no READY checkpoint yet")
    print_table(rows)


@app.command()
def show(
    root: RootOrAt,
    job: JobOption = None,
    step: StepOption = None,
    *,
    files: Annotated[bool, typer.Option("--files", help="List every object that the log names.")] = False,
    xxhsum: Annotated[bool, typer.Option("--xxhsum", help="Print a check file: `xxhsum -c` in the store.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a job: its log and its checkpoints; with --step the manifest and the tensors of one."""
    root, job, step = chosen(root, job, step)
    if (files or xxhsum) and step is not None:
        raise UsageError("--files and --xxhsum are of the whole job: leave out --step")
    store = open_store(root)
    log = read_job(store, only_job(store, root, job))
    if xxhsum:
        for line in xxhsum_lines(named_objects(store, log)):
            print(line)
    elif files and as_json:
        print_json(list(named_objects(store, log)))
    elif files:
        for named in named_objects(store, log):
            print(named.key)
    elif step is not None:
        _show_step(store, log.state, step, as_json=as_json)
    elif as_json:
        print_json(_job_json(log.state) | {"log": [entry.record for entry in log.entries]})
    else:
        _show_job(log)


@app.command()
def restore(  # noqa: PLR0913 - one for each option
    root: RootOrAt,
    to: Annotated[Path, typer.Option("--to", help="The directory to make.", show_default=False)],
    job: JobOption = None,
    step: StepOption = None,
    *,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Only tensors of such names, as 'model.*'; may be repeated.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what an earlier restore wrote there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint's shards and its manifest into a new directory, every byte verified.

    Without --step it is the newest READY checkpoint that verifies; what is passed over (damaged, tainted), and why, is
    said, as is what is newer and no checkpoint. With --only it is a part: files of those tensors and PARTIAL.json
    instead of a manifest; nothing damaged is passed over then.
    """
    root, job, step = chosen(root, job, step)
    store = open_store(root)
    state = read_job(store, only_job(store, root, job)).state
    check_outside(to, root)
    with saying_why_none(state, step):
        seq = plan_restore(state, step=step)[0]
        with metered(store, "restoring", total_bytes=state.readies[seq].bytes) as watched:
            done: Restored | PartlyRestored = (
                restore_part(watched, state, to=to, only=only, step=step, force=force)
                if only
                else restore_checkpoint(watched, state, to=to, step=step, force=force)
            )
    if isinstance(done, PartlyRestored):
        _print_part(done, as_json=as_json)
    else:
        _print_restored(done, as_json=as_json)
    if step is None:
        _say_unready(store, root, state, past=done.step)


def _say_unready(store: ObjectStore, root: str, state: JobState, *, past: int) -> None:
    """Say what else is there that is newer, or looks as if it were."""
    say_passed_over(state, past=past)
    try:
        folders = (f"{folder}: an empty folder" for folder in empty_folders(root, state.job))
        for line in islice(chain(unready(store, state, past=past), folders), PASSED_OVER_SHOWN):
            say(f"no checkpoint: {line}")
    except UnavailableError as error:
        say(f"what else is there is not known: {error}")


def _print_part(done: PartlyRestored, *, as_json: bool) -> None:
    if as_json:
        print_json(done)
        return
    what = f"{done.tensors} of {done.of} tensors, {size_text(done.bytes)}"
    print(f"restored a part of step {done.step} of job {done.job} (READY {done.seq}) into {done.directory}: {what}")
    for name in done.files:
        print(f"  {name}")


def _print_restored(done: Restored, *, as_json: bool) -> None:
    for passed in done.passed_over:
        say(f"passed over step {passed.step} (READY {passed.seq}):")
        for damage in passed.damages:
            say(f"  {damage}")
    if as_json:
        print_json(_restored_json(done))
        return
    what = f"step {done.step} of job {done.job} (READY {done.seq}, {size_text(done.bytes)})"
    print(f"restored {what} into {done.directory}")
    for name in done.files:
        print(f"  {name}")


def _show_job(log: JobLog) -> None:
    state = log.state
    print(f"job {state.job}  uid {state.job_uid}  term {state.term}  attempt {state.attempt_number}")
    print()
    print_records(log.entries)
    print()
    checkpoints = table("STEP", "READY", "ATTEMPT", "RANKS", "SIZE", "NOTE")
    for checkpoint in checkpoint_lines(state):
        checkpoints.add_row(*_checkpoint_cells(checkpoint))
    if state.readies:
        print_table(checkpoints)
        lineage = " <- ".join(f"{ready.step} (READY {seq})" for seq, ready in state.ready_lineage())
        print()
        print(f"lineage: {lineage or 'none yet: the current attempt began afresh'}")
    else:
        print("no READY checkpoint yet")


def _show_step(store: ObjectStore, state: JobState, step: int, *, as_json: bool) -> None:
    seq = plan(state, step=step)[-1]
    manifest, _ = read_manifest(store, state, seq)
    indexes = [read_index(store, manifest, shard) for shard in manifest.shards]
    if as_json:
        print_json({"ready": seq, "manifest": manifest, "indexes": indexes})
        return
    print(f"job {state.job}  step {step}  READY {seq}  attempt {manifest.attempt}  uid {manifest.attempt_uid}")
    print()
    print_table(_shard_table(manifest, indexes))
    print()
    print_table(_tensor_table(indexes))


def _shard_table(manifest: Manifest, indexes: list[Index]) -> Table:
    rows = table("RANK", "SIZE", "TENSORS", "XXH3-128", "FILE")
    for shard, index in zip(manifest.shards, indexes, strict=True):
        rows.add_row(str(shard.rank), size_text(shard.bytes), str(len(index.tensors)), shard.digest, index.files[0].key)
    return rows


def _tensor_table(indexes: list[Index]) -> Table:
    rows = table("RANK", "TENSOR", "DTYPE", "SHAPE", "BYTES", "XXH3-128")
    for index in indexes:
        for tensor in index.tensors:
            shape = "x".join(str(extent) for extent in tensor.shape) or "scalar"
            if tensor.global_shape != tensor.shape:
                shape += " of " + "x".join(str(extent) for extent in tensor.global_shape)
            place = f"{tensor.begin}-{tensor.end}"
            rows.add_row(str(index.rank), tensor.name, tensor.dtype, shape, place, tensor.digest)
    return rows


def _checkpoint_cells(line: CheckpointLine) -> tuple[str, ...]:
    return (
        str(line.step),
        str(line.seq),
        str(line.attempt),
        str(line.world),
        size_text(line.bytes),
        ", ".join(line.notes),
    )


def _job_json(state: JobState) -> dict[str, Any]:
    return {
        "job": state.job,
        "uid": state.job_uid,
        "term": state.term,
        "attempt": state.attempt_number,
        "records": state.n,
        "checkpoints": checkpoint_lines(state),
    }


def _restored_json(done: Restored) -> dict[str, Any]:
    builtins: dict[str, Any] = msgspec.to_builtins(done, enc_hook=str)
    return builtins
