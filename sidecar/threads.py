"""The threads of a sidecar: a pool for each thing that may hang, so that nothing else waits for it.

All but those that serve trainers are nice to them, and stay on the processors that they are given.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, ParamSpec, TypeAlias, TypeVar

from toprope.store.errors import UsageError

Pool: TypeAlias = Literal["slots", "hash", "disk", "store", "peers", "asked"]
"""``slots``: what trainers wait for. ``asked``: hashing that other nodes ask for."""
_SIZES: dict[Pool, int] = {"slots": 16, "hash": 2, "disk": 16, "store": 16, "peers": 16, "asked": 4}
A = ParamSpec("A")
R = TypeVar("R")


class Threads:
    """The pools. ``nice``: 0 to 19; ``cpus``: empty means all."""

    def __init__(self, *, nice: int = 0, cpus: frozenset[int] = frozenset()) -> None:
        self._pools = {
            name: ThreadPoolExecutor(
                size,
                thread_name_prefix=name,
                initializer=functools.partial(_give_way, nice, cpus) if name != "slots" else None,
            )
            for name, size in _SIZES.items()
        }

    async def run(self, pool: Pool, work: Callable[A, R], *args: A.args, **kwargs: A.kwargs) -> R:
        """Return what this comes to in a thread of a pool."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pools[pool], functools.partial(work, *args, **kwargs))

    def serve_loop(self) -> None:
        """Let the running loop use these threads for what is handed to none of them by name."""
        asyncio.get_running_loop().set_default_executor(self._pools["asked"])

    def close(self) -> None:
        """End the threads; what they are at ends first."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)


def _give_way(nice: int, cpus: frozenset[int]) -> None:
    """Let the calling thread give way to trainers."""
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, max(nice, os.getpriority(os.PRIO_PROCESS, thread)))
    if cpus:
        os.sched_setaffinity(thread, cpus)


def parse_cpus(text: str) -> frozenset[int]:
    """Return the processors in a list such as ``0-3,8``; an empty one means all.

    Raises:
        UsageError: it is no such list, or names a processor that this process may not use.
    """
    cpus: set[int] = set()
    try:
        for part in filter(None, text.split(",")):
            first, dash, last = part.partition("-")
            cpus.update(range(int(first), int(last if dash else first) + 1))
    except ValueError:
        raise UsageError(f"--cpus {text!r} is not usable: give numbers and ranges, such as 0-3,8") from None
    there = os.sched_getaffinity(0)
    if beyond := sorted(cpus - there):
        raise UsageError(f"--cpus {text!r} names processor {beyond[0]}; this process may use {sorted(there)}")
    return frozenset(cpus)
