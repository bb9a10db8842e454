"""An event loop in virtual time: one seed, one order of all that happens.

Time goes on only when nobody has anything left to do now. Work belongs to *processes*, known by a context variable
that tasks and timers inherit: what belongs to a dead process never runs again, not even its ``finally``, and what
belongs to a paused one runs when it goes on. Within a process callbacks run in the order in which asyncio promises
them; between processes the seed decides.

``_run_once`` is private to asyncio: ``tests/simulation`` pins it on each version of Python that we support.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import random
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, ParamSpec, TypeVar

from toprope.chaos.sim.threads import Worker, worker_for
from toprope.store.errors import UnavailableError

A = ParamSpec("A")
T = TypeVar("T")
_NOT_ANSWERED_S = (0.5, 3.0)
_CALL_S = (0.001, 0.03)


class StalledError(Exception):
    """Nothing is left to wait for: the simulated world has stopped."""


class Process:
    """A simulated process: its tasks live and die with it."""

    def __init__(self, loop: SimLoop, name: str) -> None:
        self.name = name
        self.alive = True
        self.held: list[asyncio.Handle] | None = None
        self._loop = loop
        self._on_death: list[Callable[[], None]] = []
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, self)

    def start(self, work: Coroutine[Any, Any, object]) -> None:
        """Begin a task of this process; that it fails fails the run."""
        _ = self.begun(work)

    def begun(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
        """Begin a task of this process, and return it."""
        task = self._loop.create_task(work, context=self.context)
        task.add_done_callback(lambda done: self._loop.note_end(done) if self.alive else None)
        return task

    def at_death(self, act: Callable[[], None]) -> None:
        """Have something outside done when it dies, such as releasing its locks."""
        self._on_death.append(act)

    def kill(self) -> None:
        """End it here and now, as SIGKILL does."""
        if not self.alive:
            return
        self.alive = False
        self._loop.bury(self)
        for act in self._on_death:
            act()

    def pause(self) -> None:
        """Stop it, as SIGSTOP does."""
        if self.held is None and self.alive:
            self.held = []

    def resume(self) -> None:
        """Let it go on: all that came due meanwhile comes at once."""
        held, self.held = self.held, None
        self._loop.release(held or [])


PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class SimLoop(asyncio.BaseEventLoop):
    """The loop. ``crashes`` are errors that no code of ours caught."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng
        self.crashes: list[BaseException] = []
        self.slow = 1.0
        self._now_s = 0.0
        self._all: list[asyncio.Task[Any]] = []
        self._buried: list[asyncio.Handle] = []
        self._workers: list[Worker] = []
        self._draining = False
        self._outside = contextvars.copy_context()
        self._ready: deque[asyncio.Handle]
        self._scheduled: list[asyncio.TimerHandle]
        self.set_exception_handler(self._on_trouble)

    # What asyncio asks for

    def time(self) -> float:
        """Return virtual seconds."""
        return self._now_s

    def create_task(self, coro: Any, *, name: object = None, context: Any = None) -> asyncio.Task[Any]:  # noqa: ANN401 - as in asyncio
        """Begin a task; it is held until the end, so that none is ever finalised by chance."""
        task: asyncio.Task[Any] = super().create_task(coro, name=None if name is None else str(name), context=context)
        self._all.append(task)
        return task

    def run_in_executor(self, _executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]  # noqa: ANN401 - as in asyncio
        """Call ``func`` some time from now, and give its result some time later."""
        return self.stepwise(partial(func, *args))

    def stepwise(self, func: Callable[[], T]) -> asyncio.Future[T]:
        """Call ``func`` some time from now, with time between its calls of the store, and give its result later."""
        done: asyncio.Future[T] = self.create_future()

        def begin() -> None:
            worker = worker_for(partial(contextvars.copy_context().run, func))
            self._workers.append(worker)
            self._go_on(worker, done)

        self.call_later(self._call_s(), begin)
        return done

    def _failed(self, done: asyncio.Future[Any], error: BaseException) -> None:
        delay_s = self.rng.uniform(*_NOT_ANSWERED_S) if isinstance(error, UnavailableError) else 0.0
        self.call_later(delay_s, _fail, done, error)

    def _call_s(self) -> float:
        return self.slow * self.rng.uniform(*_CALL_S)

    def _go_on(self, worker: Worker, done: asyncio.Future[Any]) -> None:
        """Let blocking code run up to its next call of the store, which it makes some time from now."""
        if self._draining:
            return
        if not worker.resume():
            self.call_later(max(worker.nap_s, self._call_s()), self._go_on, worker, done)
            return
        self._workers.remove(worker)
        if worker.error is not None:
            self._failed(done, worker.error)
        else:
            self.call_later(self._call_s(), _give, done, worker.result)

    def _write_to_self(self) -> None:
        pass

    def _process_events(self, event_list: object) -> None:
        pass

    def _run_once(self) -> None:
        scheduled, ready = self._scheduled, self._ready
        while scheduled and scheduled[0].cancelled():
            heapq.heappop(scheduled)
        if not ready:
            if not scheduled:
                raise StalledError("nothing is left to wait for")
            self._now_s = max(self._now_s, scheduled[0].when())
        while scheduled and scheduled[0].when() <= self._now_s:
            ready.append(heapq.heappop(scheduled))
        batch = list(ready)
        ready.clear()
        for handle in self._interleaved(batch):
            if handle.cancelled():
                continue
            process = handle._context.get(PROCESS)  # type: ignore[attr-defined]  # noqa: SLF001 - no public way
            if process is None or self._draining:
                handle._run()  # noqa: SLF001 - as BaseEventLoop does
            elif not process.alive:
                self._buried.append(handle)
            elif process.held is not None:
                process.held.append(handle)
            else:
                handle._run()  # noqa: SLF001 - as BaseEventLoop does

    def _interleaved(self, batch: list[asyncio.Handle]) -> list[asyncio.Handle]:
        if len(batch) < 2:  # noqa: PLR2004 - nothing to order
            return batch
        queues: dict[str, deque[asyncio.Handle]] = {}
        for handle in batch:
            process = handle._context.get(PROCESS)  # type: ignore[attr-defined]  # noqa: SLF001 - no public way
            queues.setdefault(process.name if process is not None else "", deque()).append(handle)
        if len(queues) == 1:
            return batch
        order: list[asyncio.Handle] = []
        left = list(queues.values())
        while left:
            at = self.rng.randrange(len(left))
            order.append(left[at].popleft())
            if not left[at]:
                del left[at]
        return order

    # Processes

    def outside(self, delay_s: float, act: Callable[A, object], *args: A.args, **kwargs: A.kwargs) -> None:
        """Have something done later by the world, which no process's death prevents."""
        assert not kwargs
        self.call_later(delay_s, act, *args, context=self._outside.copy())

    def bury(self, process: Process) -> None:
        """Keep what a process had been given to do while it was paused, unrun."""
        self._buried += process.held or []
        process.held = None

    def release(self, handles: list[asyncio.Handle]) -> None:
        """Let these callbacks run now."""
        self._ready.extend(handles)

    def note_end(self, task: asyncio.Task[Any]) -> None:
        """Note a task that ended with an error."""
        if not task.cancelled() and (error := task.exception()) is not None and not self._draining:
            self.crashes.append(error)
            self.stop()

    def _on_trouble(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not self._draining:
            self.crashes.append(error if isinstance(error, BaseException) else RuntimeError(str(context)))
            self.stop()

    def drain(self) -> None:
        """End all tasks, the dead ones too, so that nothing is left for the garbage collector to finalise."""
        self._draining = True
        for _ in range(50):
            pending = [task for task in self._all if not task.done()]
            if not pending:
                break
            self.release(self._buried)
            self._buried = []
            for task in pending:
                task.cancel()
            self.call_later(10.0, self.stop, context=self._outside.copy())
            self.run_forever()
        for worker in self._workers:
            worker.abort()
        self._workers.clear()
        for task in self._all:
            if task.done() and not task.cancelled():
                task.exception()
        self._all.clear()


def _give(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
