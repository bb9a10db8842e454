"""How a trainer ends: what its last snapshot has come to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from toprope.trainer_hooks.capture.modules import model_state
from toprope.trainer_hooks.capture.spread import local_of
from toprope.trainer_hooks.capture.state import Parts
from toprope.trainer_hooks.link import wire

Level: TypeAlias = Literal["nothing", "memory", "protected", "ready"]
LEVELS: tuple[Level, ...] = ("nothing", "memory", "protected", "ready")


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """What ``close()`` got. It is true if the last snapshot is as safe as was asked for, and its step was not skipped.

    ``step`` is that of the last snapshot (0: there is none), ``level`` how safe it is; ``skipped`` is the last step of
    all if that was due and could not be saved (else 0).
    """

    asked: Level
    level: Level = "nothing"
    step: int = 0
    skipped: int = 0
    saving: bool = True
    """Whether there was anybody to save to."""

    def __bool__(self) -> bool:
        """Say whether it is what was asked for."""
        if self.asked == "nothing":
            return True
        return self.saving and not self.skipped and (self.step == 0 or reaches(self.level, self.asked))

    def __str__(self) -> str:
        """Say it for a log."""
        if not self.saving:
            return "nothing was saved"
        last = f"the last snapshot is step {self.step}: {self.level}" if self.step else "no snapshot was taken"
        return last + (f"; step {self.skipped} was due and was not saved" if self.skipped else "")


def reaches(level: Level, asked: Level) -> bool:
    """Say whether a level is as safe as the one asked for: an object store is safer than a peer's memory."""
    return LEVELS.index(level) >= LEVELS.index(asked)


def level_of(desired: wire.Desired | None, step: int, *, is_hashed: Callable[[], bool]) -> Level:
    """Return how safe the snapshot of a step is; ``is_hashed`` says whether this node's sidecar has hashed it."""
    if desired is not None and desired.ready_step >= step:
        return "ready"
    if desired is not None and desired.protected_step >= step:
        return "protected"
    return "memory" if is_hashed() else "nothing"


Traces: TypeAlias = list[tuple[str, int, bytes]]
"""By name of a parameter or buffer: torch's count of changes, and a sample of its bytes."""
_SAMPLED_TENSORS = 64
_SAMPLED_ELEMENTS = 16


def traces(parts: Parts) -> Traces:
    """Return what shows an update of the model, cheaply: others than at the end of a step, and it was changed since.

    Fused and ``foreach`` updates don't move torch's counts; so of some tensors a few elements are compared, too.
    """
    found = model_state(parts.models(), world=1)
    local = [(name, local_of(tensor).detach()) for name, tensor in (*found.params.items(), *found.buffers.items())]
    every = max(1, -(-len(local) // _SAMPLED_TENSORS))
    return [
        (name, 0 if tensor.is_inference() else tensor._version, _sample(tensor) if at % every == 0 else b"")  # noqa: SLF001 - as autograd does
        for at, (name, tensor) in enumerate(local)
    ]


def _sample(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a few elements, spread evenly; none of a tensor that is not laid out plainly."""
    odd = tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_conj()
    if odd or tensor.is_neg() or not tensor.is_contiguous() or not tensor.numel():
        return b""
    flat = tensor.view(-1).view(torch.uint8).view(-1, tensor.dtype.itemsize)
    few = flat[:: -(-flat.shape[0] // _SAMPLED_ELEMENTS)]
    return bytes(few.contiguous().cpu().flatten().tolist())
