"""One of four ranks that capture sharded states, once without a process group, and try to restore them elsewhere.

Arguments: ``OUT``. For each kind it leaves the image of its rank and, from rank 0, the full tensors as torch joins
them; what else it found goes to ``OUT/rank-R.json``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from tests.support.parallel_kinds import FULLY_SHARDED, ONE_MODEL, OTHERS
from tests.support.parallel_trainers import WIDTH, Trainer, build, fsdp1_nested
from tests.support.tiny_trainer import METADATA, open_image, snapshot_file
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from toprope.trainer_hooks.capture.spec import spec_of
from toprope.trainer_hooks.capture.state import Parts, Snapshot, capture
from toprope.trainer_hooks.errors import UsageError
from toprope.trainer_hooks.image.shard import Image
from toprope.trainer_hooks.restore.apply import apply, check

_held: list[Trainer] = []
"""Trainers that see the process group go. They last until the process ends without a clean-up: letting go of such a DDP
waits for gloo's threads with the interpreter locked, and one of them waits for the interpreter."""


def main(arguments: Sequence[str]) -> None:
    """Go through all scenarios; all ranks take the same way."""
    rank, world, out = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(arguments[0])
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    scenarios = Scenarios(rank, world, out)
    found: dict[str, Any] = {kind: scenarios.saved(kind) for kind in (*FULLY_SHARDED, *OTHERS)}
    found["elsewhere"] = {
        "another mesh": scenarios.problem("fsdp2", build("hsdp")),
        "no mesh": scenarios.problem("fsdp2", build("ddp")),
        "gathered": scenarios.problem("fsdp2", _after_forward(build("fsdp2"))),
        "fsdp1": scenarios.problem("fsdp2", build("fsdp1")),
        "fsdp1 wrapped otherwise": scenarios.problem("fsdp1", fsdp1_nested()),
        "no zero": scenarios.problem("ddp+zero1", build("ddp")),
        "zero": scenarios.problem("ddp", build("ddp+zero1")),
    }
    found["refused"] = scenarios.refused()
    found["extra"] = scenarios.extra()
    trainers = {kind: build(kind) for kind in (*FULLY_SHARDED, *OTHERS)}
    found["specs"] = {kind: spec_of(Parts(**trainers[kind].named())) for kind in ONE_MODEL}
    for trainer in trainers.values():
        trainer.step()
    _held.extend(trainers.values())
    distributed.destroy_process_group()
    found["alone"] = {kind: len(scenarios.capture(trainer.named()).tensors) for kind, trainer in trainers.items()}
    (out / f"rank-{rank}.json").write_text(json.dumps(found))


def _after_forward(trainer: Trainer) -> Trainer:
    """Return the trainer after an evaluation, which leaves the root's parameters gathered."""
    with torch.no_grad():
        trainer.models["m"](torch.ones(1, WIDTH))
    return trainer


class Scenarios:
    """What each rank does."""

    def __init__(self, rank: int, world: int, out: Path) -> None:
        self.rank, self.world, self.out = rank, world, out

    def capture(self, named: dict[str, Any]) -> Snapshot:
        return capture(Parts(**named), rank=self.rank, world=self.world)

    def saved(self, kind: str) -> dict[str, Any]:
        """Save a trained state after an evaluation, and restore it into another trainer of its kind."""
        trainer = build(kind)
        for _ in range(2):
            trainer.step()
        before = trainer.digest()
        full = _full(trainer)
        if "fsdp" in kind and "tp" not in kind:
            _after_forward(trainer)
        self._write(kind, self.capture(trainer.named()))
        if self.rank == 0:
            snapshot_file(self.out / f"{kind}-full", full)
        distributed.barrier()
        torch.manual_seed(77)
        live = build(kind)
        self._load(kind, Parts(**live.named()))
        restored, stream = live.digest(), torch.get_rng_state()
        live.step()
        for module in trainer.models["m"].modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        torch.set_rng_state(stream)
        trainer.step()
        return {"same": restored == before, "goes on": live.digest() == trainer.digest()}

    def problem(self, kind: str, trainer: Trainer) -> list[Any]:
        """Return why a state of that kind can't be restored into this trainer, and whether that was left alone."""
        before = trainer.digest()
        try:
            self._load(kind, Parts(**trainer.named()))
        except UsageError as error:
            return [str(error), trainer.digest() == before]
        return ["", False]

    def refused(self) -> dict[str, str]:
        """Return what is said of tensors that can't be kept."""
        mesh, half = init_device_mesh("cpu", (self.world,)), DeviceMesh("cpu", [0, 1])
        shape = torch.Size([8])
        tensors = {
            "partial": DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False),
            "wrong": DTensor.from_local(torch.ones(3), mesh, [Shard(0)], run_check=False, shape=shape, stride=(1,)),
            "half": distribute_tensor(torch.ones(4), half, [Replicate()]),
        }
        return {name: self._refusal(tensor) for name, tensor in tensors.items()}

    def _refusal(self, tensor: torch.Tensor) -> str:
        try:
            self.capture({"model": nn.Linear(1, 1), "extra": {"t": tensor}})
        except UsageError as error:
            return str(error)
        return ""

    def extra(self) -> list[bool]:
        """Keep an average of sharded weights in ``extra``, and bring it back into tensors and into nothing."""
        mesh = init_device_mesh("cpu", (self.world,))

        def build_one(value: float, live: dict[str, torch.Tensor]) -> dict[str, Any]:
            model = nn.Linear(3, 5)
            fully_shard(model, mesh=mesh)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(value)
            return {"model": model, "extra": {"average": live}}

        saved = build_one(1.0, {})
        for name, parameter in saved["model"].named_parameters():
            saved["extra"]["average"][name] = (parameter * 3).detach()
        self._write("extra", self.capture(saved))
        distributed.barrier()
        empty, held = build_one(2.0, {}), distribute_tensor(torch.zeros(5), mesh, [Shard(0)])
        filled = build_one(2.0, {"bias": held})
        for live in (empty, filled):
            self._load("extra", Parts(**live))
        average = empty["extra"]["average"]
        return [
            bool((average["weight"].full_tensor() == 3).all()),
            isinstance(average["weight"], DTensor) and average["weight"].placements == (Shard(0),),
            filled["extra"]["average"]["bias"] is held,
            bool((held.full_tensor() == 3).all()),
        ]

    def _write(self, name: str, snapshot: Snapshot) -> None:
        path = self.out / f"{name}-{self.rank}"
        metadata = METADATA | {"rank": str(self.rank), "world": str(self.world)}
        snapshot_file(path, snapshot.tensors, snapshot.document, metadata, snapshot.pieces)

    def _load(self, name: str, parts: Parts) -> None:
        apply(check(parts, self._images(name), rank=self.rank, world=self.world))

    def _images(self, name: str) -> dict[int, Image]:
        return {rank: open_image(self.out / f"{name}-{rank}") for rank in range(self.world)}


def _full(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return parameters and optimizer state as torch joins them, under the names that they have in an image."""
    model, optimizer = trainer.models["m"], trainer.optimizers["m"]
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors = {f"model.{name}": parameter}
        tensors |= {f"optimizer.state.{name}.{key}": value for key, value in optimizer.state[parameter].items()}
        found |= {key: value.full_tensor().detach() for key, value in tensors.items() if isinstance(value, DTensor)}
    return found
