"""Digests: XXH3-128 of images, tensors and files, 32 hex digits as ``xxhsum -H128`` prints them.

Hashing releases the interpreter lock, so a thread that hashes a chunk does not hold up the others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import xxhash

from toprope.store.names import Key
from toprope.store.objects.protocol import ObjectStore

CHUNK_BYTES = 8 * 1024 * 1024

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
    """Yield an object's bytes in order, at most ``CHUNK_BYTES`` at a time."""
    size = store.size(key)
    for start in range(0, size, CHUNK_BYTES):
        yield store.read(key, start=start, length=min(CHUNK_BYTES, size - start), uncached=uncached)


def digest_of_object(store: ObjectStore, key: Key, *, uncached: bool = False) -> str:
    """Return the digest of an object, read in chunks; ``uncached`` as in ``ObjectStore.read``."""
    hasher = Hasher()
    for chunk in chunks_of_object(store, key, uncached=uncached):
        hasher.update(chunk)
    return hasher.hexdigest()
