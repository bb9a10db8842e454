"""``ckpt export``: from arguments to files that need no Toprope."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toprope.store.cli.shared import (
    AsJson,
    JobOption,
    RootOrAt,
    chosen,
    metered,
    only_job,
    print_json,
    put,
    say,
    say_passed_over,
    saying_why_none,
)
from toprope.store.errors import UsageError
from toprope.store.keep.holds import holding_choice
from toprope.store.look.show import read_state
from toprope.store.objects.opening import check_outside, open_store
from toprope.store.sizes import parse_size, size_text
from toprope.store.transfer.export import Format, Wanted
from toprope.store.transfer.export import export as export_checkpoint
from toprope.store.transfer.restore import plan

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


_SHARD_SIZE = "5GB"


@app.command()
def export(  # noqa: PLR0913 - one for each option
    root: RootOrAt,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The directory to make.", show_default=False)],
    *,
    to: Annotated[Format, typer.Option("--to", help="The format.")] = "safetensors",
    job: JobOption = None,
    step: Annotated[int | None, typer.Option("--step", min=1, help="This step; else the newest READY one.")] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Only tensors of such names, as 'model.*'; may be repeated.")
    ] = None,
    prefix_strip: Annotated[
        str, typer.Option("--prefix-strip", help="What to take off the beginning of names.", show_default=False)
    ] = "",
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", help="Split into files of this size.")
    ] = _SHARD_SIZE,
    per_rank: Annotated[
        bool, typer.Option("--per-rank", help="Keep what is each rank's own, as rank-00003.NAME.")
    ] = False,
    as_bytes: Annotated[
        bool, typer.Option("--as-bytes", help="Keep dtypes that safetensors lacks as bytes (U8).")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace what an earlier export wrote there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint's whole tensors in a format that loads without Toprope, every byte verified.

    safetensors: files in the layout of Hugging Face. dcp: a directory for torch.distributed.checkpoint.load, with the
    names of get_state_dict, settings of optimizers included. torch: model.pt, a dict by the same names, which
    torch.load takes with weights_only=True. The last two need torch.

    Pieces that ranks stored are put together, what all have alike is written once. What ranks have of their own (random
    numbers, say) is refused by name: leave it out with --only, or keep it with --per-rank.

    Exit status: 0 done; 2 something is damaged, and nothing was written; 3 there is no such checkpoint; 64 something
    can't be exported as asked.
    """
    if to != "safetensors" and (as_bytes or max_shard_size != _SHARD_SIZE):
        raise UsageError("--as-bytes and --max-shard-size are for safetensors: leave them out with --to " + to)
    wanted = Wanted(
        format=to,
        only=tuple(only or ()),
        prefix_strip=prefix_strip,
        per_rank=per_rank,
        as_bytes=as_bytes,
        max_shard_bytes=parse_size(max_shard_size),
    )
    root, job, step = chosen(root, job, step)
    store = open_store(root)
    found = read_state(store, only_job(store, root, job))
    check_outside(directory, root)
    with saying_why_none(found, step), holding_choice(store, found, lambda log: plan(log, step=step)[0]) as state:
        seq = plan(state, step=step)[0]
        with metered(store, "exporting", total_bytes=state.readies[seq].bytes) as watched:
            done = export_checkpoint(watched, state, to=directory, wanted=wanted, step=step, force=force)
    if step is None:
        say_passed_over(state, past=done.step)
    if as_json:
        print_json(done)
        return
    what = f"{done.tensors} tensor{'s' * (done.tensors != 1)}, {size_text(done.bytes)}"
    put(f"exported step {done.step} of job {done.job} (READY {done.seq}) into {done.directory}: {what}")
    for name in done.files:
        put(f"  {name}")
    for name in done.left_out:
        say(f"{name} is left out: it is of a kind that only Python's pickle could hold")
    if done.documents:
        say("what is not a tensor (" + _beside(to) + ") is left out; `ckpt restore` has all of it")


def _beside(to: Format) -> str:
    return "settings of optimizers, schedulers, ..." if to == "safetensors" else "schedulers, data position, ..."
