"""The scrub: one copy of this node after the other is hashed again, slowly, so that damage is found before a restore.

A copy is not held meanwhile: one that was given up, or written over, while it was read says nothing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from toprope.sidecar import metrics
from toprope.sidecar.threads import Threads
from toprope.sidecar.values import Lying
from toprope.store.digest import Hasher

CHUNK_BYTES = 8 * 1024 * 1024
IDLE_S = 1.0


class Scrub:
    """Goes round all copies for ever. ``listed`` gives those there are now, ``doubt`` is told of a damaged one."""

    def __init__(
        self,
        *,
        listed: Callable[[], Sequence[Lying]],
        view: Callable[[Path], memoryview],
        doubt: Callable[[Lying], None],
        threads: Threads,
        bytes_per_s: float,
    ) -> None:
        self._listed = listed
        self._view = view
        self._doubt = doubt
        self._threads = threads
        self._bytes_per_s = bytes_per_s

    async def run(self) -> None:
        """Scrub until cancelled."""
        while True:
            await self.round()
            await asyncio.sleep(IDLE_S)

    async def round(self) -> None:
        """Hash each copy that is here now once."""
        for lying in self._listed():
            try:
                found = await self._digest(lying)
            except OSError as error:
                found = str(error)
            if found != lying.shard.digest and lying in self._listed():
                self._doubt(lying)

    async def _digest(self, lying: Lying) -> str:
        hasher = Hasher()
        with ExitStack() as opened:
            read = self._reader(lying, opened)
            for begin in range(0, lying.shard.bytes, CHUNK_BYTES):
                size = min(CHUNK_BYTES, lying.shard.bytes - begin)
                hasher.update(
                    await self._threads.run("disk" if lying.way.tier == "local" else "hash", read, begin, size)
                )
                metrics.SCRUBBED_BYTES.labels(tier=lying.way.tier).inc(size)
                await asyncio.sleep(size / self._bytes_per_s)
        return hasher.hexdigest()

    def _reader(self, lying: Lying, opened: ExitStack) -> Callable[[int, int], bytes]:
        """Return what reads some of the bytes: of a file on disk those of the medium, not those just written.

        A disk is read and not mapped: where it can't be read, that is an error and not the end of this process.
        """
        path = Path(lying.way.path)
        if lying.way.tier != "local":
            image = self._view(path)
            return lambda begin, size: bytes(image[begin : begin + size])
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        opened.callback(os.close, descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return lambda begin, size: os.pread(descriptor, size, begin)
