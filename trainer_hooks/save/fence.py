"""A fence before each update of an optimizer: what is still being copied of its tensors is waited for."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from toprope.trainer_hooks.image import cuda


def raise_fence(optimizer: torch.optim.Optimizer, arrive: Callable[[], None]) -> Callable[[], None]:
    """Have ``arrive`` called before each ``step()`` of this process; return what takes the fence away.

    A compiled step has no fence: what it traced of one would run after the update.
    """
    process = os.getpid()

    def fence(_optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:  # noqa: ANN401 - torch's signature
        if not torch.compiler.is_compiling() and os.getpid() == process:
            arrive()

    return optimizer.register_step_pre_hook(fence).remove


def why_unfit(optimizer: torch.optim.Optimizer) -> str:
    """Return why the updates of an optimizer can't be fenced, as seen from within its fence; empty if they can."""
    if torch._C._current_graph_task_id() != -1:  # noqa: SLF001 - no public name says that a backward pass is running
        return "it steps during the backward pass"
    groups = optimizer.param_groups
    if cuda.capturing() or any(group.get("capturable") and cuda.has(group["params"]) for group in groups):
        return "its updates may be part of a CUDA graph, which runs no hooks"
    return ""
