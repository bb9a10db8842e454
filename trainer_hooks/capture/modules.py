"""The tensors of a model under their own names, whatever wraps it.

Wrappers (DDP, FSDP1, torch.compile, activation checkpointing) are recognised by their class and looked through, so
that a model has the same names with and without them, and a submodule that is really called ``module`` keeps its name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from toprope.trainer_hooks.capture import fsdp
from toprope.trainer_hooks.capture.spread import as_dtensor
from toprope.trainer_hooks.errors import UnsupportedLeafError, UsageError

_WRAPPERS = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "_fsdp_wrapped_module"),
)


@dataclass(slots=True, kw_only=True)
class ModelState:
    """A model's state by name. ``tied`` maps each further name of a parameter to its first.

    ``flat`` has what FSDP1 left of a parameter on this rank, ``flattened`` the original parameters of one that is its
    flat tensor, under the names that they would have without FSDP; ``gathered`` counts the parameters that FSDP has
    whole at present.
    """

    root_class: str | dict[str, str] = ""
    params: dict[str, nn.Parameter] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    extras: dict[str, nn.Module] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    replicated: set[str] = field(default_factory=set)
    flat: dict[str, fsdp.FlatShard] = field(default_factory=dict)
    flattened: dict[str, tuple[fsdp.FlatPart, ...]] = field(default_factory=dict)
    gathered: int = 0
    ddp: list[DistributedDataParallel] = field(default_factory=list)

    def kept(self, name: str) -> torch.Tensor:
        """Return the values of a parameter that are kept: FSDP1's local shard, else the parameter."""
        return self.flat[name].values if name in self.flat else self.params[name]

    def declared(self, patterns: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers of these names (``fnmatch``) that are plain: no DTensor, no part of one."""
        return {
            name: tensor
            for name, tensor in (*self.params.items(), *self.buffers.items())
            if any(fnmatchcase(name, pattern) for pattern in patterns)
            and name not in self.flat
            and as_dtensor(tensor) is None
        }


def model_state(models: nn.Module | Mapping[str, nn.Module], *, world: int) -> ModelState:
    """Return the parameters, persistent buffers and extra states of a model, or of several, each under its name.

    Parameters under a DDP module that spans the whole world are ``replicated``.

    Raises:
        UnsupportedLeafError: a parameter or a persistent buffer has no values yet.
    """
    walk = _Walk(world, ModelState())
    if isinstance(models, nn.Module):
        walk.enter(models, "")
        walk.found.root_class = _class_name(models)
        return walk.found
    for name, model in models.items():
        walk.enter(model, f"{name}.")
    walk.found.root_class = {name: _class_name(model) for name, model in models.items()}
    return walk.found


def _class_name(model: nn.Module) -> str:
    return fsdp.class_of(_bare(model)).__qualname__


def _wrapped(module: nn.Module) -> nn.Module | None:
    """Return what a wrapper wraps; None when it is no wrapper."""
    if isinstance(module, (DistributedDataParallel, DataParallel)):
        return module.module  # type: ignore[no-any-return]
    for where, name, attribute in _WRAPPERS:
        wrapper: Any = getattr(sys.modules.get(where), name, None)
        if wrapper is not None and isinstance(module, wrapper):
            inner = getattr(module, attribute)
            assert isinstance(inner, nn.Module)
            return inner
    return None


def _bare(module: nn.Module) -> nn.Module:
    while (inner := _wrapped(module)) is not None:
        module = inner
    return module


@dataclass(slots=True)
class _Walk:
    world: int
    found: ModelState
    _names: dict[int, str] = field(default_factory=dict)
    _shards: fsdp.Shards = field(default_factory=fsdp.Shards)

    def enter(self, model: nn.Module, prefix: str) -> None:
        """Note the tensors of a model."""
        self._shards = fsdp.shards_of(model)
        self.found.gathered += self._shards.gathered
        self.visit(model, prefix, replicated=False, ignored=frozenset())

    def visit(self, module: nn.Module, prefix: str, *, replicated: bool, ignored: frozenset[str]) -> None:
        """Note the tensors of a module and of its children; ``ignored`` are names that DDP was told to leave alone."""
        while (inner := _wrapped(module)) is not None:
            if isinstance(module, DistributedDataParallel):
                self.found.ddp.append(module)
                replicated = replicated or _spans(module, self.world)
                ignored = ignored | {f"{prefix}{name}" for name in module.parameters_to_ignore}
            module = inner
        self._note(module, prefix, replicated=replicated, ignored=ignored)
        for name, child in module._modules.items():  # noqa: SLF001 - named_children() leaves out one of two equal ones
            if child is not None:
                self.visit(child, f"{prefix}{name}.", replicated=replicated, ignored=ignored)

    def _note(self, module: nn.Module, prefix: str, *, replicated: bool, ignored: frozenset[str]) -> None:
        for name, present in _tensors(module._parameters):  # noqa: SLF001 - see visit
            parameter = self._shards.by_place.get((id(module), name), present)
            self._note_parameter(f"{prefix}{name}", parameter, replicated=replicated, ignored=ignored)
        transient = module._non_persistent_buffers_set  # noqa: SLF001 - the only place that says so
        for name, buffer in _tensors(module._buffers):  # noqa: SLF001 - see visit
            if name not in transient:
                _check_made(f"{prefix}{name}", buffer)
                self.found.buffers[f"{prefix}{name}"] = buffer
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            self.found.extras[prefix.removesuffix(".") or "(root)"] = module

    def _note_parameter(self, name: str, parameter: Any, *, replicated: bool, ignored: frozenset[str]) -> None:  # noqa: ANN401 - a parameter of any class
        _check_made(name, parameter)
        first = self._names.setdefault(id(parameter), name)
        if first != name:
            self.found.tied[name] = first
            return
        self.found.params[name] = parameter
        if id(parameter) in self._shards.flat:
            self.found.flat[name] = self._shards.flat[id(parameter)]
        if id(parameter) in self._shards.parts:
            prefix = name.removesuffix(name.rpartition(".")[2])
            parts = self._shards.parts[id(parameter)]
            self.found.flattened[name] = tuple(replace(part, name=f"{prefix}{_own(part.name)}") for part in parts)
        if replicated and name not in ignored:
            self.found.replicated.add(name)


def _check_made(name: str, tensor: Any) -> None:  # noqa: ANN401 - a parameter or buffer of any class
    if is_lazy(tensor):  # to ask for its shape raises
        raise UnsupportedLeafError.at(f"model.{name}", "has no values yet; run one forward pass before the hook")


def _own(name: str) -> str:
    """Return a name without the wrappers in it."""
    wrappers = {attribute for _, _, attribute in _WRAPPERS}
    return ".".join(word for word in name.split(".") if word not in wrappers)


def _tensors(named: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, tensor) for name, tensor in named.items() if tensor is not None)


def _spans(module: DistributedDataParallel, world: int) -> bool:
    return world > 1 and module.process_group.size() == world


def optimizer_names(optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter]) -> dict[int, str]:
    """Return the name of each parameter of an optimizer by its ``id``.

    Raises:
        UsageError: one of them is not in the model.
    """
    names = {id(parameter): name for name, parameter in params.items()}
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise UsageError(
                    f"optimizer group {number}, parameter {position} of shape {tuple(parameter.shape)} is not in the "
                    "model; give the hook the model that the optimizer was made for, or all of them: "
                    "model={'policy': ..., 'value': ...}"
                )
    return names
