"""A blocking call off the event loop, for thousands at once: by few threads if it is quick, by many if it waits long.

Asked of a thread and answered one by one, a quick call costs the loop more than the call itself; and many threads that
are never idle keep the loop from its turn.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

MOST_THREADS = 32
EACH_S = 0.001
"""There are as many threads as this goes into what a call takes: so many calls a second, however long one takes."""
NEWEST = 0.3
"""How much what calls take now counts against what they took before."""
A = TypeVar("A")
B = TypeVar("B")


class Bulk(Generic[A, B]):
    """``call``, for many at a time. Awaited from one loop."""

    def __init__(self, call: Callable[[A], B]) -> None:
        self._call = call
        self._mutex = threading.Lock()
        self._wanted: deque[tuple[A, asyncio.Future[B]]] = deque()
        self._working: set[asyncio.Future[None]] = set()
        self._threads = 0
        self._takes_s = 0.0

    async def of(self, what: A) -> B:
        """Return what the call returns, or raise what it raises."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[B] = loop.create_future()
        with self._mutex:
            self._wanted.append((what, answer))
            begin = self._threads < self._threads_wanted()
            self._threads += begin
        if begin:
            working = loop.run_in_executor(None, self._work, loop)
            self._working.add(working)
            working.add_done_callback(self._working.discard)
        return await answer

    def _threads_wanted(self) -> int:
        return min(MOST_THREADS, max(1, math.ceil(self._takes_s / EACH_S)))

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        while some := self._some():
            began_s = time.monotonic()
            done = [(answer, *self._done(what)) for what, answer in some]
            takes_s = (time.monotonic() - began_s) / len(some)
            with self._mutex:
                self._takes_s += NEWEST * (takes_s - self._takes_s)
            loop.call_soon_threadsafe(_tell, done)

    def _some(self) -> list[tuple[A, asyncio.Future[B]]]:
        """Return this thread's part of what is wanted; with nothing, or too many threads, it is none any more."""
        with self._mutex:
            wanted = self._threads_wanted()
            part = math.ceil(len(self._wanted) / wanted) if self._threads <= wanted else 0
            self._threads -= part == 0
            return [self._wanted.popleft() for _ in range(part)]

    def _done(self, what: A) -> tuple[B | None, Exception | None]:
        try:
            return self._call(what), None
        except Exception as error:  # noqa: BLE001 - raised where it was asked for
            return None, error


def _tell(done: list[tuple[asyncio.Future[B], B | None, Exception | None]]) -> None:
    for answer, result, error in done:
        if answer.done():  # nobody waits for it any more
            continue
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)  # type: ignore[arg-type] # B may be None itself
