"""One of two ranks whose sharded states are copied lazily, in the midst of FSDP's forward and backward passes.

Arguments: ``OUT``. What it found goes to ``OUT/rank-R.json``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from tests.support.lazy_trial import HeldCopier
from tests.support.tiny_trainer import METADATA, open_image, raw
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from toprope.trainer_hooks.capture.fsdp import shards_of
from toprope.trainer_hooks.capture.state import Parts, capture
from toprope.trainer_hooks.image.shard import MappedFile, plan_image, write_image
from toprope.trainer_hooks.save.lazy import PROOFS, Lazy

WORLD = 2
WIDTH = 256
MOMENTS = ("forward", "backward", "fence")
"""When the copy is made: while FSDP has gathered a layer, or when the optimizer waits for it."""


def _wrapped(kind: str) -> nn.Module:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    if kind == "fsdp2":
        mesh = init_device_mesh("cpu", (WORLD,))
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        model = nn.Sequential(*layers)
        fully_shard(model, mesh=mesh)
        return model

    def wrap(module: nn.Module) -> nn.Module:
        cpu, original = torch.device("cpu"), kind == "fsdp1"
        return FullyShardedDataParallel(module, device_id=cpu, use_orig_params=original)

    return wrap(nn.Sequential(*(wrap(layer) for layer in layers)))


KINDS = ("fsdp1", "fsdp1-flat", "fsdp2")


class Trial:
    """Trains one kind, and takes a snapshot after each step."""

    def __init__(self, kind: str, rank: int, directory: Path) -> None:
        self.rank, self.path = rank, directory / f"{kind}-{rank}"
        self.model = _wrapped(kind)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.parts = Parts(model=self.model, optimizer=self.optimizer)
        self.held = HeldCopier()
        self.lazy = Lazy(self.parts.optimizers(), self.held)
        self.gathered = 0
        """How many parameters were gathered when the copy was made."""

    def release(self) -> None:
        if self.held.held:
            self.gathered = shards_of(self.model).gathered
            self.held.release()

    def train(self, moment: str) -> None:
        """Do a step; what is held is copied in the midst of it."""
        self.optimizer.zero_grad()
        out = torch.randn(4, WIDTH)
        for _ in range(2):  # the second pass meets what the first left behind
            middle: list[Any] = []
            hook = _inner(self.model).register_forward_hook(lambda _m, _i, given: middle.append(given))  # noqa: B023
            pre = _inner(self.model).register_forward_pre_hook(self._in_forward) if moment == "forward" else None
            loss = (self.model(out) ** 2).mean()
            if moment == "backward":
                middle[0].register_hook(self._in_backward)
            loss.backward()
            hook.remove()
            if pre is not None:
                pre.remove()
        self.optimizer.step()

    def _in_forward(self, _module: nn.Module, _given: Any) -> None:  # noqa: ANN401 - torch's signature
        self.release()

    def _in_backward(self, grad: torch.Tensor) -> torch.Tensor:
        self.release()
        return grad

    def snapshot(self, moment: str, then: Callable[[], None]) -> tuple[int, dict[str, bytes]]:
        """Take one; return how many tensors are copied later, and what all must be."""
        snapshot = capture(self.parts, rank=self.rank, world=WORLD)
        golden = {name: raw(tensor) for name, tensor in snapshot.tensors.items()}
        plan = plan_image(snapshot.tensors, METADATA, snapshot.pieces)
        size = plan.image_bytes(len(snapshot.document))
        self.path.write_bytes(bytes(size))
        target = self.target = MappedFile(self.path)  # its mapping lasts as long as what is held
        later = self.lazy.later(snapshot)
        write_image(target, plan, snapshot.tensors, snapshot.document, METADATA, later=later)
        self.lazy.prove(target, plan, snapshot)
        if later:
            self.lazy.start(target, plan, snapshot, later, then)
            for trust in self.lazy._trust.values():
                if trust.part is not None and moment == "fence":
                    trust.part.done = self.held.event()
        return len(later), golden

    def run(self) -> dict[str, Any]:
        """Return what became of the snapshot of each moment."""
        found: dict[str, Any] = {}
        for moment in ("", *[""] * PROOFS, *MOMENTS):
            sealed: list[str] = []
            later, golden = self.snapshot(moment, lambda moment=moment, sealed=sealed: sealed.append(moment))  # type: ignore[misc]
            held_before = bool(self.held.held)
            self.train(moment)
            if moment:
                image = open_image(self.path)
                found[moment] = {
                    "later": later,
                    "held": held_before,
                    "sealed": sealed,
                    "trouble": self.lazy.trouble(),
                    "gathered": self.gathered,
                    "same": {name: raw(image.tensor(name)) for name in golden} == golden,
                }
        return found


def _inner(model: nn.Module) -> nn.Module:
    """Return the first layer, inside of what wraps it."""
    first = next(module for module in model.modules() if isinstance(module, nn.Linear))
    assert isinstance(first, nn.Module)
    return first


def main(arguments: Sequence[str]) -> None:
    """Go through all kinds."""
    rank, out = int(os.environ["RANK"]), Path(arguments[0])
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(rank)
    trials = {kind: Trial(kind, rank, out) for kind in KINDS}
    found = {kind: trial.run() for kind, trial in trials.items()}
    (out / f"rank-{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()
