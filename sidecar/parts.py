"""What a shard's image consists of, with the digest of each part: by it a peer fetches some of it, and checks that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from toprope.store.checkpoint.files import places
from toprope.store.checkpoint.manifest import Head, Index
from toprope.store.checkpoint.shard import hash_image
from toprope.store.checkpoint.whole import DOCUMENT

MAX_PARTS_BYTES = 32 * 1024 * 1024


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes ``begin`` to ``end`` of an image: a tensor, or what stands before all of them, which has no name."""

    name: str
    begin: int
    end: int
    digest: str


class Parts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An image of so many ``bytes``, its digest, and its parts in order, with neither a hole nor an overlap."""

    bytes: int
    digest: str
    parts: tuple[Part, ...]


def parts_of(image: memoryview, *, name: str) -> Parts:
    """Return the parts of an image, all digests taken now.

    Raises:
        CorruptObjectError: it is none.
    """
    hashed = hash_image(image, name=name)
    tensors = zip(hashed.header.extents, hashed.tensor_digests, strict=True)
    return Parts(
        bytes=hashed.bytes,
        digest=hashed.digest,
        parts=(
            Part(name="", begin=0, end=hashed.header.bytes, digest=hashed.head_digest),
            *(Part(name=one.name, begin=one.begin, end=one.end, digest=digest) for one, digest in tensors),
        ),
    )


def parts_in(index: Index) -> Parts:
    """Return the parts of the image that an index describes."""
    found = (
        Part(
            name="" if isinstance(part, Head) else part.name,
            begin=at,
            end=at + part.end - part.begin,
            digest=part.digest,
        )
        for at, part in places(index)
    )
    return Parts(bytes=index.bytes, digest=index.digest, parts=tuple(found))


def decoded(body: bytes) -> Parts:
    """Return the parts in this JSON body, in which each lies behind the one before it and the last ends the image.

    Raises:
        msgspec.MsgspecError: it is not that.
    """
    found = msgspec.json.decode(body, type=Parts)
    ends = [0, *(part.end for part in found.parts)]
    if ends[-1] != found.bytes or any(
        not begin == part.begin <= part.end for begin, part in zip(ends, found.parts, strict=False)
    ):
        raise msgspec.ValidationError("the parts are not one behind the other, or not all of the image")
    return found


def wanted(parts: Parts, tensors: frozenset[str]) -> list[Part]:
    """Return the parts without which nothing can be read, and those of these names."""
    return [part for part in parts.parts if part.name in {"", DOCUMENT} or part.name in tensors]


def runs(parts: Iterable[Part]) -> Iterator[tuple[int, int]]:
    """Yield begin and end of what parts cover, those that touch together."""
    begin = end = 0
    for part in parts:
        if part.begin != end:
            if begin < end:
                yield begin, end
            begin = part.begin
        end = part.end
    if begin < end:
        yield begin, end
