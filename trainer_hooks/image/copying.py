"""Copies of plain memory, and the one thread beside the trainer's own that makes them."""

from __future__ import annotations

import ctypes
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

WORTH_A_THREAD_BYTES = 4 * 1024 * 1024
"""Below this, to wake a thread takes longer than it saves."""

LARGE_BYTES = 64 * 1024
"""From here on, the copy of a tensor takes longer than what is done about it."""
SAMPLE_BYTES = 4096
_HOP_BYTES = 1_000_003 * 64
_CACHE_LINE_BYTES = 64


def lies_in_order(tensor: torch.Tensor) -> bool:
    """Say whether the logical values of a tensor are its bytes, one after the other, on whatever device."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


class Move(NamedTuple):
    """A copy of ``size`` bytes to an address, from ``begin`` of a contiguous tensor, which it keeps alive."""

    to: int
    source: torch.Tensor
    size: int
    begin: int = 0

    def run(self) -> None:
        """Copy. Other threads of Python run meanwhile."""
        if self.size:
            ctypes.memmove(self.to, self.source.data_ptr() + self.begin, self.size)

    def same(self) -> bool:
        """Say whether both sides have the same bytes."""
        return not self.size or _memcmp(self.to, self.source.data_ptr() + self.begin, self.size) == 0

    def part(self, begin: int, count: int) -> Move:
        """Return the copy of a part of this one's bytes."""
        assert begin + count <= self.size
        return Move(self.to + begin, self.source, count, self.begin + begin)


def sampled(moves: Sequence[Move], turn: int) -> Callable[[], bool]:
    """Keep some bytes of each source as they are now; return what says whether both sides of all have them then."""
    kept = []
    for move in moves:
        begin, count = sample_place(move.size, turn)
        kept.append((move, begin, ctypes.string_at(move.source.data_ptr() + move.begin + begin, count)))

    def sound() -> bool:
        for move, begin, golden in kept:
            sides = (move.to + begin, move.source.data_ptr() + move.begin + begin)
            if any(_memcmp(golden, side, len(golden)) for side in sides):
                return False
        return True

    return sound


def sample_place(size: int, turn: int) -> tuple[int, int]:
    """Return which bytes of so many to sample: another place each turn, so that in time all are."""
    count = min(size, SAMPLE_BYTES)
    return (turn * _HOP_BYTES) % (size - count + 1), count


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int


class Copier:
    """One thread that does the work it is given, in order; it is started by the first."""

    def __init__(self, *, threads: int) -> None:
        self._threads = threads
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Have the thread do this. If it raises, ``threading.excepthook`` tells of it, and another thread goes on."""
        if self._thread is None:
            self._begin()
        self._work.put(work)

    def run(self, moves: Sequence[Move]) -> None:
        """Make these copies, half of them in the thread if the machine has a processor for it.

        Raises:
            RuntimeError: they were not all made.
        """
        total = sum(move.size for move in moves)
        if self._threads == 1 or total < WORTH_A_THREAD_BYTES:
            _run(moves)
            return
        mine, other = _halves(moves, total)
        ended, copied = threading.Event(), threading.Event()

        def rest() -> None:
            try:
                _run(other)
                copied.set()
            finally:
                ended.set()

        self.start(rest)
        _run(mine)
        ended.wait()
        if not copied.is_set():
            raise RuntimeError("the second thread failed to copy its half")

    def close(self) -> None:
        """End the thread once it has done what it was given."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
            self._thread = None

    def _begin(self) -> None:
        self._thread = threading.Thread(target=self._serve, name="toprope-copy", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        told_to_end = False
        try:
            while (work := self._work.get()) is not None:
                work()
            told_to_end = True
        finally:
            if not told_to_end:  # what comes next is not lost with this thread, nor waited for in vain
                self._begin()


def _run(moves: Sequence[Move]) -> None:
    for move in moves:
        move.run()


def _halves(moves: Sequence[Move], total: int) -> tuple[list[Move], list[Move]]:
    """Cut the work into two of the same size, through the middle of a tensor where need be."""
    mine: list[Move] = []
    left = total // 2
    for number, move in enumerate(moves):
        if move.size >= left:
            cut = left // _CACHE_LINE_BYTES * _CACHE_LINE_BYTES
            return [*mine, move.part(0, cut)], [move.part(cut, move.size - cut), *moves[number + 1 :]]
        mine.append(move)
        left -= move.size
    return mine, []


def threads_for_copying() -> int:
    """Return with how many threads to copy: two, if each trainer on this machine has two processors."""
    trainers = os.environ.get("LOCAL_WORLD_SIZE", "1")
    share = len(os.sched_getaffinity(0)) // (int(trainers) if trainers.isdecimal() and trainers != "0" else 1)
    return 2 if share >= 2 else 1  # noqa: PLR2004 - see the docstring
