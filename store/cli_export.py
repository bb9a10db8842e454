"""``ckpt export``: from arguments to safetensors files that need no Toprope."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toprope.store.cli_shared import AsJson, JobOption, Root, only_job, print_json, put, say
from toprope.store.export import Wanted
from toprope.store.export import export as export_checkpoint
from toprope.store.objects.opening import open_store
from toprope.store.show import read_job
from toprope.store.sizes import parsed_size, size_text

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def export(  # noqa: PLR0913 - one for each option
    root: Root,
    to: Annotated[Path, typer.Option("--to", help="The directory to make.", show_default=False)],
    *,
    job: JobOption = None,
    step: Annotated[int | None, typer.Option("--step", min=1, help="This step; else the newest READY one.")] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Only tensors of such names, as 'model.*'; may be repeated.")
    ] = None,
    prefix_strip: Annotated[
        str, typer.Option("--prefix-strip", help="What to take off the beginning of names.", show_default=False)
    ] = "",
    max_shard_size: Annotated[str, typer.Option("--max-shard-size", help="Split into files of this size.")] = "5GB",
    per_rank: Annotated[
        bool, typer.Option("--per-rank", help="Keep what is each rank's own, as rank-00003.NAME.")
    ] = False,
    as_bytes: Annotated[
        bool, typer.Option("--as-bytes", help="Keep dtypes that safetensors lacks as bytes (U8).")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace what an earlier export wrote there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint's whole tensors as safetensors files, in the layout of Hugging Face, every byte verified.

    Pieces that ranks stored are put together, what all have alike is written once. What ranks have of their own (random
    numbers, say) is refused by name: leave it out with --only, or keep it with --per-rank.

    Exit status: 0 done; 2 something is damaged, and nothing was written; 3 there is no such checkpoint; 64 something
    can't be exported as asked.
    """
    wanted = Wanted(
        only=tuple(only or ()),
        prefix_strip=prefix_strip,
        per_rank=per_rank,
        as_bytes=as_bytes,
        max_shard_bytes=parsed_size(max_shard_size),
    )
    store = open_store(root)
    state = read_job(store, only_job(store, root, job)).state
    done = export_checkpoint(store, state, to=to, wanted=wanted, step=step, force=force)
    if as_json:
        print_json(done)
        return
    what = f"{done.tensors} tensor{'s' * (done.tensors != 1)}, {size_text(done.bytes)}"
    put(f"exported step {done.step} of job {done.job} (READY {done.seq}) into {done.directory}: {what}")
    for name in done.files:
        put(f"  {name}")
    if done.documents:
        say("what is not a tensor (settings of optimizers, schedulers, ...) is left out; `ckpt restore` has all of it")
