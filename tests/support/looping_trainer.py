"""A trainer that takes snapshots of a tiny model until it is killed, with kill points around what it does to a slot."""

from __future__ import annotations

import time

import torch

from toprope.chaos.trainer_points import pass_points
from toprope.trainer_hooks.checkpointer import Checkpointer

STEP_S = 0.02


def main(arguments: list[str]) -> None:
    """Train the job named by the one argument."""
    (job,) = arguments
    pass_points()
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ckpt = Checkpointer(job=job, model=model, optimizer=optimizer)
    step = ckpt.restore()
    while True:
        step += 1
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        ckpt.end_step(step)
        time.sleep(STEP_S)
