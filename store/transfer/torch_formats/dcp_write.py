"""A PyTorch DCP directory, written tensor by tensor through torch's own ``FileSystemWriter``.

Tensors are cut into blocks, and files hold so many of them that what is in memory at a time stays small: torch's
writer keeps all of a file until it is written.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from toprope.store.checkpoint.whole import Band, bands
from toprope.store.transfer.outgoing import Outgoing
from toprope.store.transfer.torch_formats.tensors import dtype_of, tensor_from

BLOCK_BYTES = 64 * 1024 * 1024
FILE_BYTES = 256 * 1024 * 1024
_STATE = re.compile(r"(optimizer(?:\.[A-Za-z0-9_-]+)?)\.state\.(.+)\.([^.]+)")
_GROUP = re.compile(r"(optimizer(?:\.[A-Za-z0-9_-]+)?)\.param_groups\.([0-9]+)\.(.+)")


def write(directory: Path, tensors: Sequence[Outgoing], values: Mapping[str, object]) -> None:
    """Write a DCP checkpoint of these tensors and values into an empty directory.

    Raises:
        CorruptObjectError: what is read of a tensor is damaged, or this torch lacks its dtype.
    """
    writer = _Writer(directory, single_file_per_rank=True, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(True)
    planner = _Planner(tensors, values)
    plans = writer.prepare_global_plan([writer.prepare_local_plan(SavePlan(items)) for items in planner.files()])
    results = []
    for plan in plans:
        written = writer.write_data(plan, planner)
        written.wait()
        results.append(written.value())
    writer.finish(planner.metadata(), results)


def path_of(name: str) -> tuple[str | int, ...]:
    """Return where a value lies in nested dicts as PyTorch's ``get_state_dict`` would have them."""
    if name.startswith("model.") and name != "model.":
        return "model", name.removeprefix("model.")
    if match := _STATE.fullmatch(name):
        return match[1], "state", match[2], match[3]
    if match := _GROUP.fullmatch(name):
        return match[1], "param_groups", int(match[2]), match[3]
    return (name,)


class _Writer(FileSystemWriter):
    def storage_meta(self) -> StorageMeta:
        """Return what the directory says of itself: not where it was while it was written."""
        return StorageMeta(save_id=self.save_id)


class _Planner(SavePlanner):
    """Says what goes into which file, and hands out the blocks, each tensor's from the first to the last."""

    def __init__(self, tensors: Sequence[Outgoing], values: Mapping[str, object]) -> None:
        self._tensors = {one.name: one for one in tensors}
        self._values = values
        self._blocks = {one.name: tuple(_blocks(one)) for one in tensors}
        self._reading: dict[str, Iterator[torch.Tensor]] = {}

    def files(self) -> Iterator[list[WriteItem]]:
        """Yield what each file is to hold."""
        items = [self._value_item(name) for name in self._values]
        size = 0
        for name, tensor in self._tensors.items():
            for number, block in enumerate(self._blocks[name]):
                size += block.end - block.begin
                if items and size > FILE_BYTES:
                    yield items
                    items, size = [], block.end - block.begin
                items.append(self._block_item(tensor, number, block))
        yield items

    def metadata(self) -> Metadata:
        """Return what the directory says of its tensors and values."""
        described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
            name: TensorStorageMetadata(
                properties=_properties(tensor),
                size=torch.Size(tensor.shape),
                chunks=[_chunk(block) for block in self._blocks[name]],
            )
            for name, tensor in self._tensors.items()
        }
        described |= {name: BytesStorageMetadata() for name in self._values}
        return Metadata(state_dict_metadata=described, planner_data={name: path_of(name) for name in described})

    def _value_item(self, name: str) -> WriteItem:
        return WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO)

    def _block_item(self, tensor: Outgoing, number: int, block: Band) -> WriteItem:
        chunk = _chunk(block)
        return WriteItem(
            index=MetadataIndex(tensor.name, chunk.offsets, number),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=_properties(tensor), size=torch.Size(tensor.shape)),
        )

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return what an item holds: the next block of its tensor, or a value as ``torch.save`` writes it."""
        name = write_item.index.fqn
        if write_item.type is WriteItemType.BYTE_IO:
            body = io.BytesIO()
            torch.save(self._values[name], body)
            return body
        if name not in self._reading:
            self._reading[name] = self._read(self._tensors[name])
        return next(self._reading[name])

    def _read(self, tensor: Outgoing) -> Iterator[torch.Tensor]:
        dtype, blocks, body = dtype_of(tensor.dtype, tensor.true_dtype), self._blocks[tensor.name], bytearray()
        chunks = tensor.read()
        for number, block in enumerate(blocks, start=1):
            size = block.end - block.begin
            while len(body) < size:
                body += next(chunks)
            if number == len(blocks):
                rest = b"".join(chunks)  # only a tensor that was read to its end is known to be what was stored
                assert not rest, f"{tensor.name} has {len(rest)} bytes too many"
            yield tensor_from(bytes(body[:size]), dtype, tuple(end - begin for begin, end in block.box))
            del body[:size]

    def set_up_planner(self, *_args: Any, **_kwargs: Any) -> None:  # noqa: ANN401 - as torch has it
        """Nothing: all is known from the start."""

    def create_local_plan(self) -> SavePlan:
        """Return all items in one plan."""
        return SavePlan([item for items in self.files() for item in items])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the plans as they are."""
        return all_plans, self.metadata()

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return new_plan


def _blocks(tensor: Outgoing) -> Iterator[Band]:
    """Yield the blocks of a tensor; one without elements has one block."""
    item_bytes = dtype_of(tensor.dtype, tensor.true_dtype).itemsize
    if 0 in tensor.shape:
        yield Band(begin=0, end=0, box=tuple((0, extent) for extent in tensor.shape))
    yield from bands(tensor.shape, item_bytes=item_bytes, limit=BLOCK_BYTES)


def _properties(tensor: Outgoing) -> TensorProperties:
    return TensorProperties(dtype=dtype_of(tensor.dtype, tensor.true_dtype))


def _chunk(block: Band) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(
        offsets=torch.Size(begin for begin, _ in block.box), sizes=torch.Size(end - begin for begin, end in block.box)
    )
