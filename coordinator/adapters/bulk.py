"""Reads thousands of objects in a process of its own.

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
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from toprope.store.checkpoint.ready import read_capped
from toprope.store.errors import CkptError, UnavailableError
from toprope.store.names import Key
from toprope.store.objects.opening import open_store
from toprope.store.objects.protocol import ObjectStore

_NICE = 10
_THREADS = 8
"""So many objects are read at once: a store in a network makes each wait."""


class BulkReader:
    """Reads objects of the store at ``root``; the process is there from the first reading until ``close``."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._pool: ProcessPoolExecutor | None = None
        self._mutex = threading.Lock()

    async def bodies(self, keys: Sequence[Key], *, limit: int) -> list[bytes]:
        """Return objects as the medium has them; raises as ``read_capped``, what is wrong with the first that is wrong.

        Raises:
            UnavailableError: the process has ended; the next call starts another.
        """
        found = await asyncio.to_thread(self._asked, tuple(keys), limit)
        if isinstance(found, CkptError):
            raise found
        return found

    def _asked(self, keys: tuple[Key, ...], limit: int) -> list[bytes] | CkptError:
        pool = self._started()
        try:
            return pool.submit(_read, self._root, keys, limit).result()
        except BrokenProcessPool:
            with self._mutex:
                self._pool = None if self._pool is pool else self._pool
            return UnavailableError("the process that reads indexes for the coordinator has ended")

    def _started(self) -> ProcessPoolExecutor:
        with self._mutex:
            if self._pool is None:
                context = multiprocessing.get_context("spawn")
                self._pool = ProcessPoolExecutor(1, mp_context=context, initializer=_begin)
            return self._pool

    def close(self) -> None:
        """End the process, once it has read what it is at."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


def _begin() -> None:
    """Leave Ctrl-C to the coordinator, and time that both want; end when it has ended, however that was."""
    os.nice(_NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)


@functools.cache
def _store(root: str) -> ObjectStore:
    return open_store(root, write=False)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS)


def _read(root: str, keys: tuple[Key, ...], limit: int) -> list[bytes] | CkptError:
    """Return the objects, or what is wrong with the first that is: an error has its message and nothing else."""
    try:
        read = functools.partial(read_capped, _store(root), limit=limit, uncached=True)
        return list(_threads().map(read, keys))
    except CkptError as error:
        return type(error)(str(error))
