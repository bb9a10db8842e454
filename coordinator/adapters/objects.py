"""The object store off the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from toprope.coordinator.adapters.bulk import BulkReader
from toprope.coordinator.adapters.looking import KEPT_INDEX_BYTES, Look, look_at
from toprope.coordinator.basing import base_shards, shards_there
from toprope.coordinator.index_checks import Expected
from toprope.store.checkpoint.manifest import Index, Manifest, Shard
from toprope.store.checkpoint.ready import index_body, index_of_body, read_manifest
from toprope.store.digest import digest_of_object
from toprope.store.errors import AlreadyExistsError
from toprope.store.keep.gc import GcPlan, execute, survey
from toprope.store.keep.gone import gone
from toprope.store.keep.holds import HoldWatch
from toprope.store.log.fold import JobState
from toprope.store.log.records import Base
from toprope.store.log.snap import newest_snap, put_snap
from toprope.store.names import Key
from toprope.store.objects.probing import sees_probe
from toprope.store.objects.protocol import ObjectStore

KEPT_TURNS = 4
"""How many steps later an index that was not used again is let go of: few are the base of more than the next one."""


class IndexBodies:
    """Indexes as they were read, by their SHA-256: those used for the last steps, up to a size in all. Thread-safe."""

    def __init__(self, *, most_bytes: int = KEPT_INDEX_BYTES) -> None:
        self._most_bytes = most_bytes
        self._bytes = self._turn = 0
        self._bodies: OrderedDict[str, tuple[bytes, int]] = OrderedDict()
        self._mutex = threading.Lock()

    def get(self, named: str) -> bytes | None:
        """Return the bytes that have this SHA-256, if they are kept."""
        with self._mutex:
            if named not in self._bodies:
                return None
            body, _ = self._bodies.pop(named)
            self._bodies[named] = body, self._turn
            return body

    def keep(self, named: str, body: bytes) -> None:
        """Keep an index, which was found to have this SHA-256, and let go of others if that is too much."""
        with self._mutex:
            if self._bodies.pop(named, None) is None:
                self._bytes += len(body)
            self._bodies[named] = body, self._turn
            while self._bytes > self._most_bytes:
                self._drop_oldest()

    def turn(self) -> None:
        """Let go of what was not used for the last steps, now that another one is to become READY."""
        with self._mutex:
            self._turn += 1
            while self._bodies and next(iter(self._bodies.values()))[1] < self._turn - KEPT_TURNS:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._bytes -= len(self._bodies.popitem(last=False)[1][0])


class ThreadedStore:
    """A ``StorePort`` that calls a blocking store in threads."""

    def __init__(self, store: ObjectStore, *, bulk: BulkReader | None = None) -> None:
        """``bulk`` reads where several indexes are wanted at once."""
        self._store = store
        self._bodies = IndexBodies()
        self._bulk = bulk

    async def create_record(self, key: Key, body: bytes) -> None:
        """Create a record of the log."""
        await asyncio.to_thread(self._store.create, key, body)

    async def create_facts(self, key: Key, body: bytes) -> None:
        """Create facts; the key names their bytes, so what exists is the same."""
        with contextlib.suppress(AlreadyExistsError):
            await asyncio.to_thread(self._store.create, key, body)

    async def create_manifest(self, key: Key, body: bytes) -> None:
        """Create a manifest; the key names its bytes, so what exists is the same."""
        self._bodies.turn()
        with contextlib.suppress(AlreadyExistsError):
            await asyncio.to_thread(self._store.create, key, body)

    async def read(self, key: Key, *, uncached: bool = False) -> bytes:
        """Return an object."""
        return await asyncio.to_thread(self._store.read, key, uncached=uncached)

    async def sees_probe(self, nonce: str) -> bool:
        """Return whether a probe is in this store."""
        return await asyncio.to_thread(sees_probe, self._store, nonce)

    async def read_indexes(self, expected: Sequence[Expected]) -> list[Index | None]:
        """Return indexes as the medium has them, as far as more need be known of them."""
        if self._bulk is not None and len(expected) > 1:
            looks = await self._bulk.look(expected)
        else:
            looks = [await asyncio.to_thread(look_at, self._store, one) for one in expected]
        return [self._looked(one, look) for one, look in zip(expected, looks, strict=True)]

    def _looked(self, expected: Expected, look: Look) -> Index | None:
        if look.body is not None:
            self._bodies.keep(expected.copy.index_sha256, look.body)
        return look.index

    async def shards(self, state: JobState, seq: int) -> tuple[Shard, ...]:
        """Return the shards of a READY checkpoint by rank, each file of them there and as long as it should be."""
        return await asyncio.to_thread(shards_there, self._store, state, seq)

    async def base_shards(self, base: Base) -> tuple[Shard, ...]:
        """Return the shards of a job's base, which is of another job."""
        return await asyncio.to_thread(base_shards, self._store, base)

    async def indexes(self, state: JobState, seq: int) -> tuple[Index, ...]:
        """Return the indexes of a READY checkpoint by rank."""
        return await asyncio.to_thread(_indexes, self._store, state, seq, self._bodies)

    async def newest_snap(self, job: str) -> JobState:
        """Return the newest fold of the log that is kept, or that of no records."""
        return await asyncio.to_thread(newest_snap, self._store, job)

    async def put_snap(self, state: JobState) -> None:
        """Keep a fold of the log."""
        await asyncio.to_thread(put_snap, self._store, state)

    async def gone(self, state: JobState) -> tuple[int, ...]:
        """Return the READYs that were removed from the store by hand."""
        return await asyncio.to_thread(gone, self._store, state)

    async def collect_garbage(self, state: JobState, watch: HoldWatch, *, now_s: Callable[[], float]) -> GcPlan:
        """Delete what the log has condemned, but for what readers hold."""
        return await asyncio.to_thread(collected, self._store, state, watch, now_s)

    async def digest_uncached(self, key: Key) -> str:
        """Return the digest of an object as the medium has it."""
        return await asyncio.to_thread(digest_of_object, self._store, key, uncached=True)


def _indexes(store: ObjectStore, state: JobState, seq: int, bodies: IndexBodies) -> tuple[Index, ...]:
    manifest, _ = read_manifest(store, state, seq)
    return tuple(_index(store, manifest, shard, bodies) for shard in manifest.shards)


def _index(store: ObjectStore, manifest: Manifest, shard: Shard, bodies: IndexBodies) -> Index:
    kept = bodies.get(shard.index_sha256)
    if kept is not None:
        return index_of_body(kept, manifest, shard)
    body = index_body(store, manifest, shard)
    index = index_of_body(body, manifest, shard)
    bodies.keep(shard.index_sha256, body)
    return index


def collected(store: ObjectStore, state: JobState, watch: HoldWatch, now_s: Callable[[], float]) -> GcPlan:
    """Delete what the log has condemned, but for what readers hold by ``watch``; return what that was."""
    plan = survey(store, state, list_holds=lambda: watch.look(store, state.job, now_s=now_s))
    execute(store, plan)
    return plan
