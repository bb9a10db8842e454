"""A rank of a sharded job that goes on with as many ranks as there are: torchrun starts it.

``elastic_rank.py OUT JOB STEPS``. Each rank appends to ``OUT/journal`` a JSON line when it begins, with the step that
it restored, and one for each step, with the samples that it trained on. Both have the digest of the whole state:
weights and optimizer of all ranks, put together. ``replay`` is what they have to come to, in one process.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from toprope.trainer_hooks import Checkpointer
from toprope.trainer_hooks.elastic import ElasticSampler

WIDTH, BATCH, STEP_S, SAMPLES = 16, 4, 0.1, 1 << 14
OUT = 3
"""Rows that two ranks can't share evenly."""


class Numbers(torch.utils.data.Dataset[tuple[int, torch.Tensor]]):
    """A vector for each number, and which it is."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, at: int) -> tuple[int, torch.Tensor]:
        return at, torch.sin(torch.arange(1, WIDTH + 1) * at)


def build() -> nn.Sequential:
    """Return the same model each time."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, OUT))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(batch)
    return (found - batch[:, :OUT]).square().mean()


def sampler_of(*, rank: int, world: int) -> ElasticSampler:
    return ElasticSampler(Numbers(), seed=3, batch_size=BATCH, rank=rank, world=world)


def loader_of(sampler: ElasticSampler) -> DataLoader[tuple[int, torch.Tensor]]:
    return DataLoader(Numbers(), batch_size=BATCH, sampler=sampler, generator=torch.Generator())


def digest_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return the digest of the whole tensors; each rank of the world calls it."""
    total = hashlib.sha256()
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {})
        for tensor in (parameter, *(state[key] for key in sorted(state))):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            total.update(name.encode() + whole.detach().numpy().tobytes())
    return total.hexdigest()


def replay(worlds: Sequence[int]) -> tuple[list[list[list[int]]], str]:
    """Train in this process as worlds of so many ranks would, step by step; interruptions leave no trace.

    Return the samples of each rank at each step, and the digest of the state after the last one.
    """
    model = build()
    optimizer = optimizer_of(model)
    samplers = [sampler_of(rank=0, world=worlds[0])]
    batches = []
    samples = []
    for before, world in pairwise((0, *worlds)):
        if before != world:
            state = samplers[0].state_dict()
            samplers = [sampler_of(rank=rank, world=world) for rank in range(world)]
            for sampler in samplers:
                sampler.load_state_dict(state)
            batches = [iter(loader_of(sampler)) for sampler in samplers]
        dealt = [next(batch) for batch in batches]
        samples.append([numbers.tolist() for numbers, _ in dealt])
        gradients = [torch.autograd.grad(loss_of(model, batch), list(model.parameters())) for _, batch in dealt]
        for parameter, *parts in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = torch.stack(parts).sum(0) / world
        optimizer.step()
        for sampler in samplers:
            sampler.advance(BATCH)
    return samples, digest_of(model, optimizer)


def main() -> None:
    out, job, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def note(event: str, step: int, **more: object) -> None:
        line = {"event": event, "step": step, "rank": rank, "world": world, "node": os.environ["NODE"]}
        line |= {"pid": os.getpid(), "digest": digest_of(model, optimizer), **more}
        with (out / "journal").open("a") as stream:
            stream.write(json.dumps(line) + "\n")

    distributed.init_process_group("gloo", timeout=timedelta(seconds=30))
    model = build()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = optimizer_of(model)
    sampler = sampler_of(rank=rank, world=world)
    loader = loader_of(sampler)
    checkpointer = Checkpointer(job=job, model=model, optimizer=optimizer, dataloader=loader)
    step = checkpointer.restore()
    note("begin", step, tiers=sorted({source.tier for source in checkpointer.sources}))
    for numbers, batch in loader:
        if step >= steps:
            break
        optimizer.zero_grad()
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        sampler.advance(len(numbers))
        step += 1
        checkpointer.end_step(step)
        note("step", step, samples=numbers.tolist())
        time.sleep(STEP_S)
    checkpointer.close()
    distributed.barrier()
    os._exit(0)  # what fully_shard has made outlives the process group


if __name__ == "__main__":
    main()
