"""A rate that several threads keep together: each waits for its turn after it has taken something."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Pace:
    """At most so many bytes a second, all takers together."""

    def __init__(
        self,
        bytes_per_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._free_at_s = 0.0
        self._mutex = threading.Lock()

    def take(self, count: int) -> None:
        """Take in that so many bytes have come; return when the next may."""
        with self._mutex:
            now_s = self._clock()
            self._free_at_s = max(self._free_at_s, now_s) + count / self._bytes_per_s
            wait_s = self._free_at_s - now_s
        self._sleep(wait_s)
