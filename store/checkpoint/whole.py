"""Whole tensors, out of what the ranks of a checkpoint stored of them. Pure.

A tensor that several ranks stored alike is one. Pieces of a larger one must tile it exactly once. What several ranks
stored under one name with different values belongs to each of them, and is told apart by its rank.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from toprope.store.checkpoint.manifest import Index, Tensor
from toprope.store.checkpoint.shard import ITEM_BYTES
from toprope.store.errors import UsageError

DOCUMENT = "__document__"
"""The byte tensor of a rank that holds what is no tensor; see ``docs/format.md``."""

_NAMED = 5
"""How many names a message has before it counts the rest."""

Box: TypeAlias = tuple[tuple[int, int], ...]
"""A block of a tensor: for each dimension where it begins and where it ends."""


def is_named_like(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a tensor's name is like one of these patterns, such as ``model.*``; no pattern takes all."""
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def nothing_like(patterns: Sequence[str], names: Iterable[str]) -> UsageError:
    """Return the error that says that no tensor of these has a name that was asked for."""
    there = sorted(set(names) - {DOCUMENT})
    return UsageError(f"no tensor is named like {', '.join(patterns) or '*'}; there are {some(there)}")


def some(names: Sequence[str]) -> str:
    """Return the first few of these names, and how many more there are."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank stored of a tensor."""

    index: Index
    tensor: Tensor

    @property
    def rank(self) -> int:
        """The rank that stored it."""
        return self.index.rank

    @property
    def box(self) -> Box:
        """The block of the whole tensor that it is."""
        return tuple((at, at + extent) for at, extent in zip(self.tensor.offsets, self.tensor.shape, strict=True))

    @property
    def content(self) -> tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], str]:
        """What makes it the same as another rank's."""
        tensor = self.tensor
        return tensor.dtype, tensor.global_shape, tensor.shape, tensor.offsets, tensor.digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A tensor and the parts that it consists of. ``rank`` is set if it is one rank's own."""

    name: str
    rank: int | None
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def label(self) -> str:
        """Its name; that of a rank's own tensor begins with the rank."""
        return self.name if self.rank is None else f"rank-{self.rank:05d}.{self.name}"

    @property
    def bytes(self) -> int:
        """Its length if its parts tile it."""
        return sum(part.tensor.end - part.tensor.begin for part in self.parts)


def gather(indexes: Sequence[Index], *, apart: frozenset[str] = frozenset()) -> tuple[Whole, ...]:
    """Return the tensors of a checkpoint by name, then rank; those named in ``apart`` for each rank of its own."""
    named: dict[str, list[Part]] = {}
    for index in indexes:
        for tensor in index.tensors:
            named.setdefault(tensor.name, []).append(Part(index=index, tensor=tensor))
    return tuple(whole for name in sorted(named) for whole in _gathered(name, named[name], apart=name in apart))


def _gathered(name: str, parts: list[Part], *, apart: bool) -> Iterator[Whole]:
    distinct = {part.content: part for part in reversed(parts)}
    are_whole = all(part.tensor.shape == part.tensor.global_shape for part in parts)
    if apart or (are_whole and len(distinct) > 1):
        for part in parts:
            yield _whole(name, [part], rank=part.rank)
        return
    filled = [part for part in distinct.values() if 0 not in part.tensor.shape]
    yield _whole(name, sorted(filled or parts[:1], key=lambda part: (part.tensor.offsets, part.rank)), rank=None)


def _whole(name: str, parts: list[Part], *, rank: int | None) -> Whole:
    first = parts[0].tensor
    return Whole(name=name, rank=rank, dtype=first.dtype, shape=first.global_shape, parts=tuple(parts))


def untiled(whole: Whole) -> str | None:
    """Return why the parts of a tensor don't make up all of it exactly once, or None if they do."""
    for part in whole.parts:
        tensor = part.tensor
        if (tensor.dtype, tensor.global_shape) != (whole.dtype, whole.shape):
            return (
                f"rank {part.rank} has a piece of {tensor.dtype} {list(tensor.global_shape)}, "
                f"rank {whole.parts[0].rank} one of {whole.dtype} {list(whole.shape)}"
            )
        if not len(tensor.offsets) == len(tensor.shape) == len(whole.shape) or not all(
            0 <= begin <= end <= extent for (begin, end), extent in zip(part.box, whole.shape, strict=True)
        ):
            return f"the piece of rank {part.rank} does not lie inside {list(whole.shape)}"
        if tensor.end - tensor.begin != math.prod(tensor.shape) * ITEM_BYTES.get(tensor.dtype, 0):
            return f"the piece of rank {part.rank} has {tensor.end - tensor.begin} bytes, not those of its shape"
    if 0 in whole.shape:
        return None
    if (pair := _overlap(whole.parts)) is not None:
        return f"the pieces of ranks {pair[0].rank} and {pair[1].rank} overlap"
    have, want = sum(math.prod(part.tensor.shape) for part in whole.parts), math.prod(whole.shape)
    return None if have == want else f"its pieces have {have} of its {want} elements"


def _overlap(parts: Sequence[Part]) -> tuple[Part, Part] | None:
    """Return two parts that share an element, if there are: a sweep along the dimension that parts them best."""
    boxes = [(part.box, part) for part in parts]
    dimensions = range(len(parts[0].tensor.shape))
    along = max(dimensions, key=lambda one: len({box[one][0] for box, _ in boxes}), default=None)
    if along is None:
        return (parts[0], parts[1]) if len(parts) > 1 else None
    active: list[tuple[Box, Part]] = []
    for box, part in sorted(boxes, key=lambda one: one[0][along]):
        active = [other for other in active if other[0][along][1] > box[along][0]]
        for other, of in active:
            if common(box, other) is not None:
                return of, part
        active.append((box, part))
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A run of whole rows of a tensor: bytes ``begin`` to ``end`` of it, and the block of it that they are."""

    begin: int
    end: int
    box: Box


def bands(shape: Sequence[int], *, item_bytes: int, limit: int) -> Iterator[Band]:
    """Yield a tensor's bytes from the first to the last in bands of at most ``limit`` bytes, or of one element."""
    if 0 in shape:
        return
    along = 0
    while along < len(shape) - 1 and math.prod(shape[along + 1 :]) * item_bytes > limit:
        along += 1
    row_bytes = math.prod(shape[along + 1 :]) * item_bytes
    rows = max(1, limit // row_bytes)
    inner = tuple((0, extent) for extent in shape[along + 1 :])
    at = 0
    for outer in itertools.product(*(range(extent) for extent in shape[:along])):
        extent = shape[along] if shape else 1
        for first in range(0, extent, rows):
            last = min(extent, first + rows)
            end = at + (last - first) * row_bytes
            block = (*((one, one + 1) for one in outer), *(((first, last), *inner) if shape else ()))
            yield Band(begin=at, end=end, box=block)
            at = end


def common(one: Box, other: Box) -> Box | None:
    """Return the block that two have in common, or None."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return shared if all(begin < end for begin, end in shared) else None


def runs(block: Box, within: Box) -> Iterator[tuple[int, int]]:
    """Yield where the elements of ``block`` lie in row-major order of ``within``: first element and count, in order."""
    extents = [end - begin for begin, end in within]
    steps = [math.prod(extents[number + 1 :]) for number in range(len(extents))]
    solid = len(block)  # the dimensions from here on are there in full, so that they and the one before are one run
    while solid > 0 and block[solid - 1] == within[solid - 1]:
        solid -= 1
    tail = max(0, solid - 1)
    count = math.prod(end - begin for begin, end in block[tail:])
    start = sum((block[one][0] - within[one][0]) * steps[one] for one in range(tail, len(block)))
    starts = [[(at - within[one][0]) * steps[one] for at in range(*block[one])] for one in range(tail)]
    for outer in itertools.product(*starts):
        yield start + sum(outer), count
