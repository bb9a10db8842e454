"""What the index of a shard must say before its step becomes READY. Pure.

Each is held against its own receipt and against nothing else, so they can be read in any order, in another process,
and before all ranks have written theirs.
"""

from __future__ import annotations

import msgspec

from toprope.coordinator.intents import CommitStep, ReadIndexes
from toprope.coordinator.readiness import Receipt
from toprope.coordinator.wire import Copy
from toprope.store.checkpoint import manifest
from toprope.store.checkpoint.manifest import Index
from toprope.store.checkpoint.ready import check_places
from toprope.store.errors import CorruptObjectError, UsageError
from toprope.store.log.fold import JobState
from toprope.store.names import Key, index_key


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """An index as it must be, under its key: what its receipt ``copy`` says, and of whom.

    ``whole``: it is wanted even if it stands alone, since others of its step point into its file.
    """

    job: str
    key: Key
    identity: tuple[str, int, str, int, int, int]
    """Job uid, attempt, its uid, step, rank and world size."""
    copy: Copy
    whole: bool = False


def expected_of(state: JobState, of: CommitStep | ReadIndexes, receipt: Receipt, *, whole: bool = False) -> Expected:
    """Return what is expected of the index of a receipt.

    Its key is computed: nothing is read because a node says that it lies there.

    Raises:
        CorruptObjectError: the receipt names another key.
    """
    copy = receipt.copy
    said = f"the receipt of rank {copy.rank} from node {receipt.node} names the index {copy.index_key[:200]!r}"
    try:
        key = index_key(
            state.job, attempt=of.attempt, step=of.step, rank=copy.rank, world=of.world, sha256=copy.index_sha256
        )
    except UsageError as error:
        raise CorruptObjectError(f"{said} of SHA-256 {copy.index_sha256[:80]!r}: {error}") from error
    if copy.index_key != key:
        raise CorruptObjectError(f"{said}; expected {key}")
    identity = (state.job_uid, of.attempt, of.attempt_uid, of.step, copy.rank, of.world)
    return Expected(job=state.job, key=key, identity=identity, copy=copy, whole=whole)


def checked(body: bytes, expected: Expected) -> Index:
    """Return the index in these bytes, which is as expected.

    Raises:
        CorruptObjectError: it is not, or it does not name files in which what it names can lie.
    """
    copy = expected.copy
    index = manifest.decode(body, Index, key=expected.key, expected_sha256=copy.index_sha256)
    said = (index.job_uid, index.attempt, index.attempt_uid, index.step, index.rank, index.world)
    if said != expected.identity:
        raise CorruptObjectError(
            f"index {expected.key} is of (job, attempt, uid, step, rank, world) {said}, expected {expected.identity}"
        )
    found = (
        index.bytes,
        index.digest,
        *((file.key, file.stored_bytes, file.stored_digest) for file in index.files[:1]),
    )
    receipt = (copy.bytes, copy.digest, (copy.key, copy.stored_bytes, copy.stored_digest))
    if found != receipt:
        raise CorruptObjectError(f"index {expected.key} names {found}, its receipt {receipt}")
    check_places(index, job=expected.job, key=expected.key)
    return index


def needed(index: Index, expected: Expected) -> Index | None:
    """Return an index that is right, or None if nothing more need be known of it.

    That is so of one that points into no file but its own: those of thousands of ranks together would not fit into
    memory.
    """
    alone = index.base is None and len(index.files) == 1
    return None if alone and not expected.whole else index
