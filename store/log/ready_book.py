"""The READYs of a log in the order of their numbers: a mapping that grows by one without being copied."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from toprope.store.log.records import Ready


class ReadyBook(Mapping[int, Ready]):
    """READY records by number, which only grow, without what their envelopes say: a long job has many thousands.

    A value: ``grown`` returns a longer one and leaves this one as it is. They share their entries, of which each sees
    the first ``len``, so that a fold of many records does not copy them for each.
    """

    __slots__ = ("_count", "_readies", "_seqs")

    def __init__(self, entries: Iterable[tuple[int, Ready]] = ()) -> None:
        pairs = tuple(entries)
        self._seqs = [seq for seq, _ in pairs]
        self._readies = [_lean(ready) for _, ready in pairs]
        self._count = len(pairs)

    def grown(self, seq: int, ready: Ready) -> ReadyBook:
        """Return the book with one more, whose number is past all others."""
        after = ReadyBook()
        if len(self._seqs) == self._count == len(self._readies):
            after._seqs, after._readies = self._seqs, self._readies
        else:  # another one has grown from here
            after._seqs, after._readies = self._seqs[: self._count], self._readies[: self._count]
        after._readies.append(_lean(ready))
        after._seqs.append(seq)
        after._count = self._count + 1
        return after

    def __getitem__(self, seq: int) -> Ready:
        at = bisect_left(self._seqs, seq, 0, self._count)
        if at == self._count or self._seqs[at] != seq:
            raise KeyError(seq)
        return self._readies[at]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return (self._seqs[at] for at in range(self._count))

    def __reversed__(self) -> Iterator[int]:
        return (self._seqs[at] for at in range(self._count - 1, -1, -1))

    def __repr__(self) -> str:
        return f"ReadyBook({list(self.items())!r})"


def _lean(ready: Ready) -> Ready:
    """Return a record as it is kept: who wrote it after what was checked when it was read, and decides nothing more."""
    uid = sys.intern(ready.attempt_uid)
    return msgspec.structs.replace(ready, attempt_uid=uid, writer_id="", nonce="", prev="", sum="")
