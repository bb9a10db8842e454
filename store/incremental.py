"""Incremental shards: which tensors of an image need not be stored again, and the file of those that do. Pure.

A tensor is not stored again if the *base*, the newest READY, has it: same name, dtype, place and digest. A file of
which under a quarter would still be named is left behind: what was named of it is stored anew, so that what a
checkpoint keeps alive stays near what it needs.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from toprope.store.digest import Hasher
from toprope.store.manifest import MAX_FILES, File, Head, Index, Tensor
from toprope.store.shard import FORMAT, HashedImage, header_length, parse_header

HEAD = "__head__"
"""The byte tensor of a part file that holds the head of the image."""
PART_FORMAT = "2"
_ALIGNED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What a new index may point into: that of the same rank in READY ``seq``."""

    seq: int
    index: Index


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFile:
    """A file of those tensors of an image that are new, as pieces to be written one after the other."""

    pieces: tuple[bytes | memoryview, ...]
    bytes: int
    places: dict[str, tuple[int, int]]


def kept_tensors(whole: Index, base: Index) -> dict[str, Tensor]:
    """Return the tensors of ``base``, by name, that the image of the index ``whole`` has too and can point to."""
    wanted = {_content(tensor) for tensor in whole.tensors}
    same = [tensor for tensor in base.tensors if _content(tensor) in wanted]
    named_bytes = [0] * len(base.files)
    for tensor in same:
        named_bytes[tensor.file] += tensor.end - tensor.begin
    by_use = sorted(range(len(base.files)), key=lambda number: (-named_bytes[number], number))
    worth = {
        number
        for number in by_use[: MAX_FILES - 1]
        if named_bytes[number] > 0 and 4 * named_bytes[number] >= base.files[number].bytes
    }
    if any(tensor.name == HEAD for tensor in whole.tensors):
        return {}
    return {tensor.name: tensor for tensor in same if tensor.file in worth}


def _content(tensor: Tensor) -> tuple[object, ...]:
    return tensor.name, tensor.dtype, tensor.shape, tensor.global_shape, tensor.offsets, tensor.digest


def _place(index: Index, tensor: Tensor) -> tuple[object, ...]:
    return index.files[tensor.file], tensor.begin, tensor.end, *_content(tensor)


def part_file(image: memoryview, hashed: HashedImage, *, kept: Iterable[str]) -> PartFile:
    """Return the file of an image's head and of its tensors but those that are ``kept`` elsewhere."""
    left_out = set(kept)
    new = [extent for extent in hashed.header.extents if extent.name not in left_out]
    header: dict[str, Any] = {"__metadata__": _metadata(hashed.header.metadata)}
    at = 0
    for extent in new:
        end = at + extent.end - extent.begin
        header[extent.name] = {"dtype": extent.dtype, "shape": list(extent.shape), "data_offsets": [at, end]}
        at = end
    end = at + hashed.header.bytes
    header[HEAD] = {"dtype": "U8", "shape": [hashed.header.bytes], "data_offsets": [at, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    length = -(-(8 + len(text)) // _ALIGNED) * _ALIGNED - 8
    first = struct.pack("<Q", length) + text.ljust(length)
    places = {
        name: (len(first) + entry["data_offsets"][0], len(first) + entry["data_offsets"][1])
        for name, entry in header.items()
        if name != "__metadata__"
    }
    pieces: tuple[bytes | memoryview, ...] = (
        first,
        *(image[extent.begin : extent.end] for extent in new),
        image[: hashed.header.bytes],
    )
    return PartFile(pieces=pieces, bytes=len(first) + end, places=places)


def _metadata(image: dict[str, str]) -> dict[str, str]:
    kept = ("job_uid", "attempt", "attempt_uid", "step", "rank", "world")
    return {"format": PART_FORMAT, "image_format": FORMAT, "head": HEAD} | {name: image[name] for name in kept}


def checked_digest(body: memoryview, part: PartFile, whole: Index) -> str | None:
    """Return the digest of a part file as it was written; None if a tensor in it is not the one of the image."""
    size = len(body)
    header = parse_header(body[: header_length(body, size=size, name="part")], size=size, name="part")
    digests = {tensor.name: tensor.digest for tensor in whole.tensors} | {HEAD: whole.head.digest}
    file = Hasher()
    file.update(body[: header.bytes])
    for extent in header.extents:
        own = Hasher()
        for hasher in (own, file):
            hasher.update(body[extent.begin : extent.end])
        if own.hexdigest() != digests[extent.name] or part.places[extent.name] != (extent.begin, extent.end):
            return None
    return file.hexdigest()


def index_of_parts(whole: Index, base: Base, *, kept: dict[str, Tensor], part: PartFile, file: File) -> Index:
    """Return the index of an image of which ``file`` holds what is new, and the files of ``base`` the rest."""
    numbers = sorted({tensor.file for tensor in kept.values()})
    renumbered = {number: at for at, number in enumerate(numbers, start=1)}
    return msgspec.structs.replace(
        whole,
        base=base.seq,
        head=Head(file=0, begin=part.places[HEAD][0], end=part.places[HEAD][1], digest=whole.head.digest),
        files=(file, *(base.index.files[number] for number in numbers)),
        tensors=tuple(
            msgspec.structs.replace(kept[tensor.name], file=renumbered[kept[tensor.name].file])
            if tensor.name in kept
            else msgspec.structs.replace(tensor, begin=part.places[tensor.name][0], end=part.places[tensor.name][1])
            for tensor in whole.tensors
        ),
    )


def unfounded(index: Index, base: Index | None) -> str | None:
    """Return what an index names of older files that its base does not name just so; None if there is nothing."""
    if len(index.files) > 1 and base is None:
        return f"it names {len(index.files)} files and no base"
    founded = (
        set() if base is None else {(base.files[one.file], _content(one), one.begin, one.end) for one in base.tensors}
    )
    if index.head.file != 0:
        return "its header is not in its own file"
    for one in index.tensors:
        if one.file > 0 and (index.files[one.file], _content(one), one.begin, one.end) not in founded:
            return f"its base does not have tensor {one.name[:80]!r} in {index.files[one.file].key}"
    return None
