"""One rank of a job that saves and loads with ``torch.distributed.checkpoint``, with our writer and the stock one.

Arguments: ``OUT save LAYOUT`` or ``OUT load LAYOUT``. What it found is in ``OUT/<doing>-<layout>-<world>-<rank>.json``.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from toprope.trainer_hooks.dcp import Attempt, StorageReader, StorageWriter

JOB = "dcp"
State = dict[str, Any]


class Odd:
    """A value that can't be kept."""


def main(arguments: Sequence[str]) -> None:
    """Save or load; all ranks take the same way."""
    out, doing, layout = Path(arguments[0]), arguments[1], arguments[2]
    warnings.simplefilter("ignore")
    distributed.init_process_group("gloo", timeout=timedelta(seconds=100))
    rank, world = distributed.get_rank(), distributed.get_world_size()
    found = saved(out, layout) if doing == "save" else loaded(out, layout)
    (out / f"{doing}-{layout}-{world}-{rank}.json").write_text(json.dumps(found))
    distributed.barrier()
    os._exit(0)  # DDP must not outlive its process group, nor be let go of before it


def build(layout: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model in a layout, with odd sizes so that shards are uneven or empty, and its optimizer."""
    torch.manual_seed(seed)
    world = distributed.get_world_size()
    model: nn.Module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.BatchNorm1d(7), nn.Linear(7, 3, bias=False))
    if layout == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    elif layout == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copies", "shards")))
    elif layout == "ddp":
        model = DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.99))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Do one update, the same on all ranks, so that what is replicated stays so."""
    optimizer.zero_grad()
    model(torch.arange(20.0).reshape(4, 5).roll(number) / 20).square().sum().backward()
    optimizer.step()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> State:
    """Return what is saved."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "progress": {"step": number, "note": ["a", None, 0.5]}}


def saved(out: Path, layout: str) -> State:
    """Save step after step in each way that there is, and the last of them beside it with the stock writer."""
    model, optimizer = build(layout, 1)
    attempt = Attempt(job=JOB)
    attempt.begin()
    ready, protected = (StorageWriter(attempt, wait_for=level, timeout_s=60) for level in ("ready", "protected"))
    found: State = {"new": attempt.is_new}
    for number in range(1, 5):
        step(model, optimizer, number)
        state = state_of(model, optimizer, number)
        if number == 1:
            save(state, checkpoint_id="step-1", storage_writer=ready)
        elif number == 2:
            if distributed.get_rank() == 1:
                state["odd"] = Odd()
            try:
                save(state, checkpoint_id="step-2", storage_writer=protected)
            except CheckpointException as error:
                found["refused"] = str(error)
        elif number == 3:
            saving = async_save(state, checkpoint_id="step-3", storage_writer=protected)
            assert isinstance(saving, Future)
            saving.result(100)
        else:
            process = AsyncCheckpointerType.PROCESS
            saving = async_save(state, checkpoint_id="step-4", storage_writer=ready, async_checkpointer_type=process)
            assert isinstance(saving, Future)
            saving.result(200)
            save(state, storage_writer=FileSystemWriter(out / "stock"))
    return found


def loaded(out: Path, layout: str) -> State:
    """Load with our reader and with the stock one, into models that know nothing; both must come to the same."""
    attempt = Attempt(job=JOB)
    states = []
    for reader in (StorageReader(attempt), FileSystemReader(out / "stock")):
        model, optimizer = build(layout, 2)
        step(model, optimizer, 50)
        state = state_of(model, optimizer, 0)
        load(state, storage_reader=reader)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        step(model, optimizer, 5)
        states.append((state["progress"], state_of(model, optimizer, 5)))
    attempt.begin()
    (ours, ours_then), (theirs, theirs_then) = states
    wrong = [name for name, value in flat(ours_then).items() if not same(value, flat(theirs_then)[name])]
    return {"step": attempt.step, "progress": [ours, theirs], "wrong": wrong, "compared": len(flat(ours_then))}


def flat(state: Any, name: str = "") -> State:  # noqa: ANN401 - any state
    """Return the leaves of a state by path."""
    if isinstance(state, dict):
        return {key: leaf for part, item in state.items() for key, leaf in flat(item, f"{name}.{part}").items()}
    if isinstance(state, (list, tuple)):
        return {key: leaf for part, item in enumerate(state) for key, leaf in flat(item, f"{name}.{part}").items()}
    return {name: state}


def same(one: Any, other: Any) -> bool:  # noqa: ANN401 - any leaf
    """Say whether two leaves are the same, byte for byte."""
    if isinstance(one, DTensor):
        return isinstance(other, DTensor) and torch.equal(one.to_local(), other.to_local())
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)
