"""From receipts to READY: which step is committed next, and who reads which object back before. Pure.

A step is complete when each rank of the attempt's world has a receipt; it may become READY when each of these objects
has been read back, past the page cache, by another node than its writer (by the coordinator if there is none). The
newest complete step goes first, but a step that is being read back is finished: a slow store must not starve READY.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from toprope.coordinator.wire import Copy, ReadBack, ReadBackTask

HERE = ""
"""The coordinator itself, as the reader of a task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """A shard object and the node that wrote it."""

    node: str
    copy: Copy


def next_step(steps: Sequence[int], *, dead: Iterable[int], under_way: int) -> int:
    """Return which complete step to commit next (0: none): the one under way, else the newest that is not ``dead``."""
    usable = [step for step in steps if step not in set(dead)]
    return under_way if under_way in usable else max(usable, default=0)


def assign(receipts: Sequence[Receipt], readers: Sequence[str]) -> tuple[ReadBackTask, ...]:
    """Return who is to read back which object."""
    names = sorted(readers)
    return tuple(
        ReadBackTask(
            node=_other(names, receipt.node, number=receipt.copy.rank),
            key=receipt.copy.key,
            bytes=receipt.copy.stored_bytes,
            digest=receipt.copy.stored_digest,
        )
        for receipt in receipts
    )


def _other(names: Sequence[str], writer: str, *, number: int) -> str:
    """Return one of the sorted ``names`` by its number, round and round, as if the writer were not among them."""
    at = bisect_left(names, writer)
    among = at < len(names) and names[at] == writer
    others = len(names) - among
    if not others:
        return HERE
    chosen = number % others
    return names[chosen + 1 if among and chosen >= at else chosen]


def spoiled(receipts: Sequence[Receipt], done: Mapping[str, str]) -> str:
    """Return what is wrong with objects that were read back and did not have their digest; empty when nothing is."""
    return "; ".join(
        f"rank {receipt.copy.rank}: {receipt.copy.key} has digest {done[receipt.copy.key]}, "
        f"its receipt says {receipt.copy.stored_digest}"
        for receipt in receipts
        if receipt.copy.key in done and done[receipt.copy.key] != receipt.copy.stored_digest
    )


def found_digest(result: ReadBack) -> str:
    """Return the digest that a read-back found."""
    return result.digest if result.ok else (result.found or "unreadable")
