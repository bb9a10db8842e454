"""A trainer of your own: a small network on made-up data, data-parallel by hand; four lines of it are Toprope's."""

from __future__ import annotations

import argparse
import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from toprope.trainer_hooks import Checkpointer  # toprope


def batch(step: int, *, rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a rank learns from in a step: a function of the step, so there is no position to keep."""
    numbers = torch.Generator().manual_seed(1_000_003 * seed + 1009 * step + rank)
    inputs = torch.randn(16, 8, generator=numbers)
    return inputs, inputs.sum(dim=1, keepdim=True).sin()


def seed_all(seed: int) -> None:
    """Seed every stream that is kept: of one that is not seeded, no two runs end with the same state."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the global stream


def average_gradients(model: nn.Module, world: int) -> None:
    """Let all ranks go the same way."""
    for parameter in model.parameters():
        if parameter.grad is not None and world > 1:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world


def main() -> None:
    """Train from where the job stands to the last step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    seed_all(options.seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    checkpointer = Checkpointer(job=options.job, model=model, optimizer=optimizer)  # toprope
    for step in range(checkpointer.restore() + 1, options.steps + 1):  # toprope
        inputs, targets = batch(step, rank=rank, seed=options.seed)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model, world)
        optimizer.step()
        checkpointer.end_step(step, loss=loss.item())  # toprope
    checkpointer.close()  # toprope
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
