"""A trainer whose snapshots are compared with what its state was when each step ended, however they were copied."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tests.support.fake_sidecar import FakeSidecar
from tests.support.tiny_trainer import open_image, raw
from torch import nn

from toprope.trainer_hooks import Checkpointer
from toprope.trainer_hooks.capture.state import Parts, capture
from toprope.trainer_hooks.image.copying import Copier
from toprope.trainer_hooks.save.lazy import PROOFS, _Part

Golden = tuple[bytes, dict[str, bytes]]


class Net(nn.Module):
    """Two layers that are worth a copy of their own, and buffers that each forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(128, 160), nn.BatchNorm1d(160), nn.Linear(160, 128)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the output for a batch of 128 values each."""
        out: torch.Tensor = self.last(torch.relu(self.norm(self.first(values))))
        return out


@dataclass
class Trial:
    """One process's training under a hook. ``update`` does what comes between the backward pass and ``end_step``."""

    sidecar: FakeSidecar
    parts: Parts
    update: Callable[[], None]
    lazy: bool = True
    backward: Callable[[], None] | None = None
    step: int = 0
    golden: dict[int, Golden] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Begin, with one step done and slots to write into."""
        self.sidecar.lend = False
        self.hook = Checkpointer(
            job="j",
            model=self.parts.model,
            optimizer=self.parts.optimizer,
            lr_scheduler=self.parts.lr_scheduler,
            extra=self.parts.extra,
            socket=self.sidecar.socket_path,
            lazy=self.lazy,
        )
        assert self.hook.restore() == 0
        self.forward_backward()
        self.update()
        self.end_step()
        self.sidecar.lend_slots()
        self.wait_slots()

    def models(self) -> Sequence[nn.Module]:
        """Return the models that are trained."""
        models = self.parts.models()
        return [models] if isinstance(models, nn.Module) else list(models.values())

    def forward_backward(self) -> None:
        """Let each model see a batch."""
        if self.backward is not None:
            self.backward()
            return
        for model in self.models():
            loss = (model(torch.randn(8, 128)) ** 2).mean()
            if loss.requires_grad:
                loss.backward()

    def end_step(self) -> None:
        """End a step, and note what its snapshot must hold."""
        self.step += 1
        snapshot = capture(self.parts, rank=0, world=1)
        self.golden[self.step] = (snapshot.document, {name: raw(t) for name, t in snapshot.tensors.items()})
        self.hook.end_step(self.step)

    def train(self, steps: int) -> None:
        """Train, and see each snapshot arrive."""
        for _ in range(steps):
            self.forward_backward()
            self.update()
            self.end_step()
            self.sidecar.wait_image(self.step)
            self.wait_slots()

    def until_lazy(self) -> None:
        """Train until snapshots are lazy."""
        self.train(PROOFS + 1)
        self.forward_backward()
        self.update()
        self.train(1)
        assert self.hook._saver is not None
        self.hook._saver._settle()
        assert self.hook.stats.lazy_snapshots > 0

    def wait_slots(self) -> None:
        """Wait until a slot is free, and nothing is being copied: an image arrives just before its copy ends."""
        saver, session = self.hook._saver, self.hook._session
        assert saver is not None
        assert saver._lazy.wait(20)
        assert session is not None
        with session._news:
            assert session._news.wait_for(lambda: bool(session.slots._free), 20)

    def check(self, directory: Path) -> int:
        """Compare all snapshots that arrived, byte for byte; return how many there were."""
        for (step, _), image in self.sidecar.images.items():
            path = directory / f"{step}.image"
            path.write_bytes(image)
            found = open_image(path)
            document, tensors = self.golden[step]
            assert {name: raw(found.tensor(name)) for name in tensors} == tensors, step
            assert bytes(found.tensor("__document__").tolist()) == document
        return len(self.sidecar.images)

    def parts_copied(self) -> list[_Part]:
        """Return what is being copied, for each optimizer."""
        assert self.hook._saver is not None
        return [trust.part for trust in self.hook._saver._lazy._trust.values() if trust.part is not None]

    def hold(self) -> HeldCopier:
        """Have lazy copies made only when the test says so, or something waits for them."""
        saver = self.hook._saver
        assert saver is not None
        saver._lazy._copier = held = HeldCopier()
        saver._lazy._ended = held.event()
        saver._lazy._ended.set()
        return held


class HeldCopier(Copier):
    """Holds back the work of the other thread until it is released, or until one of its events is waited for."""

    def __init__(self) -> None:
        super().__init__(threads=1)
        self.held: list[Callable[[], None]] = []

    def start(self, work: Callable[[], None]) -> None:
        """Hold it."""
        self.held.append(work)

    def release(self) -> None:
        """Do it now."""
        while self.held:
            self.held.pop(0)()

    def event(self) -> threading.Event:
        """Return an event of which a wait is the last moment for the work."""
        copier = self

        class Waited(threading.Event):
            def wait(self, timeout: float | None = None) -> bool:
                copier.release()
                return super().wait(timeout)

        return Waited()
