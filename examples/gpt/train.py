"""Train a byte-level GPT with DDP under torchrun, or in one process; the lines marked ``# toprope`` make it survive.

Run it under ``torchrun``, or alone. ``--no-hooks`` leaves Toprope out.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from data import ShuffledWindows, standard_library_text
from digests import state_digests
from journal import Journal
from model import GPT, SIZES
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies: torchrun's workers would live on without their agent."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), signal.SIGKILL)


def options_from(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--job", default="gpt", help="name of the job")
    parser.add_argument("--out", type=Path, required=True, help="directory for journals and final digests")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--size", choices=sorted(SIZES), default="small")
    parser.add_argument("--batch", type=int, default=4, help="windows a rank and step")
    parser.add_argument("--rate", type=float, default=1e-3, help="highest learning rate")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to sleep in each step")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds after which a lost rank is an error")
    parser.add_argument("--on-sigterm", action="store_true", help="end after SIGTERM at a step that all ranks save")
    parser.add_argument("--no-hooks", action="store_true", help="train without Toprope")
    return parser.parse_args(arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """All that a step needs. ``net`` is ``model``, wrapped in DDP when there is more than one rank."""

    model: GPT
    net: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    data: ShuffledWindows
    device: torch.device

    def step(self) -> float:
        """Do one optimizer update and return the loss."""
        tokens, targets = (part.to(self.device) for part in self.data.next_batch())
        loss = self.net(tokens, targets)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        return float(loss.detach())

    def position(self) -> dict[str, Any]:
        """Return where data and schedule are."""
        return {"data": self.data.state_dict(), "schedule": self.schedule.state_dict()}


def build(options: argparse.Namespace, *, rank: int, world: int) -> Trainer:
    """Return a trainer at step 0."""
    device = torch.device("cpu" if options.device == "cpu" else f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
    size = SIZES[options.size]
    seed_all(options.seed)
    model = GPT(size).to(device)
    # find_unused_parameters: else DDP regroups its buckets after the first backward of each process
    net = DistributedDataParallel(model, find_unused_parameters=True) if world > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, weight_decay=0.1)
    seed_all(options.seed + 1000 * (rank + 1))  # from here on each rank has streams of its own
    return Trainer(
        model=model,
        net=net,
        optimizer=optimizer,
        schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, WarmCosine(options.steps)),
        data=ShuffledWindows(
            standard_library_text(), block=size.block, batch=options.batch, seed=options.seed, rank=rank, world=world
        ),
        device=device,
    )


def seed_all(seed: int) -> None:
    """Seed the random streams of torch, Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the global stream, which libraries draw from


class WarmCosine:
    """Factor of the learning rate: up over the first tenth of the steps, then down along a cosine to a tenth.

    A class and no closure, so that the scheduler can save it.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, step: int) -> float:
        """Return the factor for a step."""
        warm = max(1, self.steps // 10)
        if step < warm:
            return (step + 1) / warm
        done = min(1.0, (step - warm) / max(1, self.steps - warm))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def train(options: argparse.Namespace, journal: Journal, *, rank: int, world: int) -> None:
    """Train from where the job stands to the last step; leave the final digests in ``<out>/final-rank-<r>.json``."""
    trainer = build(options, rank=rank, world=world)
    checkpointer = None
    first, restored = 1, []
    if not options.no_hooks:
        from toprope.trainer_hooks import Checkpointer  # noqa: PLC0415 - not needed with --no-hooks

        checkpointer = Checkpointer(  # toprope
            job=options.job,
            model=trainer.net,
            optimizer=trainer.optimizer,
            lr_scheduler=trainer.schedule,
            dataloader=trainer.data,
            on_sigterm=options.on_sigterm,
        )
        first = checkpointer.restore() + 1  # toprope
        restored = [{"rank": one.rank, "tier": one.tier, "node": one.node} for one in checkpointer.sources]
    journal.write("begin", step=first - 1, restored=restored)
    for step in range(first, options.steps + 1):
        loss = trainer.step()
        if checkpointer is not None:
            checkpointer.end_step(step, loss=loss)  # toprope
        journal.write("step", step=step, loss=loss)
        time.sleep(options.step_delay)
    if checkpointer is not None:
        checkpointer.close()  # toprope
    digests = state_digests(trainer.model, trainer.optimizer, position=trainer.position())
    final = {"rank": rank, "world": world, "step": options.steps, "digests": digests}
    (options.out / f"final-rank-{rank}.json").write_text(json.dumps(final))
    journal.write("end", step=options.steps)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, alone or as one rank of torchrun's world."""
    die_with_parent()
    options = options_from(arguments)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    journal = Journal(options.out, rank=rank)
    journal.write("start", world=world)
    if world > 1:
        backend = "gloo" if options.device == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=timedelta(seconds=options.timeout))
    with one_line(options):
        try:
            train(options, journal, rank=rank, world=world)
        except Exception as error:
            journal.write("failed", error=f"{type(error).__name__}: {error}"[:500])
            raise
    if world > 1:
        dist.destroy_process_group()


def one_line(options: argparse.Namespace) -> contextlib.AbstractContextManager[None]:
    """Let wrong use of the hook end with one line and exit status 64 rather than with a traceback."""
    if options.no_hooks:
        return contextlib.nullcontext()
    from toprope.trainer_hooks import one_line_errors  # noqa: PLC0415 - not needed with --no-hooks

    errors: contextlib.AbstractContextManager[None] = one_line_errors()
    return errors


if __name__ == "__main__":
    main()
