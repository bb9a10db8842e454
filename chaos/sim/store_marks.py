"""Marks of what coordinators do: commits from the manifest to the record, and rounds of deletion.

They are made at the calls of the simulated store, so that the real coordinator needs no mark of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from toprope.chaos.sim.world import World
from toprope.store.errors import CkptError
from toprope.store.log.records import Ready, Record
from toprope.store.names import Key, written_at

COMMIT, TIDYING = "manifest commit", "garbage collection"


def mark_commits(world: World) -> None:
    """Mark each commit: it begins when its manifest is written, and ends when the record is in the log."""
    store, trace = world.store, world.trace
    create, on_create = store.create, store.on_create

    def creating(key: Key, body: bytes | memoryview) -> None:
        about = _committed(world.job, key, bytes(body))
        if about is not None and "/manifests/" in key:
            trace.mark(COMMIT, "begins", about)
        try:
            create(key, body)
        except CkptError:
            if about is not None:
                trace.mark(COMMIT, "fails", about)
            raise

    def created(key: Key, body: bytes, who: str) -> None:
        on_create(key, body, who)
        about = _committed(world.job, key, body)
        if about is not None and "/log/" in key:
            trace.mark(COMMIT, "ends", about)

    store.create, store.on_create = creating, created  # type: ignore[method-assign]  # the store of one history


def _committed(job: str, key: Key, body: bytes) -> tuple[str, int, int] | None:
    """Return attempt and step of a manifest or of a READY."""
    if "/manifests/" in key and (at := written_at(job, key)) is not None:
        return str(at[0]), at[1], -1
    if "/log/" in key:
        record: Record = msgspec.json.decode(body, type=Record)
        if isinstance(record, Ready):
            return str(record.attempt), record.step, -1
    return None


class Deletions:
    """Marks each call that deletes shards; ``keys`` are those of the last one. ``on_deleted`` hears of each shard."""

    def __init__(self, world: World, *, on_deleted: Callable[[], None]) -> None:
        self.keys: frozenset[Key] = frozenset()
        self._trace = world.trace
        self._delete = world.store.delete
        self._on_delete = world.store.on_delete
        self._tell = on_deleted
        world.store.delete, world.store.on_delete = self._deleting, self._deleted  # type: ignore[method-assign]  # of one history

    def _deleting(self, keys: Sequence[Key]) -> None:
        if not any("/shards/" in key for key in keys):
            self._delete(keys)
            return
        self.keys = frozenset(keys)
        about = (str(keys[0]), 0, -1)
        self._trace.mark(TIDYING, "begins", about)
        try:
            self._delete(keys)
        except CkptError:
            self._trace.mark(TIDYING, "fails", about)
            raise
        self._trace.mark(TIDYING, "ends", about)

    def _deleted(self, key: Key, who: str) -> None:
        self._on_delete(key, who)
        if "/shards/" in key:
            self._tell()
