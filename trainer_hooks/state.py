"""What a trainer's state consists of, and its capture: a document, and the tensors that this rank stores."""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from toprope.trainer_hooks import rng
from toprope.trainer_hooks.errors import UnsupportedLeafError, UsageError
from toprope.trainer_hooks.image import check_tensor, plan_image
from toprope.trainer_hooks.layout import owners
from toprope.trainer_hooks.modules import ModelState, model_state, optimizer_names
from toprope.trainer_hooks.tree import Encoder, Json

FORMAT = 1


@runtime_checkable
class Stateful(Protocol):
    """An object that gives its state and takes it back."""

    def state_dict(self) -> Any:  # noqa: ANN401 - any value that can be kept
        """Return the state."""
        ...

    def load_state_dict(self, state: Any, /) -> Any:  # noqa: ANN401 - any value that can be kept
        """Take the state back."""
        ...


def as_stateful(value: object) -> Stateful | None:
    """Return a value of ``extra`` as one that gives its own state; None when it is plain."""
    if isinstance(value, torch.Generator):
        return rng.Generator(value)
    return value if isinstance(value, Stateful) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The objects whose state is kept. Those that are None have none."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    lr_scheduler: Stateful | None = None
    dataloader: Stateful | None = None
    scaler: Stateful | None = None
    extra: Stateful | MutableMapping[str, Any] | None = None

    def check(self) -> None:
        """Check what can be checked before training.

        Raises:
            UsageError: a part is not of a kind that can be kept; the message names it.
        """
        if not isinstance(self.model, nn.Module):
            raise UsageError(f"model is a {type(self.model).__name__}; give a torch.nn.Module")
        if self.optimizer is not None and not isinstance(self.optimizer, torch.optim.Optimizer):
            raise UsageError(f"optimizer is a {type(self.optimizer).__name__}; give a torch.optim.Optimizer")
        if type(self.optimizer).__name__ == "ZeroRedundancyOptimizer":
            raise UsageError("optimizer is a ZeroRedundancyOptimizer; sharded optimizers are not supported yet")
        for name, part in self.stateful().items():
            if not isinstance(part, Stateful):
                raise UsageError(f"{name} is a {type(part).__name__} without state_dict() and load_state_dict()")
        if self.extra is not None and not isinstance(self.extra, (Stateful, MutableMapping)):
            raise UsageError(f"extra is a {type(self.extra).__name__}; give a dict, or an object with state_dict()")

    def stateful(self) -> dict[str, Stateful]:
        """Return the parts that give and take their own state."""
        named = {"lr_scheduler": self.lr_scheduler, "scaler": self.scaler, "dataloader": self.dataloader}
        own = getattr(self.dataloader, "generator", None)  # torchdata's loader draws from it, and leaves it to us
        if isinstance(own, torch.Generator):
            named["dataloader_generator"] = rng.Generator(own)
        return {name: part for name, part in named.items() if part is not None}


@dataclass(slots=True)
class Snapshot:
    """A captured state: the document, and live tensors that are to be copied before training goes on."""

    document: bytes
    tensors: dict[str, torch.Tensor]


def devices_of(model: ModelState) -> list[int]:
    """Return the CUDA devices that hold the model, in the order in which they first appear."""
    found: dict[int, None] = {}
    for tensor in (*model.params.values(), *model.buffers.values()):
        if tensor.device.type == "cuda":
            found[tensor.device.index or 0] = None
    return list(found)


def check_values(parts: Parts, *, rank: int, world: int) -> None:
    """Check before training that all values can be kept.

    The data's are left out: to ask a loader for its position before it has begun may make it begin, and draw a seed.

    Raises:
        UnsupportedLeafError: a value can't be kept exactly.
        UsageError: the optimizer is not one for this model.
    """
    plan_image(capture(replace(parts, dataloader=None), rank=rank, world=world).tensors, {})


def capture(parts: Parts, *, rank: int, world: int) -> Snapshot:
    """Return the state as it is now; nothing of it is changed and no random number is drawn.

    Raises:
        UnsupportedLeafError: a value can't be kept exactly.
        UsageError: the optimizer is not one for this model.
    """
    model = model_state(parts.model, world=world)
    keeper = _Keeper(rank)
    owner_of = _owners(model, world)
    document: dict[str, Json] = {
        "format": FORMAT,
        "world": world,
        "rng": keeper.encoder().encode("rng", rng.streams(devices_of(model))),
        "model": _model(model, keeper, owner_of),
    }
    if parts.optimizer is not None:
        document["optimizer"] = _optimizer(parts.optimizer, model, keeper, owner_of)
    for name, part in parts.stateful().items():
        document[name] = keeper.encoder().encode(name, part.state_dict())
    if parts.extra is not None:
        document["extra"] = _extra(parts.extra, keeper)
    return Snapshot(json.dumps(document, separators=(",", ":"), allow_nan=False).encode(), keeper.tensors)


def _owners(model: ModelState, world: int) -> dict[str, int]:
    sizes = {name: model.params[name].numel() * model.params[name].dtype.itemsize for name in model.replicated}
    return owners(sizes, world=world)


@dataclass(slots=True)
class _Keeper:
    """Collects the tensors that this rank stores and says where each other one is stored."""

    rank: int
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    _names: set[str] = field(default_factory=set)

    def encoder(self, owner: int | None = None) -> Encoder:
        """Return an encoder for a part of the state that ``owner`` stores; None: each rank its own."""
        stored_by = self.rank if owner is None else owner
        return Encoder(lambda name, tensor: self._keep(name, tensor, stored_by))

    def _keep(self, name: str, tensor: torch.Tensor, owner: int) -> dict[str, Json]:
        check_tensor(name, tensor)
        unique, number = name, 1
        while unique in self._names:  # two paths may read alike: {"a.b": ...} and {"a": {"b": ...}}
            number += 1
            unique = f"{name}#{number}"
        self._names.add(unique)
        if owner == self.rank:
            self.tensors[unique] = tensor
        return {"$": "tensor", "name": unique, "rank": owner, "device": tensor.device.type}


def _model(model: ModelState, keeper: _Keeper, owner_of: dict[str, int]) -> dict[str, Json]:
    return {
        "params": {
            name: keeper.encoder(owner_of.get(name)).encode(f"model.{name}", tensor)
            for name, tensor in model.params.items()
        },
        "buffers": {name: keeper.encoder().encode(f"model.{name}", tensor) for name, tensor in model.buffers.items()},
        "tied": model.tied,
        "extra_state": {
            name: keeper.encoder().encode(f"model.{name}.extra_state", module.get_extra_state())
            for name, module in model.extras.items()
        },
    }


def _optimizer(
    optimizer: torch.optim.Optimizer, model: ModelState, keeper: _Keeper, owner_of: dict[str, int]
) -> dict[str, Json]:
    names = optimizer_names(optimizer, model.params)
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        settings = {key: value for key, value in group.items() if key != "params"}
        groups.append(
            {
                "params": [names[id(parameter)] for parameter in group["params"]],
                "settings": keeper.encoder().encode(f"optimizer.groups.{number}", settings),
            }
        )
    state = {}
    for parameter, values in optimizer.state.items():
        name = names.get(id(parameter))
        if name is None:
            raise UnsupportedLeafError.at(
                "optimizer.state", f"has an entry for {parameter!r:.80}, which is no parameter"
            )
        state[name] = keeper.encoder(owner_of.get(name)).encode(f"optimizer.state.{name}", values)
    return {"groups": groups, "state": state}


def _extra(extra: Stateful | MutableMapping[str, Any], keeper: _Keeper) -> dict[str, Json]:
    """Return the user's own state: values as they are, those that are Stateful as their state."""
    if not isinstance(extra, MutableMapping):
        return {"whole": keeper.encoder().encode("extra", extra.state_dict())}
    plain: dict[str, Json] = {}
    stateful: dict[str, Json] = {}
    for name, value in extra.items():
        if type(name) is not str:
            raise UnsupportedLeafError.at(f"extra[{name!r}]", "the keys of extra must be text")
        part = as_stateful(value)
        if part is not None:
            stateful[name] = keeper.encoder().encode(f"extra.{name}", part.state_dict())
        else:
            plain[name] = keeper.encoder().encode(f"extra.{name}", value)
    return {"plain": plain, "stateful": stateful}
