"""What PyTorch wrote, as tensors on their way into a store. Nothing is unpickled freely: only with ``weights_only``."""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from toprope.store.checkpoint import leaves
from toprope.store.checkpoint.whole import Box, common
from toprope.store.errors import CorruptObjectError, UsageError
from toprope.store.transfer.dcp_metadata import Chunk, DcpTensor, DcpValue
from toprope.store.transfer.incoming import Incoming, Source
from toprope.store.transfer.torch_formats.tensors import copy_bytes, dtype_named, stored_as

MAX_DEPTH = 64


def torch_source(path: Path) -> Source:
    """Return what a file of ``torch.save`` holds: tensors in nested dicts and lists, by dotted names.

    Raises:
        CorruptObjectError: it is damaged, or holds more than tensors and plain values.
        UsageError: it holds no dict.
    """
    loaded = _loaded(path, name=str(path))
    if not isinstance(loaded, dict):
        raise UsageError(f"{path}: holds a {type(loaded).__qualname__}; only a dict of names is taken")
    tensors, values, left_out = [], {}, []
    for name, leaf in _leaves("", loaded, 0):
        if isinstance(leaf, torch.Tensor):
            tensors.append(_incoming(name, leaf))
        else:
            try:
                values[name] = leaves.encode(leaf)
            except leaves.NotPlainError:
                left_out.append(name)
    return Source(kind="torch", tensors=tuple(tensors), values=values, left_out=tuple(left_out))


def dcp_source(directory: Path, tensors: Sequence[DcpTensor], values: Sequence[DcpValue]) -> Source:
    """Return what a DCP directory holds; blocks are read when they are wanted, one at a time.

    Raises:
        CorruptObjectError: a tensor's blocks don't make up all of it, or this torch lacks its dtype.
    """
    incoming = []
    for tensor in tensors:
        if why := _untiled(tensor):
            raise CorruptObjectError(f"{directory}: tensor {tensor.name!r}: {why}")
        dtype, shape, true_dtype = stored_as(dtype_named(tensor.dtype), tensor.shape)
        fill = functools.partial(_fill, directory, tensor)
        incoming.append(Incoming(name=tensor.name, dtype=dtype, shape=shape, true_dtype=true_dtype, fill=fill))
    plain, left_out = {}, []
    for value in values:
        try:
            plain[value.name] = leaves.encode(_value(directory, value))
        except (leaves.NotPlainError, CorruptObjectError):
            left_out.append(value.name)
    return Source(kind="dcp", tensors=tuple(incoming), values=plain, left_out=tuple(left_out))


def _incoming(name: str, tensor: torch.Tensor) -> Incoming:
    dtype, shape, true_dtype = stored_as(tensor.dtype, tuple(tensor.shape))
    fill = functools.partial(_copy, tensor, name)
    return Incoming(name=name, dtype=dtype, shape=shape, true_dtype=true_dtype, fill=fill)


def _copy(tensor: torch.Tensor, name: str, view: memoryview) -> None:
    copy_bytes(tensor, view, name=name)


def _leaves(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - what a file holds
    """Yield what is in nested dicts and lists by dotted names; a collection without a tensor in it is one value."""
    if depth > MAX_DEPTH:
        raise UsageError(f"{name[:200]}: nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, dict) and all(isinstance(key, str | int) for key in value) and _is_tree(value):
        for key, item in value.items():
            yield from _leaves(f"{name}.{key}" if name else str(key), item, depth + 1)
    elif isinstance(value, list | tuple) and _holds_tensors(value, 0):
        for number, item in enumerate(value):
            yield from _leaves(f"{name}.{number}", item, depth + 1)
    else:
        yield name, value


def _is_tree(value: dict[Any, Any]) -> bool:
    return bool(value) and all(key != "" for key in value)


def _holds_tensors(value: Any, depth: int) -> bool:  # noqa: ANN401 - what a file holds
    if isinstance(value, torch.Tensor | dict):
        return True
    return (
        isinstance(value, list | tuple) and depth < MAX_DEPTH and any(_holds_tensors(one, depth + 1) for one in value)
    )


def _loaded(file: Path | io.BytesIO, *, name: str) -> Any:  # noqa: ANN401 - what a file holds
    """Return what ``torch.save`` wrote, as far as it is tensors and plain values.

    Raises:
        CorruptObjectError: it is damaged, or would have to be unpickled freely.
    """
    try:
        return torch.load(file, weights_only=True, map_location="cpu", mmap=isinstance(file, Path))
    except OSError:
        raise
    except Exception as error:
        why = " ".join(str(error).split())[:160]
        raise CorruptObjectError(
            f"{name}: can't be read with weights_only=True, and nothing is unpickled otherwise: {why}"
        ) from error


def _fill(directory: Path, tensor: DcpTensor, view: memoryview) -> None:
    if not len(view):
        return
    dtype = dtype_named(tensor.dtype)
    whole = torch.frombuffer(view, dtype=torch.uint8).view(dtype).reshape(tensor.shape)
    for chunk in tensor.chunks:
        block = _loaded(io.BytesIO(_part(directory, chunk)), name=f"{directory / chunk.file}, tensor {tensor.name}")
        if not isinstance(block, torch.Tensor) or block.dtype != dtype or tuple(block.shape) != chunk.sizes:
            raise CorruptObjectError(f"{directory / chunk.file}: a block of tensor {tensor.name!r} is of another form")
        into = whole[tuple(slice(begin, end) for begin, end in _box(chunk))]
        if dtype.itemsize == 1:
            into, block = into.view(torch.uint8), block.contiguous().view(torch.uint8)
        into.copy_(block)


def _part(directory: Path, part: Chunk | DcpValue) -> bytes:
    with (directory / part.file).open("rb") as file:
        file.seek(part.begin)
        body = file.read(part.bytes)
    if len(body) != part.bytes:
        raise CorruptObjectError(f"{directory / part.file}: ends at byte {part.begin + len(body)}")
    return body


def _value(directory: Path, value: DcpValue) -> Any:  # noqa: ANN401 - what a file holds
    return _loaded(io.BytesIO(_part(directory, value)), name=f"{directory / value.file}, {value.name}")


def _box(chunk: Chunk) -> Box:
    return tuple((begin, begin + size) for begin, size in zip(chunk.offsets, chunk.sizes, strict=True))


def _untiled(tensor: DcpTensor) -> str | None:
    """Return why the blocks of a tensor don't make up all of it exactly once, or None if they do."""
    for chunk in tensor.chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(tensor.shape) or not all(
            end <= extent for (_, end), extent in zip(_box(chunk), tensor.shape, strict=True)
        ):
            return f"a block does not lie inside {list(tensor.shape)}"
    boxes = sorted(_box(chunk) for chunk in tensor.chunks if 0 not in chunk.sizes)
    have, want = sum(math.prod(end - begin for begin, end in box) for box in boxes), math.prod(tensor.shape)
    if have != want:
        return f"its blocks have {have} of its {want} elements"
    active: list[Box] = []
    for box in boxes:
        active = [other for other in active if not box or other[0][1] > box[0][0]]
        if any(common(box, other) is not None for other in active):
            return "its blocks overlap"
        active.append(box)
    return None
