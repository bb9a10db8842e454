"""Optimizers that keep their state elsewhere than in themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from toprope.trainer_hooks.capture.modules import optimizer_names
from toprope.trainer_hooks.errors import UsageError


def check_kind(name: str, optimizer: object) -> None:
    """Check that this is an optimizer whose state can be kept.

    Raises:
        UsageError: it is not; the message says why.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"{name} is a {type(optimizer).__name__}; give a torch.optim.Optimizer")
    if _is_zero(optimizer) and vars(optimizer)["_overlap_with_ddp"]:
        raise UsageError(
            f"{name} is a ZeroRedundancyOptimizer that steps inside DDP's hooks, where no step has an end; make it "
            "with overlap_with_ddp=False"
        )


def with_state(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that has this rank's state: for ZeRO the one inside, which has only this rank's part."""
    inner: Any = vars(optimizer)["optim"] if _is_zero(optimizer) else optimizer
    assert isinstance(inner, torch.optim.Optimizer)
    return inner


def owned(optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter]) -> list[str] | None:
    """Return the parameters whose state ZeRO has given to this rank; None where each rank has the state of all."""
    if not _is_zero(optimizer):
        return None
    return sorted(optimizer_names(with_state(optimizer), params).values())


def _is_zero(optimizer: object) -> bool:
    return any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)
