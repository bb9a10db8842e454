"""Where FSDP keeps the shards that the optimizer updates, in both of its kinds. Its private names stay in here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from toprope.trainer_hooks.errors import UnsupportedLeafError


@dataclass(frozen=True, slots=True)
class FlatShard:
    """What this rank holds of a flattened tensor: ``values`` lie at ``offset`` of ``whole`` elements.

    ``shape`` is that of the tensor before it was flattened.
    """

    values: torch.Tensor
    offset: int
    whole: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FlatPart:
    """One of the parameters that FSDP1 made one flat tensor of: it begins at element ``begin`` of that."""

    name: str
    shape: tuple[int, ...]
    begin: int


@dataclass(slots=True)
class Shards:
    """What FSDP knows of the parameters of a model. A parameter's place is its module's ``id`` and its name there."""

    by_place: dict[tuple[int, str], nn.Parameter] = field(default_factory=dict)
    """FSDP2: the sharded parameter, also while an unsharded one stands in its place."""
    flat: dict[int, FlatShard] = field(default_factory=dict)
    """FSDP1: the local shard by the ``id`` of the parameter that the optimizer has."""
    parts: dict[int, tuple[FlatPart, ...]] = field(default_factory=dict)
    """FSDP1, where it shows only the flat parameter: what that consists of, by its ``id``; names as in its module."""
    gathered: int = 0
    """How many parameters are gathered at present: to write a shard of theirs would not change what is computed."""


def shards_of(model: nn.Module) -> Shards:
    """Return where FSDP keeps the shards of a model; empty for one that has none.

    Raises:
        UnsupportedLeafError: this version of torch keeps them elsewhere.
    """
    found = Shards()
    second: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    first: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    for name, module in model.named_modules():
        try:
            if isinstance(module, second):
                _add_second(found, module)
            elif isinstance(module, first):
                _add_first(found, module)
        except AttributeError as error:
            raise UnsupportedLeafError.at(
                f"model.{name}", f"FSDP of torch {torch.__version__} is not laid out as expected ({error})"
            ) from error
    return found


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module before FSDP2 gave it one of its own."""
    kind = type(module)
    second = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if second is not None and second in kind.__bases__:
        return next(base for base in kind.__bases__ if base is not second)
    return kind


def _add_second(found: Shards, module: Any) -> None:  # noqa: ANN401 - an FSDPModule
    state = module._get_fsdp_state()  # noqa: SLF001 - see the module's docstring
    group = state._fsdp_param_group if not hasattr(state, "_fsdp_param_groups") else None  # noqa: SLF001 - see there
    groups = [group] if group is not None else getattr(state, "_fsdp_param_groups", [])
    for one in (param for group in groups for param in group.fsdp_params):
        info = one._module_info  # noqa: SLF001 - see there
        places = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
        for holder, name in places:
            found.by_place[id(holder), name] = one.sharded_param
        found.gathered += getattr(info.module, info.param_name) is not one.sharded_param


def _add_first(found: Shards, module: Any) -> None:  # noqa: ANN401 - a FullyShardedDataParallel
    handle = module._handle  # noqa: SLF001 - see the module's docstring
    if handle is None:
        return
    flat = handle.flat_param
    if flat._params is None:  # noqa: SLF001 - see there
        found.parts[id(flat)] = tuple(_parts(flat))
    if not handle.uses_sharded_strategy:
        return
    shard = getattr(flat, "_local_shard", flat)  # made by the first forward; until then the parameter is the shard
    found.gathered += not handle.is_sharded(flat)
    size = flat._unpadded_unsharded_size.numel()  # noqa: SLF001 - see there
    padded = shard.numel() * handle.world_size
    found.flat[id(flat)] = FlatShard(shard.detach(), handle.rank * shard.numel(), padded, (size,))
    for parameter, values in _original(flat, shard.detach()):
        found.flat[id(parameter)] = values


def _parts(flat: Any) -> Iterator[FlatPart]:  # noqa: ANN401 - a FlatParameter
    begin, originals = 0, zip(flat._fqns, flat._shapes, strict=True)  # noqa: SLF001 - see the module's docstring
    for count, padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):  # noqa: SLF001 - see there
        if not padding:
            name, shape = next(originals)
            yield FlatPart(name, tuple(shape), begin)
        begin += count


def _original(flat: Any, shard: torch.Tensor) -> Iterator[tuple[nn.Parameter, FlatShard]]:  # noqa: ANN401 - a FlatParameter
    """Return this rank's part of each original parameter, where FSDP1 was told to show those."""
    if flat._params is None:  # noqa: SLF001 - see the module's docstring
        return
    for parameter, info, shape in zip(flat._params, flat._shard_param_infos, flat._shapes, strict=True):  # noqa: SLF001 - see there
        at = info.offset_in_shard if info.in_shard else 0
        count = info.numel_in_shard if info.in_shard else 0
        offset = info.intra_param_start_idx if info.in_shard else 0
        yield parameter, FlatShard(shard[at : at + count], offset, shape.numel(), tuple(shape))
