"""What a trainer's state consists of, and its capture: a document, and the tensors that this rank stores."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import nn

from toprope.trainer_hooks.capture import rng
from toprope.trainer_hooks.capture.fsdp import FlatShard
from toprope.trainer_hooks.capture.layout import owners
from toprope.trainer_hooks.capture.modules import ModelState, model_state, optimizer_names
from toprope.trainer_hooks.capture.optimizers import check_kind, owned, with_state
from toprope.trainer_hooks.capture.spread import (
    LayoutError,
    Mesh,
    Spread,
    as_dtensor,
    block_of,
    local_of,
    refused,
    replicas_of,
    spread_of,
)
from toprope.trainer_hooks.errors import UnsupportedLeafError, UsageError
from toprope.trainer_hooks.image.copying import lies_in_order
from toprope.trainer_hooks.image.shard import Piece, check_tensor, plan_image
from toprope.trainer_hooks.image.tree import Encoder, Json, object_of, to_json

FORMAT = 1
_kind_of = operator.attrgetter("dtype", "shape", "layout", "device")
_KEY = re.compile(r"[A-Za-z0-9_-]{1,64}")
_T = TypeVar("_T")


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
    """The objects whose state is kept. Those that are None have none. Of some there may be several."""

    model: nn.Module | Mapping[str, nn.Module] | Sequence[nn.Module]
    optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | Sequence[torch.optim.Optimizer] | None = (
        None
    )
    lr_scheduler: Stateful | Mapping[str, Stateful] | Sequence[Stateful] | None = None
    dataloader: Stateful | None = None
    scaler: Stateful | None = None
    extra: Stateful | MutableMapping[str, Any] | None = None
    allow_pickle: bool = False
    """Whether a value of no known type is pickled when it is saved, and unpickled when it is restored."""
    replicated: tuple[str, ...] = ()
    """Patterns of the names of plain parameters and buffers that all ranks have with the same values."""

    def check(self) -> None:
        """Check what can be checked before training.

        Raises:
            UsageError: a part is not of a kind that can be kept; the message names it.
        """
        for name, model in _named("model", self.model).items():
            if not isinstance(model, nn.Module):
                raise UsageError(f"{name} is a {type(model).__name__}; give a torch.nn.Module")
        for name, optimizer in self.optimizers().items():
            check_kind(name, optimizer)
        for name, part in self.stateful().items():
            if not isinstance(part, Stateful):
                raise UsageError(f"{name} is a {type(part).__name__} without state_dict() and load_state_dict()")
        if self.extra is not None and not isinstance(self.extra, (Stateful, MutableMapping)):
            raise UsageError(f"extra is a {type(self.extra).__name__}; give a dict, or an object with state_dict()")

    def models(self) -> nn.Module | dict[str, nn.Module]:
        """Return the model, or several by name."""
        return self.model if isinstance(self.model, nn.Module) else _by_key("model", self.model)

    def weights(self) -> Parts:
        """Return the models alone."""
        return Parts(model=self.model, allow_pickle=self.allow_pickle)

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Return the optimizers by the name of their section in the document."""
        return {} if self.optimizer is None else _named("optimizer", self.optimizer)

    def stateful(self) -> dict[str, Stateful]:
        """Return the parts that give and take their own state, by the name of their section in the document."""
        schedulers = {} if self.lr_scheduler is None else _named("lr_scheduler", self.lr_scheduler)
        named = {**schedulers, "scaler": self.scaler, "dataloader": self.dataloader}
        own = getattr(self.dataloader, "generator", None)  # torchdata's loader draws from it, and leaves it to us
        if isinstance(own, torch.Generator):
            named["dataloader_generator"] = rng.Generator(own)
        return {name: part for name, part in named.items() if part is not None}


def _named(part: str, given: _T | Mapping[str, _T] | Sequence[_T]) -> dict[str, _T]:
    """Return one object under the name of its part, several under that and their own."""
    if isinstance(given, (Mapping, Sequence)) and not isinstance(given, Stateful):
        return {f"{part}.{key}": value for key, value in _by_key(part, given).items()}
    return {part: given}


def _by_key(part: str, given: Mapping[str, _T] | Sequence[_T]) -> dict[str, _T]:
    found = dict(given) if isinstance(given, Mapping) else {str(number): value for number, value in enumerate(given)}
    for key in found:
        if type(key) is not str or _KEY.fullmatch(key) is None:
            raise UsageError(f"{part} has the key {key!r}; give 1 to 64 letters, digits, _ and -")
    return found


@dataclass(slots=True)
class Snapshot:
    """A captured state: the document, and live tensors that are to be copied before training goes on.

    ``pieces`` says which of them are pieces of larger ones, and where they lie in them. ``updated_by`` has those that
    an optimizer updates, and nothing else should, with the section of that optimizer. ``form`` is one object for as
    long as the same memory finds tensors of the same names, kinds, shapes and order in memory, and these two the same.
    """

    document: bytes
    tensors: dict[str, torch.Tensor]
    pieces: Mapping[str, Piece] = field(default_factory=dict)
    updated_by: Mapping[str, str] = field(default_factory=dict)
    form: object = field(default_factory=object)


def model_devices(model: ModelState) -> list[int]:
    """Return the CUDA devices that hold the model, in the order in which they first appear."""
    found: dict[int, None] = {}
    for tensor in (*model.params.values(), *model.buffers.values()):
        if tensor.is_cuda:
            found[tensor.device.index or 0] = None
    return list(found)


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """What is said of a tensor, and the ``marks`` of it by which that holds; another one for other marks."""

    marks: tuple[object, ...]
    text: str
    """What the document says."""
    mine: bool
    """Whether this rank stores it."""
    piece: Piece | None
    updater: str


@dataclass(slots=True)
class Memory:
    """What a capture learned of each tensor, for the next one; it keeps no tensor alive."""

    known: dict[str, _Known] = field(default_factory=dict)
    meshes: dict[Mesh, int] = field(default_factory=dict)
    pieces: dict[str, Piece] = field(default_factory=dict)
    updated_by: dict[str, str] = field(default_factory=dict)
    form: object = field(default_factory=object)

    def learn(self, known: dict[str, _Known]) -> None:
        """Take in what is known of all tensors now."""
        if known == self.known:
            return
        self.known, self.form = known, object()
        mine = {name: one for name, one in known.items() if one.mine}
        self.pieces = {name: one.piece for name, one in mine.items() if one.piece is not None}
        self.updated_by = {name: one.updater for name, one in mine.items() if one.updater}


def check_values(parts: Parts, *, rank: int, world: int) -> None:
    """Check before training that all values can be kept.

    The data's are left out: to ask a loader for its position before it has begun may make it begin, and draw a seed.

    Raises:
        UnsupportedLeafError: a value can't be kept exactly.
        UsageError: the optimizer is not one for this model.
    """
    snapshot = capture(replace(parts, dataloader=None), rank=rank, world=world)
    plan_image(snapshot.tensors, {}, snapshot.pieces)


def capture(parts: Parts, *, rank: int, world: int, memory: Memory | None = None) -> Snapshot:
    """Return the state as it is now; nothing of it is changed and no random number is drawn.

    With the ``memory`` of the capture before, only tensors that have another form than then are looked at closely.

    Raises:
        UnsupportedLeafError: a value can't be kept exactly.
        UsageError: the optimizer is not one for this model, or a part raised when it was asked for its state.
    """
    model = model_state(parts.models(), world=world)
    memory = Memory() if memory is None else memory
    keeper = _Keeper(rank, parts.allow_pickle, memory)
    owner_of = _owners(model, parts.replicated, rank, world)
    document = {
        "format": to_json(FORMAT),
        "world": to_json(world),
        "rng": keeper.encoder().encode("rng", rng.streams(model_devices(model))),
        "model": _model(model, keeper, owner_of, _updaters(parts)),
    }
    for name, optimizer in parts.optimizers().items():
        document[name] = _optimizer(name, optimizer, model, keeper, owner_of)
    for name, part in parts.stateful().items():
        document[name] = keeper.encoder().encode(name, _asked(name, part.state_dict))
    if parts.extra is not None:
        document["extra"] = _extra(parts.extra, keeper)
    document["meshes"] = to_json([{"shape": list(mesh.shape), "ranks": list(mesh.ranks)} for mesh in memory.meshes])
    memory.learn(keeper.known)
    return Snapshot(object_of(document).encode(), keeper.tensors, memory.pieces, memory.updated_by, memory.form)


def _asked(name: str, state_dict: Callable[[], Any]) -> Any:  # noqa: ANN401 - whatever a part says
    """Return what a part says of its state. It is code of others, and whatever it raises must not end the training."""
    try:
        return state_dict()
    except Exception as error:
        raise UsageError(
            f"{name}: {getattr(state_dict, '__name__', 'state_dict')}() raised {type(error).__name__}: {error}"
        ) from error


def _updaters(parts: Parts) -> dict[int, str]:
    """Return the section of the optimizer of each parameter, by its ``id``; none if it has two or no gradient."""
    found: dict[int, str] = {}
    for section, optimizer in parts.optimizers().items():
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            twice = found.get(id(parameter), section) != section
            found[id(parameter)] = "" if twice or not parameter.requires_grad else section
    return found


def _owners(model: ModelState, declared: Sequence[str], rank: int, world: int) -> dict[str, int]:
    """Return who stores each tensor that is the same on several ranks; each of those comes to the same answer."""
    sizes: dict[tuple[int, ...], dict[str, int]] = {}
    everywhere = model.declared(declared)
    buffers = {name: tensor for name, tensor in everywhere.items() if name in model.buffers}
    for name, tensor in (*model.params.items(), *buffers.items()):
        on_all = name in model.replicated or name in everywhere
        ranks = _holders(name, tensor, rank, tuple(range(world)) if on_all else (rank,))
        if len(ranks) > 1:
            local = local_of(tensor)
            sizes.setdefault(ranks, {})[name] = local.numel() * local.dtype.itemsize
    return {name: owner for ranks, named in sizes.items() for name, owner in owners(named, ranks=ranks).items()}


def _holders(name: str, tensor: torch.Tensor, rank: int, plain: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ranks that hold the same values: for a DTensor as its mesh says, else the ``plain`` ones."""
    dtensor = as_dtensor(tensor)
    if dtensor is None:
        return plain
    try:
        return replicas_of(spread_of(dtensor, rank=rank))
    except LayoutError as error:
        raise refused(f"model.{name}", error) from error


@dataclass(slots=True)
class _Keeper:
    """Collects the tensors that this rank stores and says where each other one is stored."""

    rank: int
    allow_pickle: bool
    memory: Memory
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    known: dict[str, _Known] = field(default_factory=dict)
    updater: str = ""
    """The section of the optimizer that updates what is kept next; empty when it is none's."""

    def encoder(
        self, owner: int | None = None, of: torch.Tensor | None = None, flat: FlatShard | None = None
    ) -> Encoder:
        """Return an encoder for a part of the state that ``owner`` stores; None: each rank its own.

        ``of`` is the parameter that the part belongs to: of a DTensor's, only DTensors are the same on other ranks.
        ``flat`` is what FSDP1 left of it.
        """
        plain = self.rank if owner is None or (of is not None and as_dtensor(of) is not None) else owner
        return Encoder(functools.partial(self._keep, plain, owner, flat), self.allow_pickle)

    def _keep(self, plain: int, spread: int | None, flat: FlatShard | None, name: str, tensor: torch.Tensor) -> str:
        unique, number = name, 1
        while unique in self.known:  # two paths may read alike: {"a.b": ...} and {"a": {"b": ...}}
            number += 1
            unique = f"{name}#{number}"
        dtensor = as_dtensor(tensor)
        local = tensor if dtensor is None else local_of(dtensor)
        layout = None if dtensor is None else (dtensor.placements, dtensor.device_mesh, tuple(dtensor.shape))
        cut = None if flat is None else (flat.offset, flat.whole, flat.shape, flat.values.shape)
        in_order = local.layout is torch.strided and lies_in_order(local)
        marks = (type(local), _kind_of(local), in_order, layout, plain, spread, cut, self.updater)
        known = self.memory.known.get(unique)
        if known is None or known.marks != marks:
            known = self._look(unique, tensor, plain, spread, flat, marks)
        self.known[unique] = known
        if known.mine:
            self.tensors[unique] = local
        return known.text

    def _look(
        self,
        name: str,
        tensor: torch.Tensor,
        plain: int,
        spread: int | None,
        flat: FlatShard | None,
        marks: tuple[object, ...],
    ) -> _Known:
        """Look at a tensor closely."""
        local = local_of(tensor)
        check_tensor(name, local)
        entry: dict[str, Json] = {"$": "tensor", "name": name, "rank": plain, "device": local.device.type}
        dtensor = as_dtensor(tensor)
        piece = None
        if dtensor is not None:
            try:
                layout = spread_of(dtensor, rank=self.rank)
            except LayoutError as error:
                raise refused(name, error) from error
            entry["spread"] = self._described(layout)
            holders = replicas_of(layout)
            entry["rank"] = spread if spread in holders else holders[0]
            piece = Piece(layout.shape, tuple(begin for begin, _ in block_of(layout)))
        elif flat is not None and tensor.shape == flat.values.shape:
            entry["flat"] = [flat.offset, flat.whole]
            entry["shape"] = list(flat.shape)
            piece = Piece((flat.whole,), (flat.offset,))
        if piece is not None and piece.global_shape == tuple(local.shape):
            piece = None
        return _Known(marks, to_json(entry), entry["rank"] == self.rank, piece, self.updater)

    def _described(self, layout: Spread) -> dict[str, Json]:
        number = self.memory.meshes.setdefault(layout.mesh, len(self.memory.meshes))
        return {"mesh": number, "placements": list(layout.placements), "shape": list(layout.shape)}


def _model(model: ModelState, keeper: _Keeper, owner_of: dict[str, int], updaters: dict[int, str]) -> str:
    params = {}
    for name, parameter in model.params.items():
        keeper.updater = updaters.get(id(parameter), "")
        encoder = keeper.encoder(owner_of.get(name), parameter, model.flat.get(name))
        params[name] = encoder.on_tensor(f"model.{name}", model.kept(name))
    keeper.updater = ""
    buffers = {
        name: keeper.encoder(owner_of.get(name)).on_tensor(f"model.{name}", tensor)
        for name, tensor in model.buffers.items()
    }
    extras = {
        name: keeper.encoder().encode(f"model.{name}.extra_state", _asked(f"model.{name}", module.get_extra_state))
        for name, module in model.extras.items()
    }
    return object_of(
        {
            "params": object_of(params),
            "buffers": object_of(buffers),
            "tied": to_json(model.tied),
            **({"flattened": _flattened(model)} if model.flattened else {}),
            "extra_state": object_of(extras),
        }
    )


def _flattened(model: ModelState) -> str:
    return to_json(
        {name: [[part.name, list(part.shape), part.begin] for part in parts] for name, parts in model.flattened.items()}
    )


def _optimizer(
    section: str,
    optimizer: torch.optim.Optimizer,
    model: ModelState,
    keeper: _Keeper,
    owner_of: dict[str, int],
) -> str:
    names = optimizer_names(optimizer, model.params)
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        settings = {key: value for key, value in group.items() if key != "params"}
        said = keeper.encoder().encode(f"{section}.groups.{number}", settings)
        groups.append(object_of({"params": to_json([names[id(one)] for one in group["params"]]), "settings": said}))
    mine = owned(optimizer, model.params)
    state = {}
    keeper.updater = section
    for parameter, values in with_state(optimizer).state.items():
        name = names.get(id(parameter))
        if name is None:
            raise UnsupportedLeafError.at(
                f"{section}.state", f"has an entry for {parameter!r:.80}, which is no parameter"
            )
        owner = owner_of.get(name) if mine is None else None
        encoder = keeper.encoder(owner, parameter, model.flat.get(name))
        state[name] = encoder.encode(f"{section}.state.{name}", values)
    keeper.updater = ""
    return object_of({"groups": f"[{','.join(groups)}]", "state": object_of(state), "owned": to_json(mine)})


def _extra(extra: Stateful | MutableMapping[str, Any], keeper: _Keeper) -> str:
    """Return the user's own state: values as they are, those that are Stateful as their state."""
    if not isinstance(extra, MutableMapping):
        return object_of({"whole": keeper.encoder().encode("extra", _asked("extra", extra.state_dict))})
    plain: dict[str, str] = {}
    stateful: dict[str, str] = {}
    for name, value in extra.items():
        if type(name) is not str:
            raise UnsupportedLeafError.at(f"extra[{name!r}]", "the keys of extra must be text")
        part = as_stateful(value)
        if part is not None:
            stateful[name] = keeper.encoder().encode(f"extra.{name}", _asked(f"extra.{name}", part.state_dict))
        else:
            plain[name] = keeper.encoder().encode(f"extra.{name}", value)
    return object_of({"plain": object_of(plain), "stateful": object_of(stateful)})
