"""Blocks of a tensor: what a rank stored of it, and what a rank is to hold. Pure.

A block is a box of the whole tensor whose elements lie in a row, in row-major order, in what holds it. A shard along
some dimensions is one block; a run of the flattened tensor, as FSDP1 keeps it, is a few of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Block:
    """A box of the whole by ``offsets`` and ``sizes``; ``begin`` counts its first element in what holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int = 0

    @property
    def count(self) -> int:
        """Return the number of its elements."""
        return math.prod(self.sizes)


def run_of(shape: Sequence[int], begin: int, end: int) -> tuple[Block, ...]:
    """Return the elements ``begin`` to ``end`` of a flattened tensor, as far as it has so many, as blocks in order."""
    return tuple(_blocks(tuple(shape), begin, min(end, math.prod(shape)), 0))


def _blocks(shape: tuple[int, ...], begin: int, end: int, at: int) -> Iterator[Block]:
    if begin >= end:
        return
    if not shape:
        yield Block((), (), at)
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row
    if first > last:  # within one row
        yield from _inside(shape, begin, end, at)
        return
    yield from _inside(shape, begin, first * row, at)
    if first < last:
        zeros = (0,) * (len(shape) - 1)
        yield Block((first, *zeros), (last - first, *shape[1:]), at + first * row - begin)
    yield from _inside(shape, last * row, end, at + last * row - begin)


def _inside(shape: tuple[int, ...], begin: int, end: int, at: int) -> Iterator[Block]:
    """Yield the blocks of a run that lies within one row of the first dimension."""
    row = math.prod(shape[1:])
    number = begin // row if begin < end else 0
    for block in _blocks(shape[1:], begin - number * row, end - number * row, at):
        yield Block((number, *block.offsets), (1, *block.sizes), block.begin)


def gap_in(target: Block, parts: Sequence[Block]) -> str | None:
    """Return why parts of a block, each within it, do not make up all of it exactly once; None if they do."""
    found = sum(part.count for part in parts)
    if found != target.count:
        return f"the shards hold {found} of the {target.count} elements at {list(target.offsets)}"
    if any(_overlapping(parts)):
        return f"shards hold the same elements twice at {list(target.offsets)}"
    return None


def _overlapping(parts: Sequence[Block]) -> Iterator[bool]:
    """Say for pairs of parts whether they share an element: a sweep along the dimension that parts them best."""
    dimensions = range(len(parts[0].sizes)) if parts else range(0)
    along = max(dimensions, key=lambda one: len({part.offsets[one] for part in parts}), default=None)
    if along is None:
        yield len(parts) > 1
        return
    active: list[Block] = []
    for part in sorted(parts, key=lambda one: one.offsets[along]):
        active = [other for other in active if other.offsets[along] + other.sizes[along] > part.offsets[along]]
        yield any(_share(part, other) for other in active)
        active.append(part)


def _share(one: Block, other: Block) -> bool:
    return all(
        max(a, b) < min(a + width, b + length)
        for a, width, b, length in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )
