"""The object store off the event loop."""

from __future__ import annotations

import asyncio
import contextlib

from toprope.store.checkpoint import read_capped, read_index, read_manifest
from toprope.store.digest import digest_of_object
from toprope.store.errors import AlreadyExistsError, CorruptObjectError
from toprope.store.fold import JobState
from toprope.store.manifest import MAX_INDEX_BYTES, File
from toprope.store.names import Key
from toprope.store.objects.protocol import ObjectStore


class ThreadedStore:
    """A ``StorePort`` that calls a blocking store in threads."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def create_record(self, key: Key, body: bytes) -> None:
        """Create a record of the log."""
        await asyncio.to_thread(self._store.create, key, body)

    async def create_facts(self, key: Key, body: bytes) -> None:
        """Create facts; the key names their bytes, so what exists is the same."""
        with contextlib.suppress(AlreadyExistsError):
            await asyncio.to_thread(self._store.create, key, body)

    async def create_manifest(self, key: Key, body: bytes) -> None:
        """Create a manifest; the key names its bytes, so what exists is the same."""
        with contextlib.suppress(AlreadyExistsError):
            await asyncio.to_thread(self._store.create, key, body)

    async def read(self, key: Key, *, uncached: bool = False) -> bytes:
        """Return an object."""
        return await asyncio.to_thread(self._store.read, key, uncached=uncached)

    async def read_index(self, key: Key) -> bytes:
        """Return an index as the medium has it."""
        return await asyncio.to_thread(read_capped, self._store, key, limit=MAX_INDEX_BYTES, uncached=True)

    async def files(self, state: JobState, seq: int) -> tuple[File, ...]:
        """Return the files of a READY checkpoint by rank, each there and as long as it should be."""
        return await asyncio.to_thread(_files, self._store, state, seq)

    async def digest_uncached(self, key: Key) -> str:
        """Return the digest of an object as the medium has it."""
        return await asyncio.to_thread(digest_of_object, self._store, key, uncached=True)


def _files(store: ObjectStore, state: JobState, seq: int) -> tuple[File, ...]:
    manifest, _ = read_manifest(store, state, seq)
    files = tuple(read_index(store, manifest, shard).files[0] for shard in manifest.shards)
    for file in files:
        size = store.size(Key(file.key))
        if size != file.bytes:
            raise CorruptObjectError(f"{file.key}: {size} bytes, expected {file.bytes}")
    return files
