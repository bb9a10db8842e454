"""One file of ``torch.save``, a dict by dotted names; it loads with ``weights_only=True``."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO

import torch

from toprope.store.transfer.outgoing import Outgoing
from toprope.store.transfer.torch_formats.tensors import dtype_of

ALIGNED = 16  # torch crashes on a complex128 that lies elsewhere


def write(file: BinaryIO, scratch: BinaryIO, tensors: Sequence[Outgoing], values: Mapping[str, object]) -> None:
    """Write tensors and values as a dict. The tensors go through ``scratch``, so that they need not be in memory.

    Raises:
        CorruptObjectError: what is read of a tensor is damaged, or this torch lacks its dtype.
    """
    places = [_spooled(scratch, one) for one in tensors]
    scratch.flush()
    if scratch.tell() == 0:
        torch.save({one.name: _empty(one) for one in tensors} | dict(values), file)
        return
    with mmap.mmap(scratch.fileno(), scratch.tell(), access=mmap.ACCESS_COPY) as pages:
        torch.save(dict(_mapped(pages, tensors, places)) | dict(values), file)


def _spooled(scratch: BinaryIO, tensor: Outgoing) -> tuple[int, int]:
    scratch.write(bytes(-scratch.tell() % ALIGNED))
    begin = scratch.tell()
    scratch.writelines(tensor.read())
    return begin, scratch.tell()


def _mapped(
    pages: mmap.mmap, tensors: Sequence[Outgoing], places: Sequence[tuple[int, int]]
) -> Iterator[tuple[str, torch.Tensor]]:
    for tensor, (begin, end) in zip(tensors, places, strict=True):
        if begin == end:
            yield tensor.name, _empty(tensor)
        else:
            raw = torch.frombuffer(pages, dtype=torch.uint8, offset=begin, count=end - begin)
            yield tensor.name, raw.view(dtype_of(tensor.dtype, tensor.true_dtype)).reshape(tensor.shape)


def _empty(tensor: Outgoing) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=dtype_of(tensor.dtype, tensor.true_dtype))
