"""The part that lives in the trainer: capture, hand-over and restore. Standard library and torch only.

What it exports is loaded when it is first asked for, so that a sidecar can import the frames
(``toprope.trainer_hooks.link.wire``) without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toprope.trainer_hooks.checkpointer import Checkpointer
    from toprope.trainer_hooks.elastic import ElasticSampler
    from toprope.trainer_hooks.errors import (
        HookError,
        PreemptedError,
        RestoreError,
        SidecarUnavailableError,
        SpecMismatchError,
        StateMismatchError,
        SupersededError,
        UnsupportedLeafError,
        UsageError,
        WorldMismatchError,
        one_line_errors,
    )

__all__ = [
    "Checkpointer",
    "ElasticSampler",
    "HookError",
    "PreemptedError",
    "RestoreError",
    "SidecarUnavailableError",
    "SpecMismatchError",
    "StateMismatchError",
    "SupersededError",
    "UnsupportedLeafError",
    "UsageError",
    "WorldMismatchError",
    "one_line_errors",
]

_MODULES = {"Checkpointer": "checkpointer", "ElasticSampler": "elastic"}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULES.get(name, "errors")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
