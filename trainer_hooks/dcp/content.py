"""What a save plan of ``torch.distributed.checkpoint`` comes to in a shard, and what shards come to in its metadata.

Tensors keep the names that torch gives them. What is not a tensor is typed JSON in the document, under ``values``: no
pickled byte is stored, and so none is ever unpickled, unless both ends say ``allow_pickle``.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeGuard

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from toprope.trainer_hooks.capture.state import FORMAT, Snapshot
from toprope.trainer_hooks.errors import StateMismatchError, UnsupportedLeafError
from toprope.trainer_hooks.image import opaque
from toprope.trainer_hooks.image.shard import DOCUMENT, Image, Piece, check_tensor
from toprope.trainer_hooks.image.tree import Decoder, Encoder, Json, object_of, to_json
from toprope.trainer_hooks.launch import World
from toprope.trainer_hooks.restore.blocks import Block
from toprope.trainer_hooks.restore.reader import ShardReader, Stored, Whole

VALUES = "values"
"""The part of a document that holds what is not a tensor, by name."""


@dataclass(slots=True)
class _Content:
    world: World
    allow_pickle: bool
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    pieces: dict[str, Piece] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    """As the text of their JSON."""
    renamed: dict[str, str] = field(default_factory=dict)

    def add_tensor(self, item: WriteItem, tensor: torch.Tensor) -> None:
        assert item.tensor_data is not None
        chunk, whole = item.tensor_data.chunk, tuple(item.tensor_data.size)
        if tuple(tensor.shape) != tuple(chunk.sizes):
            raise UnsupportedLeafError.at(
                item.index.fqn, f"planned with shape {tuple(chunk.sizes)}, and it has {tuple(tensor.shape)}"
            )
        name = self._keep(item.index.fqn, tensor)
        if name != item.index.fqn:
            self.renamed[name] = item.index.fqn
        if whole != tuple(tensor.shape):
            self.pieces[name] = Piece(whole, tuple(chunk.offsets))

    def _keep(self, name: str, tensor: torch.Tensor) -> str:
        tensor = tensor.detach()
        check_tensor(name, tensor)
        unique, number = name, 1
        while unique in self.tensors or unique == DOCUMENT:
            number += 1
            unique = f"{name}#{number}"
        self.tensors[unique] = tensor
        return unique

    def add_value(self, name: str, value: object) -> None:
        self.values[name] = Encoder(self._inner, self.allow_pickle).encode(name, value)

    def add_bytes(self, name: str, body: bytes) -> None:
        refusal = UnsupportedLeafError.at(
            name, "bytes of a planner of your own, which may be pickled; say allow_pickle=True to keep them"
        )
        if not self.allow_pickle:
            raise refusal
        self.values[name] = to_json({"$": "planned", "v": opaque.pickled(body, refusal)})

    def _inner(self, name: str, tensor: torch.Tensor) -> str:
        """Set apart a tensor within a value; it is no tensor of the state by itself."""
        stored = self._keep(name, tensor)
        self.renamed[stored] = ""
        return to_json({"$": "tensor", "name": stored, "rank": self.world.rank, "device": tensor.device.type})


def snapshot_of(plan: SavePlan, planner: SavePlanner, world: World, *, allow_pickle: bool) -> Snapshot:
    """Return what this rank is to store: the items of its plan.

    Raises:
        UnsupportedLeafError: one can't be kept; the message names it.
    """
    content = _Content(world, allow_pickle)
    for item in plan.items:
        if item.type is not WriteItemType.BYTE_IO:
            found = planner.resolve_data(item)
            assert isinstance(found, torch.Tensor)
            content.add_tensor(item, found)
        elif _gives_values(planner):
            content.add_value(item.index.fqn, planner.lookup_object(item.index))
        else:
            found = planner.resolve_data(item)
            assert isinstance(found, io.BytesIO)
            content.add_bytes(item.index.fqn, found.getvalue())
    document = {
        "format": to_json(FORMAT),
        "world": to_json(world.size),
        VALUES: object_of(content.values),
        "renamed": to_json(content.renamed),
        "paths": to_json(_paths(plan)),
    }
    return Snapshot(object_of(document).encode(), content.tensors, content.pieces)


def _gives_values(planner: SavePlanner) -> TypeGuard[DefaultSavePlanner]:
    """Say whether a planner does with what is not a tensor what torch's own does, which is to pickle it."""
    return isinstance(planner, DefaultSavePlanner) and all(
        getattr(type(planner), name) is getattr(DefaultSavePlanner, name)
        for name in ("resolve_data", "transform_object")
    )


def _paths(plan: SavePlan) -> dict[str, list[str | int]]:
    """Return where in the nested state each item lies, as torch's planner says it in its own data."""
    mappings = plan.planner_data if isinstance(plan.planner_data, dict) else {}
    names = {item.index.fqn for item in plan.items}
    return {name: list(mappings[name]) for name in sorted(names & set(mappings))}


@dataclass(slots=True)
class Contents:
    """What the shards of all ranks hold together."""

    wholes: dict[str, Whole] = field(default_factory=dict)
    values: dict[str, Json] = field(default_factory=dict)
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)

    def metadata(self) -> Metadata:
        """Return it as torch's planners want to know it."""
        found = ShardReader(self.wholes, _nothing).metadata
        found.state_dict_metadata.update(dict.fromkeys(self.values, BytesStorageMetadata()))
        found.planner_data, found.storage_meta = dict(self.paths), StorageMeta()
        return found


def _nothing(rank: int, name: str) -> torch.Tensor:
    raise AssertionError(f"{name} of rank {rank} is only planned for")


def contents_of(shards: Mapping[int, Image]) -> Contents:
    """Return what these shards hold.

    Raises:
        StateMismatchError: one says it in a way that can't be read, or two ranks stored different forms of a tensor.
    """
    contents = Contents()
    for rank in sorted(shards):
        shard = shards[rank]
        document = shard.document()
        if not isinstance(document, dict) or document.get("format") != FORMAT or VALUES not in document:
            raise StateMismatchError(
                f"the shard of rank {rank} was not saved with torch.distributed.checkpoint, or by another version"
            )
        for name, value in document[VALUES].items():
            contents.values.setdefault(name, value)
        contents.paths.update({name: tuple(path) for name, path in document["paths"].items()})
        for name in shard.extents:
            key = document["renamed"].get(name, name)
            if name != DOCUMENT and key:
                _add(contents.wholes, key, shard, rank, name)
    return contents


def _add(wholes: dict[str, Whole], key: str, shard: Image, rank: int, name: str) -> None:
    extent, piece = shard.extents[name], shard.piece(name)
    block = Block(piece.offsets, extent.shape)
    known = wholes.get(key, Whole(extent.dtype, piece.global_shape, ()))
    if (known.dtype, known.shape) != (extent.dtype, piece.global_shape):
        raise StateMismatchError(
            f"{key}: {extent.dtype} {piece.global_shape} on rank {rank} of the checkpoint, and {known.dtype} "
            f"{known.shape} on another"
        )
    if any(block in stored.blocks for stored in known.stored):
        return  # replicas that the planner let several ranks store
    wholes[key] = Whole(known.dtype, known.shape, (*known.stored, Stored(rank, name, (block,))))


def inner_tensors(value: Json) -> dict[int, set[str]]:
    """Return by rank the tensors that lie within a value."""
    found: dict[int, set[str]] = {}
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, list):
            pending.extend(item)
        elif isinstance(item, dict) and item.get("$") == "tensor":
            found.setdefault(item["rank"], set()).add(item["name"])
        elif isinstance(item, dict):
            pending.extend(item.values())
    return found


def stream_of(name: str, value: Json, shards: Mapping[int, Image], *, allow_pickle: bool) -> io.BytesIO:
    """Return a value as a planner takes it: pickled, here and now, from what is no pickle.

    Raises:
        StateMismatchError: it can't be read, or it was pickled when it was saved and that is not allowed here.
    """
    on_pickle = opaque.unpickle if allow_pickle else None
    decoder = Decoder(lambda entry: shards[entry["rank"]].tensor(entry["name"]).clone(), on_pickle)
    if isinstance(value, dict) and value.get("$") == "planned":
        return io.BytesIO(decoder.decode(value["v"], name))
    stream = io.BytesIO()
    torch.save(decoder.decode(value, name), stream)
    stream.seek(0)
    return stream
