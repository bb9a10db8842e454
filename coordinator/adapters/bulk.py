"""Reads many indexes at a time in a process of its own.

In threads of the coordinator's process the reading of a step of 16,384 ranks would keep its loop from its turn for half
a minute, and nothing else would be decided meanwhile.
"""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection, wait

import msgspec

from toprope.coordinator.adapters.looking import Look, look_at
from toprope.coordinator.index_checks import Expected
from toprope.store.errors import CkptError, CorruptObjectError, UnavailableError
from toprope.store.objects.opening import open_store
from toprope.store.objects.protocol import ObjectStore

_WHO = "the process that reads indexes for the coordinator"
_ENDING = f"{_WHO} is being ended"
_ENDED = f"{_WHO} has ended; it is started again. Did it want too much memory?"
_NICE = 12
_DECODED_AT_ONCE_BYTES = 256 * 1024
"""It takes the loop about a millisecond to decode so much."""
_THREADS = 32
"""So many objects are read at once: a store in a network makes each wait."""


class BulkReader:
    """Reads indexes of the store at ``root``; the process is there from the first reading until ``close``."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._pool: ProcessPoolExecutor | None = None
        self._life: Connection | None = None
        """The process ends when this is closed, whatever it is at."""
        self._closed = False
        self._mutex = threading.Lock()

    async def look(self, expected: Sequence[Expected]) -> list[Look]:
        """Return what indexes are; raises as ``look_at``, what is wrong with the first that is wrong.

        Raises:
            UnavailableError: the process has ended or can't be started; the next call tries to start another.
        """
        found = await self._asked(_packed(expected, expected))
        if isinstance(found, CkptError):
            raise found
        looks: list[Look] = []
        behind = 0
        for raw in msgspec.msgpack.decode(found, type=list[msgspec.Raw]):
            looks.append(msgspec.msgpack.decode(raw, type=Look))
            behind += len(raw)
            if behind > _DECODED_AT_ONCE_BYTES:  # others wait for the loop
                behind = 0
                await asyncio.sleep(0)
        return looks

    async def _asked(self, expected: bytes) -> bytes | CkptError:
        pool = None
        try:
            pool, looking = await asyncio.to_thread(self._asking, expected)
            return await asyncio.wrap_future(looking)
        except BrokenProcessPool:
            with self._mutex:
                if pool is self._pool:
                    self._end()
                closed = self._closed
            return UnavailableError(_ENDING if closed else _ENDED)
        except OSError as error:
            return UnavailableError(
                f"{_WHO} can't be started: {error.strerror}. Are there limits on processes or memory?"
            )

    def _asking(self, expected: bytes) -> tuple[ProcessPoolExecutor, Future[bytes | CkptError]]:
        """Ask the process, which is started if it must be."""
        with self._mutex:
            if self._closed:
                raise UnavailableError(_ENDING)
            if self._pool is None:
                context = multiprocessing.get_context("spawn")
                its, self._life = context.Pipe(duplex=False)
                self._pool = ProcessPoolExecutor(1, mp_context=context, initializer=_begin, initargs=(its,))
            try:
                return self._pool, self._pool.submit(_look, self._root, expected)
            except BrokenProcessPool:
                self._end()
                raise

    def _end(self) -> None:
        if self._life is not None:
            self._life.close()
        if self._pool is not None:
            self._pool.shutdown(wait=False)  # what is asked of it breaks with the process
        self._pool = self._life = None

    def close(self) -> None:
        """End the process, whatever it is at."""
        with self._mutex:
            self._closed = True
            self._end()


def _begin(life: Connection) -> None:
    """Leave signals to the coordinator, and time that both want; end when ``life`` or the coordinator does."""
    os.nice(_NICE)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(life, parent.sentinel), daemon=True).start()


def _end_with(*any_of: Connection | int) -> None:
    wait(any_of)
    os._exit(1)


@functools.cache
def _store(root: str) -> ObjectStore:
    return open_store(root, write=False)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS)


def _look(root: str, expected: bytes) -> bytes | CkptError:
    """Return what indexes are, or what is wrong with the first that is: an error has its message and nothing else.

    All goes as msgpack: to pickle thousands of values takes the coordinator's time.
    """
    wanted = msgspec.msgpack.decode(expected, type=list[Expected])
    try:
        return _packed(list(_threads().map(functools.partial(look_at, _store(root)), wanted)), wanted)
    except CkptError as error:
        return type(error)(str(error))


def _packed(values: Sequence[Expected] | Sequence[Look], expected: Sequence[Expected]) -> bytes:
    """Return values as msgpack, one for each of what is expected.

    Raises:
        CorruptObjectError: a receipt, or an index, has a number that is none of a shard's.
    """
    try:
        return msgspec.msgpack.encode(values)
    except OverflowError as error:
        raise CorruptObjectError(f"{_unpackable(values, expected)}: it has a number of more than 64 bits") from error


def _unpackable(values: Sequence[Expected] | Sequence[Look], expected: Sequence[Expected]) -> str:
    for value, one in zip(values, expected, strict=True):
        try:
            msgspec.msgpack.encode(value)
        except OverflowError:
            return one.key
    return f"one of {len(expected)} indexes"
