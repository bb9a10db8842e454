"""Whose rank was the first of its world to fail, and how often that was this node's, lately.

When a rank fails, all ranks of its world do, and torchrun counts that on each node alike. Only the first one's node may
be to blame: a keeper says at once, through a pipe of its agent, that its rank has failed.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

WINDOW_S = 3600.0
"""How long a strike counts."""


class Strikes:
    """The strikes of this node: ``most`` of them within an hour and it has to leave; 0: never."""

    def __init__(self, most: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self._clock = clock
        self._at_s: deque[float] = deque(maxlen=max(most, 1))

    def count(self) -> int:
        """Return how many count now."""
        since_s = self._clock() - WINDOW_S
        return sum(at_s > since_s for at_s in self._at_s)

    def is_last(self) -> bool:
        """Say whether one more makes it leave."""
        return 0 < self.most <= self.count() + 1

    def add(self) -> None:
        """Count one."""
        self._at_s.append(self._clock())


class Failures:
    """Hears from keepers on this node that a rank has failed."""

    def __init__(self, read: int) -> None:
        """Read from a pipe, as ``open_pipe`` gives it."""
        os.set_blocking(read, False)
        self._read = read
        self._taking = threading.Lock()
        self._then: Callable[[], None] = lambda: None

    def start(self, then: Callable[[], None]) -> None:
        """Call ``then``, on a thread of its own, as soon as a rank has failed."""
        self._then = then
        threading.Thread(target=self._listen, name="failures of ranks", daemon=True).start()

    def take(self) -> None:
        """Call ``then`` here if a failure has not been taken in yet."""
        with self._taking, contextlib.suppress(BlockingIOError):
            if os.read(self._read, 4096):
                self._then()

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._read, selectors.EVENT_READ)
            while True:
                selector.select()
                self.take()


def open_pipe() -> tuple[int, int]:
    """Return both ends of a pipe, reading and writing, for ``Failures`` and ``tell``; they stay open."""
    return os.pipe()


def tell(agent: int, write: int) -> None:
    """Tell the agent of a process id, whose pipe this is, that a rank has failed; it may be gone."""
    with contextlib.suppress(OSError), Path(f"/proc/{agent}/fd/{write}").open("wb", buffering=0) as pipe:
        pipe.write(b"f")
