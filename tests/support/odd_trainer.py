"""A world in which rank 0 has only odd tensors (scalars, empty ones, counters) and each other rank none at all."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from tests.support.tiny_trainer import raw
from torch import distributed, nn

from toprope.trainer_hooks.checkpointer import Checkpointer


class Odd(nn.Module):
    """A 0-d float, the 0-d counter of BatchNorm, and tensors without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.scalar = nn.Parameter(torch.rand(()))
        self.empty = nn.ParameterList([torch.rand(shape) for shape in ((0,), (0, 5), (1, 0, 3))])

    def step(self) -> None:
        """Change what can be changed."""
        self.norm(torch.rand(4, 2))
        with torch.no_grad():
            self.scalar.add_(torch.rand(()))


def digest_of(model: nn.Module, extra: dict[str, Any]) -> str:
    """Return a digest of names, dtypes, shapes and bytes."""
    hashed = hashlib.sha256(repr(extra).encode())
    for name, tensor in model.state_dict().items():
        hashed.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode() + raw(tensor))
    return hashed.hexdigest()


def main(arguments: list[str]) -> None:
    """Train; ``--out`` gets a line for each start and each step of a rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    rank = int(os.environ["RANK"])
    distributed.init_process_group("gloo")
    model = Odd() if rank == 0 else nn.Identity()
    extra: dict[str, Any] = {"empty": {}, "none": []}
    ckpt = Checkpointer(job=options.job, model=model, extra=extra)
    first = ckpt.restore() + 1
    with (options.out / f"rank-{rank}.jsonl").open("a", buffering=1) as lines:
        start = {"restored": first - 1, "tiers": sorted({shard.tier for shard in ckpt.sources})}
        lines.write(json.dumps({**start, "digest": digest_of(model, extra)}) + "\n")
        for step in range(first, options.steps + 1):
            if isinstance(model, Odd):
                model.step()
            lines.write(json.dumps({"step": step, "digest": digest_of(model, extra)}) + "\n")
            ckpt.end_step(step)
            time.sleep(0.05)
    ckpt.close()
    distributed.destroy_process_group()
