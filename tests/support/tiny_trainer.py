"""A small trainer whose every part has state, and byte-wise comparison of what it ends with."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from toprope.trainer_hooks.capture.state import Parts, capture
from toprope.trainer_hooks.image.shard import Image, MappedFile, Piece, plan_image, write_image
from toprope.trainer_hooks.restore.apply import Loaded, apply, check


class Shuffled:
    """A data order with a state: a permutation for each epoch, drawn from a generator of its own."""

    def __init__(self, length: int = 32, batch: int = 4) -> None:
        self.length, self.batch, self.epoch, self.at = length, batch, 0, 0
        self.seen: list[list[int]] = []

    def next(self) -> torch.Tensor:
        order = torch.randperm(self.length, generator=torch.Generator().manual_seed(self.epoch))
        ids = order[self.at : self.at + self.batch]
        self.at += self.batch
        if self.at >= self.length:
            self.at, self.epoch = 0, self.epoch + 1
        self.seen.append(ids.tolist())
        return ids

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


@dataclass
class Tiny:
    """Model, optimizer, schedule and data of one process."""

    model: nn.Module
    net: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    data: Shuffled

    def step(self) -> float:
        ids = self.data.next().float()
        noise = random.random() + float(np.random.rand())  # noqa: NPY002 - the global stream is what is tested
        self.optimizer.zero_grad()
        loss = (self.net(torch.stack([ids, ids * noise], dim=1)) ** 2).mean()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return float(loss.detach())

    def named(self) -> dict[str, Any]:
        """Return the arguments of a Checkpointer."""
        return {
            "model": self.net,
            "optimizer": self.optimizer,
            "lr_scheduler": self.schedule,
            "dataloader": self.data,
        }

    def parts(self, **more: Any) -> Parts:  # noqa: ANN401 - any further part
        return Parts(**self.named(), **more)

    def digest(self) -> str:
        """Return a digest of all weights, buffers, optimizer state, schedule, data position and random streams."""
        hashed = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            hashed.update(name.encode() + raw(tensor))
        for parameter in self.model.parameters():
            for key, value in sorted(self.optimizer.state.get(parameter, {}).items()):
                hashed.update(key.encode() + (raw(value) if isinstance(value, torch.Tensor) else repr(value).encode()))
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        plain = (groups, self.schedule.state_dict(), self.data.state_dict(), random.getstate())
        hashed.update(repr(plain).encode() + raw(torch.get_rng_state()))
        hashed.update(repr(np.random.get_state(legacy=False)).encode())  # noqa: NPY002 - see above
        hashed.update(np.random.get_state(legacy=False)["state"]["key"].tobytes())  # noqa: NPY002 - see above
        return hashed.hexdigest()


def tiny(seed: int = 1, *, ddp: bool = False) -> Tiny:
    """Return a trainer at step 0, with all random streams seeded."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - see above
    model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3), nn.Linear(3, 1))
    net = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True) if ddp else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    return Tiny(model, net, optimizer, schedule, Shuffled())


def raw(tensor: torch.Tensor) -> bytes:
    """Return the logical bytes of a tensor of any dtype and stride."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return bytes(plain.reshape(-1).view(torch.uint8).numpy()) if plain.numel() else b""


def assert_same_tensor(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare dtype, shape and bytes: NaN equals NaN here, and each dtype can be compared."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert raw(found) == raw(expected)


METADATA = {"job_uid": "0b" * 16, "attempt": "1", "attempt_uid": "1a" * 16, "step": "3", "rank": "0", "world": "1"}


def snapshot_file(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    document: bytes = b"{}",
    metadata: Mapping[str, str] = METADATA,
    pieces: Mapping[str, Piece] | None = None,
) -> Path:
    """Write an image of these tensors as a file of exactly its length."""
    plan = plan_image(tensors, metadata, pieces or {})
    length = plan.image_bytes(len(document))
    path.write_bytes(bytes(length))
    assert write_image(MappedFile(path), plan, tensors, document, metadata) == length
    return path


def open_image(path: Path) -> Image:
    return Image(path, path.stat().st_size)


def save(parts: Parts, path: Path) -> Path:
    """Capture a state of one rank into a file."""
    snapshot = capture(parts, rank=0, world=1)
    return snapshot_file(path, snapshot.tensors, snapshot.document)


def load(parts: Parts, path: Path) -> None:
    """Check and apply what ``save`` wrote."""
    apply(checked(parts, path))


def checked(parts: Parts, path: Path) -> Loaded:
    """Check what ``save`` wrote."""
    return check(parts, {0: open_image(path)}, rank=0, world=1)
