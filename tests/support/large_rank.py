"""A rank with a large state of its own, that notes what a restore of it took. ``--out OUT --job JOB --mib N``.

It restores, writes ``OUT/rank-R.json`` and, if that was a fresh start, saves each step until it is killed.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from itertools import count
from pathlib import Path

import torch
from torch import distributed, nn

from toprope.trainer_hooks.checkpointer import Checkpointer

STEP_S = 0.5


class Ballast(nn.Module):
    """A model with nothing but bytes, which are others on each rank."""

    def __init__(self, size: int, *, seed: int) -> None:
        super().__init__()
        self.bytes: torch.Tensor
        self.register_buffer("bytes", noise(size, seed=seed))


def noise(size: int, *, seed: int) -> torch.Tensor:
    """Return bytes that depend on the seed alone."""
    chance = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=chance)


def memory(field: str) -> int:
    """Return bytes as /proc has them of this process: VmRSS now, or VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def bytes_read() -> int:
    """Return how many bytes this process has read by system calls."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar:"))


def main(arguments: list[str]) -> None:
    """Restore; train if there is nothing to restore."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mib", type=int, required=True)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    rank, size = int(os.environ["RANK"]), options.mib << 20
    distributed.init_process_group("gloo")
    before, read_before = memory("VmRSS"), bytes_read()
    model = Ballast(size, seed=1000 + rank)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    ckpt = Checkpointer(job=options.job, model=model)
    step = ckpt.restore()
    found = {"step": step, "peak": memory("VmHWM") - before, "read": bytes_read() - read_before}
    found["right"] = torch.equal(model.bytes, noise(size, seed=rank)) if step else True
    (options.out / f"rank-{rank}.json").write_text(json.dumps(found))
    if not step:
        model.bytes.copy_(noise(size, seed=rank))
        for number in count(1):
            ckpt.end_step(number)
            time.sleep(STEP_S)
    ckpt.close()
    distributed.destroy_process_group()
