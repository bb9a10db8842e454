"""Digests: XXH3-128 of images, tensors and files, 32 hex digits as ``xxhsum -H128`` prints them.

Hashing releases the interpreter lock, so a thread that hashes a chunk does not hold up the others.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import xxhash

from toprope.store.names import Key
from toprope.store.objects.protocol import ObjectStore

CHUNK_BYTES = 8 * 1024 * 1024
FILL_BYTES = 128 * 1024 * 1024
"""How much is asked for at most where it is passed on as it comes and costs no memory: each request costs time."""
READS_AT_ONCE = 4
"""How many chunks of one object are asked for at the same time: what a reader needs in memory beside its own."""

_T = TypeVar("_T")

Hasher = xxhash.xxh3_128
"""Takes ``update(bytes)`` as often as wanted; ``hexdigest()`` gives the digest of all of it."""


def digest(body: bytes | bytearray | memoryview) -> str:
    """Return the digest of these bytes."""
    hasher = Hasher()
    with memoryview(body) as whole, whole.cast("B") as view:
        for begin in range(0, len(view), CHUNK_BYTES):
            hasher.update(view[begin : begin + CHUNK_BYTES])
    return hasher.hexdigest()


def digest_of_file(path: Path) -> str:
    """Return the digest of a file, read in chunks."""
    hasher = Hasher()
    buffer = bytearray(min(CHUNK_BYTES, max(1, path.stat().st_size)))
    with path.open("rb", buffering=0) as file, memoryview(buffer) as view:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := file.readinto(view):
            hasher.update(view[:count])
    return hasher.hexdigest()


def chunks_of_object(store: ObjectStore, key: Key, *, uncached: bool = False) -> Iterator[bytes]:
    """Yield an object's bytes in order, at most ``CHUNK_BYTES`` at a time, while the next ones are being read."""
    size = store.size(key)

    def read(start: int) -> bytes:
        return store.read(key, start=start, length=min(CHUNK_BYTES, size - start), uncached=uncached)

    yield from read_ahead(read, range(0, size, CHUNK_BYTES))


def read_ahead(read: Callable[[_T], bytes], starts: Sequence[_T]) -> Iterator[bytes]:
    """Yield what is read at each start, in order, several at a time. What fails for good ends the others."""
    if len(starts) <= 1:
        yield from map(read, starts)
        return
    with ThreadPoolExecutor(min(READS_AT_ONCE, len(starts)), thread_name_prefix="read") as pool:
        coming: deque[Future[bytes]] = deque()
        try:
            for start in starts:
                coming.append(pool.submit(read, start))
                if len(coming) == READS_AT_ONCE:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()
        finally:
            for one in coming:
                one.cancel()


def digest_of_object(store: ObjectStore, key: Key, *, uncached: bool = False) -> str:
    """Return the digest of an object, read in chunks; ``uncached`` as in ``ObjectStore.read``."""
    hasher = Hasher()
    for chunk in chunks_of_object(store, key, uncached=uncached):
        hasher.update(chunk)
    return hasher.hexdigest()
