"""Warm-up: a forward and a backward pass before training begins, after which all is as it was before.

DDP regroups its gradient buckets after the first backward pass of each process; ``torch.compile`` and autotuning
settle in the first passes, too. A process that has had them before it trains computes as one that never ended.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, TypeAlias

import torch
from torch import nn

from toprope.trainer_hooks.capture import rng
from toprope.trainer_hooks.capture.modules import ModelState, model_state
from toprope.trainer_hooks.capture.optimizers import with_state
from toprope.trainer_hooks.capture.spread import local_of
from toprope.trainer_hooks.capture.state import Parts, Stateful, as_stateful, model_devices
from toprope.trainer_hooks.errors import UsageError
from toprope.trainer_hooks.image.inplace import overwrite

_Back: TypeAlias = Callable[[], Any]
"""Makes something what it was, and returns it."""


def warm_up(parts: Parts, run: Callable[[], object]) -> None:
    """Call ``run``, then put back all that the parts hold: values, settings, random streams. Gradients become None.

    What ``run`` raises goes on to the caller; the state is put back then, too.

    Raises:
        UsageError: ``run`` took something that can't be put back.
    """
    back = [*_ways_back(parts)]
    try:
        run()
    finally:
        for model in _models(parts):
            model.zero_grad(set_to_none=True)
        for undo in reversed(back):
            undo()


def _ways_back(parts: Parts) -> Iterator[_Back]:
    """Return what undoes all changes when called last to first."""
    found = model_state(parts.models(), world=1)
    if hasattr(parts.dataloader, "_iterator"):
        yield _unbegun(parts.dataloader)
    yield _streams(model_devices(found))
    yield from _of_models(parts, found)
    for optimizer in parts.optimizers().values():
        yield _value(with_state(optimizer).state)
        for group in optimizer.param_groups:
            yield _group(group)
    if isinstance(parts.extra, MutableMapping):
        yield _mapping(parts.extra)
    elif parts.extra is not None:
        yield _stateful(parts.extra)
    for part in parts.stateful().values():
        if part is not parts.dataloader or not hasattr(part, "_iterator"):
            yield _stateful(part)


def _of_models(parts: Parts, found: ModelState) -> Iterator[_Back]:
    for model in _models(parts):
        for module in model.modules():
            yield _flags_and_buffers(module)
    yield _parameters(parts, {name: _copied(local_of(found.kept(name))) for name in found.params})
    for module in found.extras.values():
        yield _extra_state(module)


def _models(parts: Parts) -> list[nn.Module]:
    models = parts.models()
    return [models] if isinstance(models, nn.Module) else list(models.values())


def _unbegun(loader: Any) -> _Back:  # noqa: ANN401 - a data loader of torchdata
    """To ask torchdata's loader for its state makes it begin, and what it then draws can't be put back."""
    before = loader._iterator  # noqa: SLF001 - nothing else says whether it has begun

    def back() -> None:
        if loader._iterator is not before:  # noqa: SLF001 - see above
            raise UsageError(
                "warm_up took its batch from the data loader, which can't be made to begin again as it would have: "
                "take any batch, of zeros if need be, from elsewhere"
            )

    return back


def _streams(devices: list[int]) -> _Back:
    saved = copy.deepcopy(rng.streams(devices))
    return lambda: rng.set_streams(saved, devices)


def _flags_and_buffers(module: nn.Module) -> _Back:
    """Buffers of all kinds, those that no checkpoint has among them."""
    training, buffers = module.training, _value(module._buffers)  # noqa: SLF001 - a forward pass may put in another one

    def back() -> None:
        module.training = training
        buffers()

    return back


def _parameters(parts: Parts, saved: dict[str, torch.Tensor]) -> _Back:
    """Look the parameters up again: FSDP may have put other tensors in their places."""

    def back() -> None:
        found = model_state(parts.models(), world=1)
        for name, values in saved.items():
            overwrite(local_of(found.kept(name)), values)

    return back


def _extra_state(module: nn.Module) -> _Back:
    saved = copy.deepcopy(module.get_extra_state())
    return lambda: module.set_extra_state(saved)


def _stateful(part: Stateful) -> _Back:
    saved = copy.deepcopy(part.state_dict())
    return lambda: part.load_state_dict(saved)


def _object(value: object, undo: _Back) -> _Back:
    """The same object, with the state that it had."""

    def back() -> object:
        undo()
        return value

    return back


def _group(group: dict[str, Any]) -> _Back:
    """The settings of a group; its parameters are kept with the model."""
    settings = {key: _value(value) for key, value in group.items() if key != "params"}

    def back() -> None:
        parameters = group["params"]
        group.clear()
        group.update({"params": parameters, **{key: undo() for key, undo in settings.items()}})

    return back


def _value(value: Any) -> _Back:  # noqa: ANN401 - any value that can be kept
    """Return the way back for a value: the same tensor, dict or list, with what it held."""
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, MutableMapping):
        return _mapping(value)
    if isinstance(value, (list, deque)):
        return _sequence(value)
    if (part := as_stateful(value)) is not None:
        return _object(value, _stateful(part))
    saved = copy.deepcopy(value)
    return lambda: saved


def _tensor(tensor: torch.Tensor) -> _Back:
    saved = _copied(local_of(tensor))

    def back() -> torch.Tensor:
        overwrite(local_of(tensor), saved)
        return tensor

    return back


def _mapping(mapping: MutableMapping[Any, Any]) -> _Back:
    held = {key: _value(value) for key, value in mapping.items()}

    def back() -> MutableMapping[Any, Any]:
        mapping.clear()
        mapping.update({key: undo() for key, undo in held.items()})
        return mapping

    return back


def _sequence(sequence: list[Any] | deque[Any]) -> _Back:
    held = [_value(value) for value in sequence]

    def back() -> list[Any] | deque[Any]:
        sequence.clear()
        sequence.extend(undo() for undo in held)
        return sequence

    return back


def _copied(local: torch.Tensor) -> torch.Tensor:
    fresh = torch.empty_like(local, requires_grad=False)
    overwrite(fresh, local.detach())
    return fresh
