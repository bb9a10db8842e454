"""Shard images as bytes: a reader of safetensors headers that believes nothing, and the digests of an image.

Stricter than the format: every limit is checked before anything of that size is built, tensors lie in the file without
a hole or an overlap and end where it ends, no name occurs twice. ``docs/format.md`` has the metadata.
"""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass
from typing import Any

import msgspec

from toprope.store.checkpoint.manifest import File, Head, Index, Tensor
from toprope.store.digest import Hasher
from toprope.store.errors import CorruptObjectError
from toprope.store.names import Key

FORMAT = "1"
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 16 * 1024 * 1024
MAX_TENSORS = 65_536
MAX_MARKS = 28 * MAX_TENSORS
"""How many braces, brackets, commas and colons a header may have, before it is parsed: a value of JSON takes much more
memory than text. A tensor has 12 and as many in its piece, a few more if it has many dimensions."""
MAX_DIMENSIONS = 32
MAX_NAME_CHARACTERS = 1024
MAX_EXTENT = 2**63

_LENGTH = struct.Struct("<Q")
_DECIMAL = re.compile(r"0|[1-9][0-9]{0,17}")
_CACHED_BYTES = 1024 * 1024  # both hashers read a chunk while it is in the processor's cache
ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "C64": 8,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class Piece(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a stored tensor lies in a larger one: the JSON under the metadata key ``piece:<name>``."""

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Whose state an image says it is."""

    job_uid: str
    attempt: int
    attempt_uid: str
    step: int
    rank: int
    world: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """A tensor of an image: bytes ``begin`` to ``end`` from the start of the file, as the header describes them."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The header of an image. ``bytes`` is where its data begins; ``extents`` are in the order of the file."""

    bytes: int
    extents: tuple[Extent, ...]
    metadata: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class HashedImage:
    """An image with its digest, that of its head and that of each tensor, in the order of ``header.extents``."""

    header: Header
    identity: Identity
    bytes: int
    digest: str
    head_digest: str
    tensor_digests: tuple[str, ...]


def header_length(first: bytes | memoryview, *, size: int, name: str) -> int:
    """Return how many bytes the header of an image of ``size`` bytes takes, from its ``first`` eight.

    Raises:
        CorruptObjectError: they can't be the beginning of an image of that size.
    """
    if size < LENGTH_BYTES or len(first) < LENGTH_BYTES:
        raise _not_an_image(name, f"{size} bytes, too few for a header")
    length: int = _LENGTH.unpack_from(first)[0]
    if length > MAX_HEADER_BYTES:
        raise _not_an_image(name, f"a header of {length} bytes; at most {MAX_HEADER_BYTES}")
    if LENGTH_BYTES + length > size:
        raise _not_an_image(name, f"a header of {length} bytes in a file of {size}")
    return LENGTH_BYTES + length


def parse_header(head: bytes | memoryview, *, size: int, name: str) -> Header:
    """Return the header of an image of ``size`` bytes that begins with ``head``. ``name`` is for messages.

    Raises:
        CorruptObjectError: it is damaged, lies, or passes a limit.
    """
    length = header_length(head, size=size, name=name)
    if len(head) < length:
        raise _not_an_image(name, f"the header ends at byte {len(head)}, expected {length}")
    text = bytes(head[LENGTH_BYTES:length])
    if (marks := sum(text.count(mark) for mark in (b"{", b"[", b",", b":"))) > MAX_MARKS:
        raise _not_an_image(name, f"its header has {marks} values and more; at most {MAX_MARKS}")
    try:
        fields = json.loads(text.decode(), object_pairs_hook=_unique)
        fields = msgspec.convert(fields, dict[str, Any])
        metadata = msgspec.convert(fields.pop("__metadata__", {}), dict[str, str])
        if len(fields) > MAX_TENSORS:
            raise _not_an_image(name, f"{len(fields)} tensors; at most {MAX_TENSORS}")
        entries = msgspec.convert(fields, dict[str, _Entry])
    except (ValueError, KeyError, RecursionError) as error:
        raise _not_an_image(name, f"its header is not one of safetensors: {error}") from error
    extents = sorted(
        (_extent(tensor, entry, begins_at=length, name=name) for tensor, entry in entries.items()),
        key=lambda extent: (extent.begin, extent.end),
    )
    _check_contiguous(extents, begin=length, size=size, name=name)
    return Header(bytes=length, extents=tuple(extents), metadata=metadata)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _extent(tensor: str, entry: _Entry, *, begins_at: int, name: str) -> Extent:
    item_bytes = ITEM_BYTES.get(entry.dtype)
    if item_bytes is None:
        raise _not_an_image(
            name, f"tensor {tensor[:80]!r} has dtype {entry.dtype[:20]!r}, which format 1 does not know"
        )
    if len(tensor) > MAX_NAME_CHARACTERS:
        raise _not_an_image(name, f"a tensor's name has {len(tensor)} characters; at most {MAX_NAME_CHARACTERS}")
    if len(entry.shape) > MAX_DIMENSIONS or not all(0 <= extent < MAX_EXTENT for extent in entry.shape):
        raise _not_an_image(name, f"tensor {tensor[:80]!r} has more than {MAX_DIMENSIONS} dimensions or an odd one")
    begin, end = entry.data_offsets
    wanted = math.prod(entry.shape) * item_bytes
    if not 0 <= begin <= end or end - begin != wanted:
        raise _not_an_image(
            name, f"tensor {tensor[:80]!r} lies at {begin} to {end}, but its shape and dtype take {wanted} bytes"
        )
    return Extent(
        name=tensor, dtype=entry.dtype, shape=tuple(entry.shape), begin=begins_at + begin, end=begins_at + end
    )


def _check_contiguous(extents: list[Extent], *, begin: int, size: int, name: str) -> None:
    at = begin
    for extent in extents:
        if extent.begin != at:
            raise _not_an_image(name, f"tensor {extent.name[:80]!r} begins at byte {extent.begin}, expected {at}")
        at = extent.end
    if at != size:
        raise _not_an_image(name, f"its tensors end at byte {at}, but it has {size} bytes")


def identity_of(header: Header, *, name: str) -> Identity:
    """Return whose state an image says it is.

    Raises:
        CorruptObjectError: it is not a shard image of this format, or does not say.
    """
    metadata = header.metadata
    if metadata.get("format") != FORMAT:
        raise _not_an_image(name, f"shard format {metadata.get('format')!r}; this version reads format {FORMAT!r}")
    numbers = {}
    for field in ("attempt", "step", "rank", "world"):
        text = metadata.get(field, "")
        if _DECIMAL.fullmatch(text) is None:
            raise _not_an_image(name, f"its metadata gives {field} as {text[:40]!r}")
        numbers[field] = int(text)
    if not numbers["rank"] < numbers["world"]:
        raise _not_an_image(name, f"it is of rank {numbers['rank']} in a world of {numbers['world']}")
    if not any(extent.name == metadata.get("document") and extent.dtype == "U8" for extent in header.extents):
        raise _not_an_image(name, f"its document {metadata.get('document', '')[:80]!r} is not among its byte tensors")
    return Identity(job_uid=metadata.get("job_uid", ""), attempt_uid=metadata.get("attempt_uid", ""), **numbers)


def hash_image(view: memoryview, *, name: str) -> HashedImage:
    """Return the digests of an image, all bytes of which are in ``view``, and of each of its tensors.

    Raises:
        CorruptObjectError: it is not a shard image.
    """
    header = parse_header(view[: header_length(view, size=len(view), name=name)], size=len(view), name=name)
    identity = identity_of(header, name=name)
    whole = Hasher()
    whole.update(view[: header.bytes])
    head_digest = whole.hexdigest()
    digests = []
    for extent in header.extents:
        own = Hasher()
        for begin in range(extent.begin, extent.end, _CACHED_BYTES):
            chunk = view[begin : min(begin + _CACHED_BYTES, extent.end)]
            whole.update(chunk)
            own.update(chunk)
        digests.append(own.hexdigest())
    return HashedImage(
        header=header,
        identity=identity,
        bytes=len(view),
        digest=whole.hexdigest(),
        head_digest=head_digest,
        tensor_digests=tuple(digests),
    )


def index_of(image: HashedImage, *, key: Key) -> Index:
    """Return the index of a rank whose whole state is this image, the object ``key``.

    Raises:
        CorruptObjectError: a ``piece:`` entry of its metadata is wrong.
    """
    pieces = {extent.name: _piece_of(extent, image.header.metadata, name=key) for extent in image.header.extents}
    tensors = tuple(
        Tensor(
            name=extent.name,
            dtype=extent.dtype,
            shape=extent.shape,
            global_shape=pieces[extent.name].global_shape,
            offsets=pieces[extent.name].offsets,
            file=0,
            begin=extent.begin,
            end=extent.end,
            digest=digest,
        )
        for extent, digest in zip(image.header.extents, image.tensor_digests, strict=True)
    )
    identity = image.identity
    return Index(
        job_uid=identity.job_uid,
        attempt=identity.attempt,
        attempt_uid=identity.attempt_uid,
        step=identity.step,
        rank=identity.rank,
        world=identity.world,
        bytes=image.bytes,
        digest=image.digest,
        head=Head(file=0, begin=0, end=image.header.bytes, digest=image.head_digest),
        files=(File(key=key, bytes=image.bytes, digest=image.digest),),
        tensors=tensors,
    )


def _piece_of(extent: Extent, metadata: dict[str, str], *, name: str) -> Piece:
    text = metadata.get(f"piece:{extent.name}")
    if text is None:
        return Piece(global_shape=extent.shape, offsets=(0,) * len(extent.shape))
    try:
        piece = msgspec.json.decode(text, type=Piece)
    except msgspec.DecodeError as error:
        raise _not_an_image(name, f"piece:{extent.name[:80]} is wrong: {error}") from error
    if not len(piece.global_shape) == len(piece.offsets) == len(extent.shape) or not all(
        0 <= offset <= offset + extent <= whole
        for offset, extent, whole in zip(piece.offsets, extent.shape, piece.global_shape, strict=True)
    ):
        raise _not_an_image(name, f"piece:{extent.name[:80]} does not lie inside its tensor")
    return piece


def _not_an_image(name: str, why: str) -> CorruptObjectError:
    return CorruptObjectError(f"{name}: not a shard image: {why}")
