"""Incremental shards: which tensors of an image need not be stored again, and the file of those that do. Pure.

A tensor is not stored again if the *base*, the newest READY, has it: same name, dtype, place and digest; nor if
another rank of the node stores it for the same step. A file of which under a quarter would still be named is left
behind: what was named of it is stored anew, so that what a checkpoint keeps alive stays near what it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from toprope.store.checkpoint.header import Written, header_bytes
from toprope.store.checkpoint.manifest import MAX_FILES, File, Head, Index, Tensor
from toprope.store.checkpoint.shard import FORMAT, HashedImage, header_length, parse_header
from toprope.store.digest import Hasher

HEAD = "__head__"
"""The byte tensor of a part file that holds the head of the image."""
PART_FORMAT = "2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What a new index may point into: that of the same rank in READY ``seq``."""

    seq: int
    index: Index


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A tensor, and the file in which it lies."""

    file: File
    tensor: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFile:
    """A file of those tensors of an image that are new, as pieces to be written one after the other."""

    pieces: tuple[bytes | memoryview, ...]
    bytes: int
    places: dict[str, tuple[int, int]]


def kept_tensors(whole: Index, base: Index) -> dict[str, Tensor]:
    """Return the tensors of ``base``, by name, that the image of the index ``whole`` has too and can point to."""
    wanted = {content_of(tensor) for tensor in whole.tensors}
    same = [tensor for tensor in base.tensors if content_of(tensor) in wanted]
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


Content: TypeAlias = tuple[object, ...]


def content_of(tensor: Tensor) -> Content:
    """Return what makes two tensors one: name, dtype, place in the whole and digest."""
    return tensor.name, tensor.dtype, tensor.shape, tensor.global_shape, tensor.offsets, tensor.digest


def _place(index: Index, tensor: Tensor) -> Content:
    return index.files[tensor.file], tensor.begin, tensor.end, *content_of(tensor)


def part_file(image: memoryview, hashed: HashedImage, *, kept: Iterable[str]) -> PartFile:
    """Return the file of an image's head and of its tensors but those that are ``kept`` elsewhere."""
    left_out = set(kept)
    new = [extent for extent in hashed.header.extents if extent.name not in left_out]
    written = [
        *(Written(extent.name, extent.dtype, extent.shape, extent.end - extent.begin) for extent in new),
        Written(HEAD, "U8", (hashed.header.bytes,), hashed.header.bytes),
    ]
    first = header_bytes(written, _metadata(hashed.header.metadata))
    places, at = {}, len(first)
    for one in written:
        places[one.name] = (at, at + one.bytes)
        at += one.bytes
    pieces: tuple[bytes | memoryview, ...] = (
        first,
        *(image[extent.begin : extent.end] for extent in new),
        image[: hashed.header.bytes],
    )
    return PartFile(pieces=pieces, bytes=at, places=places)


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


def index_of_parts(whole: Index, elsewhere: Mapping[str, Placed], *, part: PartFile, file: File) -> Index:
    """Return the index of an image of which ``file`` holds what is new; the rest, by name, lies ``elsewhere``."""
    files = {placed.file.key: placed.file for placed in elsewhere.values()}
    numbers = {key: at for at, key in enumerate(files, start=1)}
    return msgspec.structs.replace(
        whole,
        head=Head(file=0, begin=part.places[HEAD][0], end=part.places[HEAD][1], digest=whole.head.digest),
        files=(file, *files.values()),
        tensors=tuple(
            msgspec.structs.replace(elsewhere[tensor.name].tensor, file=numbers[elsewhere[tensor.name].file.key])
            if tensor.name in elsewhere
            else msgspec.structs.replace(tensor, begin=part.places[tensor.name][0], end=part.places[tensor.name][1])
            for tensor in whole.tensors
        ),
    )


class Grounds:
    """What the indexes of a step may point into.

    That is the new file of any of ``step``, the indexes whose files were read back for this very step, and what a READY
    names: ``bases`` are the indexes of those READYs, by seq.
    """

    def __init__(self, step: Iterable[Index], bases: Mapping[int, Sequence[Index]]) -> None:
        self._new = {one.files[0].key: one for one in step}
        self._bases = bases
        self._places: dict[tuple[int, int] | str, frozenset[Content]] = {}
        self._naming: dict[int, dict[str, list[int]]] = {}

    def unfounded(self, index: Index) -> str | None:
        """Return what an index names of other files that they are not known to have; None if there is nothing."""
        if index.head.file != 0:
            return "its header is not in its own file"
        if unused := set(range(1, len(index.files))) - {one.file for one in index.tensors}:
            return f"it names {index.files[min(unused)].key} and nothing in it"
        for one in index.tensors:
            if one.file > 0 and not self._is_founded(index, _place(index, one), key=index.files[one.file].key):
                return f"nothing it may point into has tensor {one.name[:80]!r} in {index.files[one.file].key}"
        return None

    def _is_founded(self, index: Index, place: Content, *, key: str) -> bool:
        if (new := self._new.get(key)) is not None:
            if key not in self._places:
                self._places[key] = frozenset(_place(new, one) for one in new.tensors if one.file == 0)
            return place in self._places[key]
        seq = index.base
        if seq is None or seq not in self._bases:
            return False
        base = self._bases[seq]
        own = index.rank < len(base) and place in self._places_of(seq, index.rank)
        return own or any(place in self._places_of(seq, rank) for rank in self._ranks_naming(seq, key))

    def _places_of(self, seq: int, rank: int) -> frozenset[Content]:
        if (seq, rank) not in self._places:
            base = self._bases[seq][rank]
            self._places[seq, rank] = frozenset(_place(base, one) for one in base.tensors)
        return self._places[seq, rank]

    def _ranks_naming(self, seq: int, key: str) -> Sequence[int]:
        if seq not in self._naming:
            naming = self._naming[seq] = {}
            for rank, base in enumerate(self._bases[seq]):
                for file in base.files:
                    naming.setdefault(file.key, []).append(rank)
        return self._naming[seq].get(key, ())
