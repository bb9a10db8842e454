"""A ``StorageReader`` of ``torch.distributed.checkpoint`` over the shards of a checkpoint.

Torch's own load planner finds which part of which shard goes where; here stands what it needs to know of our shards,
and the copying. Nothing is unpickled. Loads ``torch.distributed.checkpoint``, which takes its time: import it late.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from toprope.trainer_hooks.restore.blocks import Block, gap_in


@dataclass(frozen=True, slots=True)
class Stored:
    """What a rank stored of a tensor: under which name in its shard, and the blocks that it consists of."""

    rank: int
    name: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor of the checkpoint, and who stored which part of it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stored: tuple[Stored, ...]


@dataclass(frozen=True, slots=True)
class Target:
    """What this rank is to hold of a tensor of this global ``shape``: contiguous ``values``, made up of ``blocks``."""

    shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    values: torch.Tensor

    def size(self) -> torch.Size:
        """Return the global shape, as the planner asks for it."""
        return torch.Size(self.shape)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the blocks, as the planner asks for them."""
        return [_chunk(block) for block in self.blocks]

    def block(self, index: MetadataIndex) -> torch.Tensor:
        """Return the values of the block that the planner means."""
        assert index.index is not None
        return _view(self.values, self.blocks[index.index])


class BlockPlanner(DefaultLoadPlanner):
    """Torch's planner for targets that are blocks."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> None:
        """Take the targets by key."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return where values go."""
        target = self.state_dict[index.fqn]
        assert isinstance(target, Target)
        return target.block(index)


class ShardReader(StorageReader):
    """Reads ``wholes`` by key; ``tensor(rank, name)`` returns a tensor of a rank's shard, verified."""

    def __init__(self, wholes: Mapping[str, Whole], tensor: Callable[[int, str], torch.Tensor]) -> None:
        self._wholes = wholes
        self._tensor = tensor
        self._parts = {
            key: [(stored, block) for stored in whole.stored for block in stored.blocks if block.count]
            for key, whole in wholes.items()
        }
        self.metadata = Metadata(
            state_dict_metadata={
                key: TensorStorageMetadata(
                    properties=TensorProperties(dtype=whole.dtype),
                    size=torch.Size(whole.shape),
                    chunks=[_chunk(block) for _, block in self._parts[key]],
                )
                for key, whole in wholes.items()
            }
        )

    # As torch calls it

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: the shards are given."""

    def read_metadata(self, *_args: object, **_more: object) -> Metadata:
        """Return what there is to read."""
        return self.metadata

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,  # noqa: FBT001 - torch's signature
        *_args: object,
        **_more: object,
    ) -> None:
        """Do nothing: what there is to read is known."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what the plan names to where the planner wants it."""
        with torch.no_grad():
            for item in plan.items:
                stored, block = self._part(item)
                values = _narrowed(_view(self._tensor(stored.rank, stored.name), block), item)
                target = planner.resolve_tensor(item).detach()
                _copy(target, values)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003 - torch's signature
        """Refuse every id: the shards are given."""
        return False

    # As a restore calls it

    def plan(self, key: str, target: Target) -> LoadPlan:
        """Return what torch's planner reads for a target.

        Raises:
            ValueError: there is no tensor of this key and shape, or shards do not hold each element of it once.
        """
        planner = BlockPlanner()
        planner.set_up_planner({key: target}, self.metadata)
        plan = planner.create_local_plan()
        for number, block in enumerate(target.blocks):
            read = [
                Block(tuple(item.dest_offsets), tuple(item.lengths))
                for item in plan.items
                if item.dest_index.index == number
            ]
            problem = gap_in(block, read)
            if problem is not None:
                raise ValueError(problem)
        return plan

    def used(self, plan: LoadPlan) -> Iterable[tuple[int, str]]:
        """Yield rank and name of each stored tensor that a plan reads."""
        for item in plan.items:
            stored, _ = self._part(item)
            yield stored.rank, stored.name

    def fill(self, key: str, target: Target) -> torch.Tensor:
        """Return the target's values, read."""
        planner = BlockPlanner()
        planner.set_up_planner({key: target}, self.metadata)
        self.read_data(planner.create_local_plan(), planner)
        return target.values

    def _part(self, item: ReadItem) -> tuple[Stored, Block]:
        index = item.storage_index.index
        assert index is not None
        return self._parts[item.storage_index.fqn][index]


def _chunk(block: Block) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(block.offsets), sizes=torch.Size(block.sizes))


def _view(values: torch.Tensor, block: Block) -> torch.Tensor:
    return values.reshape(-1)[block.begin : block.begin + block.count].view(block.sizes)


def _narrowed(values: torch.Tensor, item: ReadItem) -> torch.Tensor:
    for dimension, (begin, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        values = values.narrow(dimension, begin, length)
    return values


def _copy(target: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values; float4 and such, which torch can't copy, go as bytes."""
    if target.dtype is values.dtype and target.dtype.itemsize == 1:
        target, values = target.view(torch.uint8), values.view(torch.uint8)
    target.copy_(values)
