"""Stores whose ranks hold given tensors: whole ones, pieces of larger ones, and what each rank has of its own."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from tests.support.logs import uid
from tests.support.stores import JobBuilder, safetensors_image

from toprope.store.objects.protocol import ObjectStore

Array: TypeAlias = "np.ndarray[Any, Any]"

_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A rank's part of a tensor. ``dtype`` is set where numpy has none, ``true_dtype`` where safetensors has not."""

    values: Array
    global_shape: tuple[int, ...] | None = None
    offsets: tuple[int, ...] = ()
    dtype: str = ""
    true_dtype: str = ""


def whole(values: object, dtype: str = "float32") -> Stored:
    return Stored(values=np.asarray(values, dtype=dtype))


def piece(of: Array, *block: tuple[int, int]) -> Stored:
    """The block of a tensor, given by begin and end in each dimension."""
    return Stored(
        values=np.ascontiguousarray(of[tuple(slice(*one) for one in block)]),
        global_shape=of.shape,
        offsets=tuple(begin for begin, _ in block),
    )


def pieces(of: Array, *, ranks: int, along: int = 0) -> list[Stored]:
    """A tensor as it is cut for this many ranks: as torch cuts, so that the last ones may have nothing."""
    extent = of.shape[along]
    each = -(-extent // ranks)
    cuts = [(min(rank * each, extent), min((rank + 1) * each, extent)) for rank in range(ranks)]
    return [piece(of, *(cut if one == along else (0, whole) for one, whole in enumerate(of.shape))) for cut in cuts]


Tensors: TypeAlias = Callable[[int, int], Mapping[str, Stored]]


def image_of(tensors: Mapping[str, Stored], *, step: int, rank: int, world: int, number: int, job_uid: str) -> bytes:
    """The shard image of a rank with these tensors."""
    document = json.dumps({"step": step, "rank": rank}).encode()
    metadata = {
        "format": "1", "job_uid": job_uid, "attempt": str(number), "attempt_uid": uid(number), "step": str(step),
        "rank": str(rank), "world": str(world), "document": "__document__",
    }  # fmt: skip
    entries = {}
    for name, stored in sorted(tensors.items(), key=lambda item: -item[1].values.dtype.itemsize):
        dtype = stored.dtype or _DTYPES[stored.values.dtype.name]
        entries[name] = (dtype, list(stored.values.shape), stored.values.tobytes())
        if stored.true_dtype:
            metadata[f"dtype:{name}"] = stored.true_dtype
        if stored.global_shape is not None and stored.global_shape != stored.values.shape:
            lies = {"global_shape": list(stored.global_shape), "offsets": list(stored.offsets)}
            metadata[f"piece:{name}"] = json.dumps(lies)
    entries["__document__"] = ("U8", [len(document)], document)
    return safetensors_image(entries, metadata)


def tensor_job(
    store: ObjectStore,
    tensors: Tensors,
    *,
    world: int,
    steps: tuple[int, ...] = (10,),
    name: str = "job",
    spec: Mapping[str, Any] | None = None,
) -> JobBuilder:
    """Put a job into a store, whose ranks hold ``tensors(step, rank)`` at each of these READY steps."""

    def image(*, step: int, rank: int, world: int, number: int, job_uid: str) -> bytes:
        return image_of(tensors(step, rank), step=step, rank=rank, world=world, number=number, job_uid=job_uid)

    body = json.dumps(spec or {"model": {"params": {}}}).encode()
    builder = JobBuilder(store, name, world, image=image, spec=body).begin()
    for step in steps:
        builder.checkpoint(step)
    return builder


def bfloat16(values: object) -> Stored:
    """Values as bfloat16, of which float32 has the first half."""
    bits = np.asarray(values, dtype="float32").view("uint32") >> 16
    return Stored(values=bits.astype("uint16"), dtype="BF16")


def complex128(values: object) -> Stored:
    """Values of a dtype that safetensors lacks, as the bytes of each element."""
    array = np.asarray(values, dtype="complex128")
    return Stored(values=array.view("uint8").reshape(*array.shape, 16), true_dtype="complex128")


def read_plainly(body: bytes) -> dict[str, tuple[str, list[int], bytes]]:
    """The tensors of a safetensors file: dtype, shape and bytes."""
    (length,) = struct.unpack_from("<Q", body)
    header = json.loads(body[8 : 8 + length])
    header.pop("__metadata__")
    data = body[8 + length :]
    return {
        name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])]) for name, entry in header.items()
    }
