"""The spec: what a job's state depends on. Not the learning rate, not the world size, not paths."""

from __future__ import annotations

from typing import Any

from toprope.trainer_hooks.capture.modules import ModelState, model_state, optimizer_names
from toprope.trainer_hooks.capture.optimizers import with_state
from toprope.trainer_hooks.capture.state import Parts


def spec_of(parts: Parts) -> dict[str, Any]:
    """Return classes, names, dtypes and global shapes of model and optimizer, as JSON."""
    model = model_state(parts.models(), world=1)
    spec: dict[str, Any] = {
        "model": {
            "class": model.root_class,
            "params": dict(form for name in model.params for form in _param_forms(model, name)),
            "buffers": {name: _form(tensor) for name, tensor in model.buffers.items()},
            "tied": model.tied,
        }
    }
    for section, optimizer in parts.optimizers().items():
        names = optimizer_names(optimizer, model.params)
        spec[section] = {
            "class": type(with_state(optimizer)).__qualname__,
            "groups": [
                [name for p in group["params"] for name in _originals(model, names[id(p)])]
                for group in optimizer.param_groups
            ],
        }
    return spec


def _originals(model: ModelState, name: str) -> list[str]:
    """Return the parameters that this one consists of: the spec is the same whether FSDP1 shows them or not."""
    return [part.name for part in model.flattened[name]] if name in model.flattened else [name]


def _param_forms(model: ModelState, name: str) -> list[tuple[str, list[Any]]]:
    dtype, shape = _form(model.params[name])
    if name in model.flattened:
        return [(part.name, [dtype, list(part.shape)]) for part in model.flattened[name]]
    return [(name, [dtype, list(model.flat[name].shape) if name in model.flat else shape])]


def _form(tensor: Any) -> list[Any]:  # noqa: ANN401 - a tensor of any class
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
