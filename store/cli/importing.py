"""``ckpt import``: from files that others wrote to a job with one READY checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toprope.store.cli.shared import AsJson, Root, print_json, put, say, working
from toprope.store.objects.opening import open_store
from toprope.store.sizes import size_text
from toprope.store.transfer.importing import import_source
from toprope.store.transfer.incoming import open_source

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command("import")
def import_checkpoint(
    root: Root,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="A DCP directory, a .safetensors file, a directory of such files, or a torch.save file.",
            show_default=False,
        ),
    ],
    job: Annotated[str, typer.Option("--job", help="The name of the job to make.", show_default=False)],
    step: Annotated[int, typer.Option("--step", min=1, help="The step that the checkpoint is to be of.")] = 1,
    *,
    as_json: AsJson = False,
) -> None:
    """Make a new job of a checkpoint that others wrote: one rank, one shard, names as they are, verified.

    What is not a tensor is taken if it is plain (numbers, text, lists, ...); what is left out is named. Nothing is
    unpickled freely. DCP directories and torch.save files need torch. The image is put together in a temporary file in
    TMPDIR, which needs as much room.

    A trainer starts from its weights as `ckpt coordinator --base JOB@STEP --base-take weights` says. `ckpt export`
    gives it back, bit for bit.

    Exit status: 0 done; 2 the source is damaged or holds what is not taken; 64 there is such a job, or wrong use.
    """
    opened = open_source(source)
    store = open_store(root, write=True)
    with working(f"importing {source}"):
        done = import_source(store, opened, job=job, step=step)
    for name in done.left_out:
        say(f"{name} is left out: it is neither a tensor nor plain, or can't be read without unpickling it freely")
    if as_json:
        print_json(done)
        return
    what = f"{_count(done.tensors, 'tensor')}, {_count(done.values, 'value')}, {size_text(done.bytes)}"
    put(f"imported {source} ({done.kind}) as step {done.step} of job {done.job}: {what}")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
