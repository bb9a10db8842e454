"""A trainer of one rank that tells at each step what it has saved and skipped, and in the end what its state is."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import msgspec
import torch
from tests.support.tiny_trainer import tiny
from torch import nn

from toprope.chaos.journal import Final
from toprope.trainer_hooks.checkpointer import Checkpointer


def main(arguments: list[str]) -> None:
    """Train; ``--out`` gets a line for each step and the final digest."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-delay", type=float, default=0.0)
    parser.add_argument("--ballast-mib", type=int, default=0)
    parser.add_argument("--snapshots", type=int, default=0, help="train on until there are so many")
    parser.add_argument("--no-hooks", action="store_true")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    double_the_table_of_interned_strings()
    trainer = tiny()
    ballast = Ballast(options.ballast_mib << 20)
    ckpt = None
    if not options.no_hooks:
        models = {"net": trainer.model, "ballast": ballast}
        ckpt = Checkpointer(
            job=options.job,
            model=models,
            optimizer=trainer.optimizer,
            lr_scheduler=trainer.schedule,
            dataloader=trainer.data,
        )
    step = 0 if ckpt is None else ckpt.restore()
    with (options.out / "counts.jsonl").open("w", buffering=1) as counts:
        while step < options.steps or (ckpt is not None and ckpt.stats.snapshots < options.snapshots):
            step += 1
            trainer.step()
            trainer.data.seen.clear()
            ballast.bytes.add_(1)
            if ckpt is not None:
                ckpt.end_step(step)
                skipped = dict(ckpt.stats.skipped)
                counts.write(json.dumps({"step": step, "snapshots": ckpt.stats.snapshots, "skipped": skipped}) + "\n")
            time.sleep(options.step_delay)
    if ckpt is not None:
        ckpt.close()
    final = Final(rank=0, world=1, step=step, digests={"state": trainer.digest()})
    (options.out / "final-rank-0.json").write_bytes(msgspec.json.encode(final))


def double_the_table_of_interned_strings() -> None:
    """Have CPython do now what it does once in the life of a process, and what takes 1.9 MiB, at a step of its choice.

    With torch and its compiler loaded 82,000 strings are interned, in a table with 87,381 places. Each place is used
    once, also by a string that is gone again, such as a word of a ``Path``; then the table is replaced by one for three
    times as many strings as there are. So it doubles once, and from then on has the same size whenever it is replaced.
    """
    for number in range(200_000):
        sys.intern(f"a string that is gone again {number}")


class Ballast(nn.Module):
    """A model with nothing but bytes, which are others after each step."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.bytes: torch.Tensor
        self.register_buffer("bytes", torch.zeros(size, dtype=torch.uint8))
