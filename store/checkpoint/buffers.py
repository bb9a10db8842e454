"""Buffers that all threads of a process share: only so many at once, however many shards are fetched; then none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

AT_ONCE = 6
"""Somewhat more than one shard is read by; with 32 MiB for each of them 192 MiB in all."""


class Buffers:
    """At most ``at_once`` buffers, kept as long as somebody is at work with them."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._turns = threading.BoundedSemaphore(at_once)
        self._mutex = threading.Lock()
        self._free: list[bytearray] = []
        self._users = 0

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep buffers that are given back, for whoever needs one next; when the last user leaves, they go."""
        with self._mutex:
            self._users += 1
        try:
            yield
        finally:
            with self._mutex:
                self._users -= 1
                if self._users == 0:
                    self._free.clear()

    @contextmanager
    def one(self, length: int) -> Iterator[memoryview]:
        """Yield a buffer of this length, once there is one; what is in it may be of somebody else's work."""
        with self._turns:
            with self._mutex:
                buffer = self._free.pop() if self._free else bytearray()
            if len(buffer) < length:
                buffer = bytearray(length)
            try:
                with memoryview(buffer) as whole, whole[:length] as view:
                    yield view
            finally:
                with self._mutex:
                    if self._users:
                        self._free.append(buffer)
