"""Receipts as sidecars list them, of checkpoints that a builder has written."""

from __future__ import annotations

from tests.support.stores import JobBuilder

from toprope.coordinator.index_checks import Expected, expected_of
from toprope.coordinator.intents import ReadIndexes
from toprope.coordinator.readiness import Receipt
from toprope.coordinator.wire import Copy
from toprope.store.checkpoint.manifest import Index, Shard
from toprope.store.checkpoint.ready import read_index_at, read_manifest
from toprope.store.names import Key


def receipts_of(builder: JobBuilder, seq: int) -> tuple[Receipt, ...]:
    """Return the receipts of a READY, in order of rank; node ``a`` has written all of it."""
    manifest, _ = read_manifest(builder.store, builder.log.state, seq)
    return tuple(_receipt(read_index_at(builder.store, Key(one.index_key)), one) for one in manifest.shards)


def expected_indexes(builder: JobBuilder, seq: int) -> tuple[Expected, ...]:
    """Return what is expected of its indexes."""
    receipts = receipts_of(builder, seq)
    copy = receipts[0].copy
    of = ReadIndexes(
        attempt=copy.attempt, attempt_uid=copy.attempt_uid, step=copy.step, world=copy.world, receipts=receipts
    )
    return tuple(expected_of(builder.log.state, of, one) for one in receipts)


def _receipt(index: Index, shard: Shard) -> Receipt:
    file = index.files[0]
    copy = Copy(
        attempt=index.attempt,
        attempt_uid=index.attempt_uid,
        step=index.step,
        rank=index.rank,
        world=index.world,
        tier="object",
        bytes=index.bytes,
        digest=index.digest,
        key=file.key,
        index_key=shard.index_key,
        index_sha256=shard.index_sha256,
        stored_bytes=file.stored_bytes,
        stored_digest=file.stored_digest,
    )
    return Receipt(node="a", copy=copy)
