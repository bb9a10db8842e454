"""The spec: what a job's state depends on. Not the learning rate, not the world size, not paths."""

from __future__ import annotations

from typing import Any

from toprope.trainer_hooks.modules import model_state, optimizer_names
from toprope.trainer_hooks.state import Parts


def spec_of(parts: Parts) -> dict[str, Any]:
    """Return classes, names, dtypes and global shapes of model and optimizer, as JSON."""
    model = model_state(parts.model, world=1)
    spec: dict[str, Any] = {
        "model": {
            "class": model.root_class,
            "params": {name: _form(tensor) for name, tensor in model.params.items()},
            "buffers": {name: _form(tensor) for name, tensor in model.buffers.items()},
            "tied": model.tied,
        }
    }
    if parts.optimizer is not None:
        names = optimizer_names(parts.optimizer, model.params)
        spec["optimizer"] = {
            "class": type(parts.optimizer).__qualname__,
            "groups": [[names[id(p)] for p in group["params"]] for group in parts.optimizer.param_groups],
        }
    return spec


def _form(tensor: Any) -> list[Any]:  # noqa: ANN401 - a tensor of any class
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
