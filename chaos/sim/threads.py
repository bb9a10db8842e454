"""Blocking code in virtual time: each call has a thread of its own, which runs only while the loop stands still.

Such code (garbage collection, readers, commands) makes call after call of the store. Between two of them the thread
pauses and the loop goes on, so that anything may come in between; one of the two runs at any time, never both, so a
seed still gives one order.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import SupportsIndex


class GoneError(BaseException):
    """The history is over; raised in a thread that waits, and whatever it calls on its way out."""


class Worker:
    """A thread that does one piece of work at a time. ``nap_s``: how long at least it wants to pause."""

    def __init__(self) -> None:
        self.result: object = None
        self.error: BaseException | None = None
        self.nap_s = 0.0
        self._work: Callable[[], object] = lambda: None
        self._ended = False
        self._gone = False
        self._calls = 0
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        threading.Thread(target=self._run, name="simulated", daemon=True).start()

    # From the loop

    def resume(self) -> bool:
        """Let it run until it pauses or has ended; say whether it has ended."""
        self._go.release()
        self._back.acquire()
        if self._ended:
            self._work = lambda: None
            _IDLE.append(self)
        return self._ended

    def give(self, work: Callable[[], object]) -> None:
        """Have something done, from the next ``resume`` on."""
        self._work, self._ended, self._gone, self._calls = work, False, False, 0
        self.result, self.error = None, None

    def abort(self) -> None:
        """End what it does, at its next pause."""
        self._gone = True
        while not self.resume():
            pass

    # In the thread

    def _run(self) -> None:
        _HERE.worker = self
        while True:
            self._go.acquire()
            try:
                self.result = self._work()
            except BaseException as error:  # noqa: BLE001 - the loop is told, as a pool of threads does
                self.error = error
            self._ended = True
            self._back.release()

    def call(self) -> None:
        """Begin a call of the store: all but the first wait for their turn."""
        self._calls += 1
        if self._calls > 1 or self._gone:
            self.pause(0.0)

    def pause(self, nap_s: float) -> None:
        """Let the loop go on."""
        if not self._gone:
            self.nap_s = nap_s
            self._back.release()
            self._go.acquire()
        if self._gone:
            raise GoneError


_HERE = threading.local()
_IDLE: list[Worker] = []
os.register_at_fork(after_in_child=_IDLE.clear)


def worker_for(work: Callable[[], object]) -> Worker:
    """Return a thread that will do this work."""
    worker = _IDLE.pop() if _IDLE else Worker()
    worker.give(work)
    return worker


def _worker_here() -> Worker | None:
    """Return the worker whose thread this is."""
    return getattr(_HERE, "worker", None)


def turn() -> None:
    """Let others come first, if this is blocking code; called at each call of the store."""
    worker = _worker_here()
    if worker is not None:
        worker.call()


def is_simulated() -> bool:
    """Say whether this is a thread of a history."""
    return _worker_here() is not None


def nap(seconds: float | SupportsIndex, /) -> None:
    """Sleep in virtual time: what ``time.sleep`` is in a history."""
    worker = _worker_here()
    assert worker is not None, "blocking code was called on the loop"
    worker.pause(float(seconds))


class Turnstile:
    """What ``threading.Lock`` is in a history: who finds it taken lets the loop go on."""

    def __init__(self) -> None:
        self._taken = False

    def __enter__(self) -> None:
        while self._taken:
            nap(0.0)
        self._taken = True

    def __exit__(self, *_: object) -> None:
        self._taken = False
