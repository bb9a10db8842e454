"""Reads one index and holds it against what is expected of it: in a thread, or in another process."""

from __future__ import annotations

import msgspec

from toprope.coordinator.index_checks import Expected, checked, needed
from toprope.store.checkpoint.manifest import MAX_INDEX_BYTES, Index
from toprope.store.checkpoint.ready import too_long
from toprope.store.objects.protocol import ObjectStore

KEPT_INDEX_BYTES = 64 * 1024 * 1024
"""How much of the indexes that were read is kept: those of a step that became READY are the base of the next one."""


class Look(msgspec.Struct, frozen=True):
    """What was found: the index, if more of it need be known, and its bytes, if those of all ranks can be kept."""

    index: Index | None
    body: bytes | None


def look_at(store: ObjectStore, expected: Expected) -> Look:
    """Return what an index is, as the medium has it.

    It is one request: a store reads no more than ``MAX_WHOLE_BYTES`` without being told how much, which is twice what
    an index may have.

    Raises:
        StoreError: it is not there, too long, or not as expected.
        UnavailableError: the store did not answer.
    """
    body = store.read(expected.key, uncached=True)
    if len(body) > MAX_INDEX_BYTES:
        raise too_long(expected.key, len(body), limit=MAX_INDEX_BYTES)
    *_, world = expected.identity
    kept = body if len(body) * world <= KEPT_INDEX_BYTES else None
    return Look(index=needed(checked(body, expected), expected), body=kept)
