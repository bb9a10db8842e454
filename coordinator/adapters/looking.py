"""Reads one index and holds it against what is expected of it: in a thread, or in another process."""

from __future__ import annotations

import msgspec

from toprope.coordinator.index_checks import Expected, checked, needed
from toprope.store.checkpoint.manifest import MAX_INDEX_BYTES, Index
from toprope.store.checkpoint.ready import read_capped
from toprope.store.objects.protocol import ObjectStore

KEPT_INDEX_BYTES = 64 * 1024 * 1024
"""How much of the indexes that were read is kept: those of a step that became READY are the base of the next one."""


class Look(msgspec.Struct, frozen=True):
    """What was found: the index, if more of it need be known, and its bytes, if those of all ranks can be kept."""

    index: Index | None
    body: bytes | None


def look_at(store: ObjectStore, expected: Expected) -> Look:
    """Return what an index is, as the medium has it.

    Raises:
        StoreError: it is not there, too long, or not as expected.
        UnavailableError: the store did not answer.
    """
    body = read_capped(store, expected.key, limit=MAX_INDEX_BYTES, uncached=True)
    *_, world = expected.identity
    kept = body if len(body) * world <= KEPT_INDEX_BYTES else None
    return Look(index=needed(checked(body, expected), expected), body=kept)
