"""Each HTTP call of storing a shard in parts, reading it back and appending READY, with each fault of a server in turn.

READY stands in the log once, or not at all and then somebody was told, and what it names is what was handed over.
"""

from __future__ import annotations

import contextlib
import itertools
import os

import pytest
from tests.support.logs import ready
from tests.support.stores import JobBuilder, shard_image
from tests.support.strict_s3 import Fault, Operation, Rule, StrictS3

from toprope.coordinator.wire import ReadBackTask
from toprope.sidecar.object_tier import ObjectTier, read_back
from toprope.sidecar.values import Shard
from toprope.store.checkpoint.manifest import sha256
from toprope.store.digest import digest
from toprope.store.errors import UnavailableError
from toprope.store.log.chain import Sleep, append_steps, perform, read_log, run_steps
from toprope.store.log.fold import JobState
from toprope.store.objects.parts import Limits
from toprope.store.objects.protocol import ObjectStore
from toprope.store.objects.retry import BackOff, RetryStore
from toprope.store.objects.s3 import S3Store
from toprope.store.objects.s3_clients import Clients
from toprope.store.objects.s3_location import parse_location

AT_ONCE = BackOff(sleep=lambda _: None)
OPERATIONS: tuple[Operation, ...] = (
    "PutObject",
    "CreateMultipartUpload",
    "UploadPart",
    "CompleteMultipartUpload",
    "GetObject",
    "HeadObject",
)
FAULTS: tuple[Fault, ...] = (
    "request lost",
    "reply lost",
    "lands late",
    "503 SlowDown",
    "500 InternalError",
    "409 ConditionalRequestConflict",
    "body cut short",
    "body damaged",
)
TRIES = 4


def store_on(server: StrictS3) -> ObjectStore:
    """A store in which records are put in one piece, and shards and indexes in parts."""
    location = parse_location(server.root())
    limits = Limits(part_bytes=450, min_part_bytes=1)
    return RetryStore(S3Store(Clients(location=location, read_timeout_s=5), limits=limits, back_off=AT_ONCE), AT_ONCE)


def commit(store: ObjectStore, builder: JobBuilder, image: bytes) -> None:
    """Store, read back and append as sidecars and coordinator do, again after an error that says that this is right."""
    shard = Shard(attempt=1, step=20, attempt_uid="01" * 16, rank=0, world=1, bytes=len(image), digest=digest(image))
    for _ in range(TRIES):
        with contextlib.suppress(UnavailableError):
            receipt = ObjectTier(store, builder.name, codec="none").put(
                shard, memoryview(image), nonce=os.urandom(4).hex()
            )
            stored = ReadBackTask(node="b", key=receipt.key, bytes=receipt.stored_bytes, digest=receipt.stored_digest)
            assert read_back(store, stored).ok
            append_ready(store, builder.log.state, manifest=sha256(receipt.index_key.encode()))
            return
    raise AssertionError(f"not done after {TRIES} tries")


def append_ready(store: ObjectStore, state: JobState, *, manifest: str) -> None:
    record = ready(20, number=1, parent=state.head, manifest=manifest)
    steps = append_steps(
        state, lambda now: record if now.last_step < 20 else None, term=state.term, writer_id=state.writer_id
    )
    run_steps(steps, lambda call: None if isinstance(call, Sleep) else perform(store, call))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ready_stands_once_whatever_befalls_a_call(strict: StrictS3) -> None:
    strict.min_part_bytes = 1
    store = store_on(strict)
    for number, (operation, fault) in enumerate(itertools.product(OPERATIONS, FAULTS)):
        builder = JobBuilder(store, name=f"job{number}", world=1).begin()
        image = shard_image(step=20, rank=0, world=1, job_uid=builder.log.state.job_uid)
        rule = Rule(operation=operation, fault=fault)
        strict.rules[:] = [rule]
        commit(store, builder, image)
        strict.land()
        assert rule.times == 0, f"{operation}: {fault} did not happen"
        assert [one.step for one in read_log(store, builder.name).readies.values()] == [20], f"{operation}: {fault}"
        shards = [one.body for key, one in strict.objects.items() if key.startswith(f"{builder.name}/shards/")]
        assert image in shards, f"{operation}: {fault}"
        left = [one.parts for one in strict.uploads.values()]  # one whose id never came back; it is swept later
        assert not any(left), f"{operation}: {fault} left parts"
        assert not left or operation == "CreateMultipartUpload", f"{operation}: {fault} left an upload"
        strict.uploads.clear()
