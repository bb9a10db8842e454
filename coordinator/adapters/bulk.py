"""Reads many objects at a time in a process of its own.

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
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from toprope.store.checkpoint.ready import read_capped
from toprope.store.errors import CkptError, UnavailableError
from toprope.store.names import Key
from toprope.store.objects.opening import open_store
from toprope.store.objects.protocol import ObjectStore

_WHO = "the process that reads indexes for the coordinator"
_NICE = 10
_THREADS = 32
"""So many objects are read at once: a store in a network makes each wait."""


class BulkReader:
    """Reads objects of the store at ``root``; the process is there from the first reading until ``close``."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._pool: ProcessPoolExecutor | None = None
        self._closed = False
        self._mutex = threading.Lock()

    async def bodies(self, keys: Sequence[Key], *, limit: int) -> list[bytes]:
        """Return objects as the medium has them; raises as ``read_capped``, what is wrong with the first that is wrong.

        Raises:
            UnavailableError: the process has ended or can't be started; the next call tries to start another.
        """
        found = await asyncio.to_thread(self._asked, tuple(keys), limit)
        if isinstance(found, CkptError):
            raise found
        return found

    def _asked(self, keys: tuple[Key, ...], limit: int) -> list[bytes] | CkptError:
        try:
            with self._mutex:
                reading = self._asking(keys, limit)
            return reading.result()
        except BrokenProcessPool:
            with self._mutex:
                broken, self._pool = self._pool, None
            if broken is not None:
                broken.shutdown()
            return UnavailableError(f"{_WHO} has ended; it is started again. Did it want too much memory?")
        except CancelledError:
            return UnavailableError(f"{_WHO} is being ended")
        except OSError as error:
            return UnavailableError(
                f"{_WHO} can't be started: {error.strerror}. Are there limits on processes or memory?"
            )

    def _asking(self, keys: tuple[Key, ...], limit: int) -> Future[list[bytes] | CkptError]:
        """Ask the process, which is started if it must be."""
        if self._closed:
            raise CancelledError
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, mp_context=context, initializer=_begin)
        return self._pool.submit(_read, self._root, keys, limit)

    def close(self) -> None:
        """End the process, once it has read what it is at."""
        with self._mutex:
            self._closed = True
            if self._pool is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)
                self._pool = None


def _begin() -> None:
    """Leave signals to the coordinator, and time that both want; end when it has ended, however that was."""
    os.nice(_NICE)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
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
