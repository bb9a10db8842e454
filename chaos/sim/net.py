"""The network between nodes, coordinator, broker and store: it delays, drops, doubles and reorders, and can be cut.

A call is a request and a reply, each a message of its own; the work between runs in the process that is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from toprope.chaos.sim.loop import Process, SimLoop
from toprope.chaos.sim.options import Options
from toprope.chaos.sim.trace import Trace

T = TypeVar("T")


class NetError(Exception):
    """No answer came."""


class Net:
    """All links. ``cuts`` are those, from and to, over which nothing goes.

    ``lags_s``: how much longer, at most, messages take from and to those who are slow.
    """

    def __init__(self, loop: SimLoop, options: Options, trace: Trace) -> None:
        self.cuts: set[tuple[str, str]] = set()
        self.lags_s: dict[str, float] = {}
        self.calm = False
        self._loop = loop
        self._options = options
        self._trace = trace

    def is_cut(self, source: str, target: str) -> bool:
        """Say whether nothing goes from one to the other."""
        return (source, target) in self.cuts

    def send(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        """Let a message go: it comes once, or twice, or not at all, after others or before them."""
        rng = self._loop.rng
        if source != target and (self.is_cut(source, target) or (not self.calm and rng.random() < self._options.drop)):
            self._trace.sometimes("message lost")
            return
        self._loop.outside(self._delay_s(source, target), deliver)
        if not self.calm and rng.random() < self._options.duplicate:
            self._trace.sometimes("message doubled")
            self._loop.outside(self._delay_s(source, target) * 3, deliver)

    def _delay_s(self, source: str, target: str) -> float:
        rng = self._loop.rng
        base = rng.uniform(0.0005, 0.01) * (1.0 if self.calm else self._options.slow)
        if source != target and (lag_s := self.lags_s.get(source, 0.0) + self.lags_s.get(target, 0.0)):
            base += rng.uniform(0.0, lag_s)
        return base + (rng.uniform(0.0, 1.0) if not self.calm and rng.random() < 0.02 else 0.0)  # noqa: PLR2004 - one in fifty is late

    async def call(
        self,
        source: str,
        target: str,
        *,
        process: Callable[[], Process | None],
        work: Callable[[], Awaitable[T]],
        timeout_s: float,
    ) -> T:
        """Return what ``work`` gives in the process that is asked.

        Raises:
            NetError: no answer came in time, or nobody is there.
        """
        answer: asyncio.Future[T] = self._loop.create_future()

        def begin() -> None:
            asked = process()
            if asked is None or not asked.alive:
                self.send(target, source, lambda: _fail(answer, NetError(f"{target}: connection refused")))
                return
            asked.start(serve())

        async def serve() -> None:
            try:
                value = await work()
            except NetError as error:
                failure = NetError(f"{target}: {error}")
                self.send(target, source, lambda: _fail(answer, failure))
            else:
                self.send(target, source, lambda: _give(answer, value))

        self.send(source, target, begin)
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError as error:
            raise NetError(f"{target}: no answer within {timeout_s:g} s") from error


def _give(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # whoever asked may have gone
