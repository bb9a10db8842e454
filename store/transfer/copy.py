"""Copy: a job, or one of its checkpoints, from one store into another; each object checked on its way.

Objects go first, in any order, and the log last, record by record: until its READY is there, what lies at the
destination is no checkpoint. Each object is created only if it is missing, so a copy that was interrupted goes on when
it is done again, and one that came to its end brings a copy up to date.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

import msgspec

from toprope.store.digest import Hasher, chunks_of_object
from toprope.store.errors import (
    AlreadyExistsError,
    CorruptObjectError,
    MissingObjectError,
    StoreError,
    UsageError,
)
from toprope.store.log.chain import Entry, encode, read_log
from toprope.store.log.fold import JobState
from toprope.store.log.founding import check_log, found, taken
from toprope.store.log.records import Attempt, Job, Record
from toprope.store.look.show import JobLog, NamedObject, objects_of
from toprope.store.names import Key, facts_key
from toprope.store.objects.protocol import ObjectStore
from toprope.store.spool import mapped, spool
from toprope.store.transfer.restore import plan as plan_restore


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """What a copy brought over. ``there`` is how many objects the destination had already, checked like the others."""

    job: str
    checkpoints: tuple[int, ...]
    objects: int
    bytes: int
    there: int
    records: int


def plan(source: ObjectStore, log: JobLog, *, step: int | None = None) -> tuple[NamedObject, ...]:
    """Return the objects to copy, each once, without the log: those that the job names, or those of one checkpoint.

    Raises:
        NothingToVerifyError: there is no READY of that step.
        UsageError: it is tainted.
        StoreError: a manifest or an index is damaged or missing.
    """
    state = log.state
    seqs = state.live if step is None else (_chosen(state, step),)
    records = [entry.record for entry in log.entries] if step is None else _founding(state, seqs[0])
    facts = [NamedObject(kind="facts", key=facts_key(state.job, one), digest=one) for one in _facts(records)]
    of_checkpoints = (one for seq in seqs for one in objects_of(source, state, seq))
    return tuple({one.key: one for one in (*facts, *of_checkpoints)}.values())


def copy(
    source: ObjectStore, target: ObjectStore, log: JobLog, *, objects: Sequence[NamedObject], step: int | None = None
) -> Copied:
    """Bring ``objects``, which ``plan`` returned, and then the log to ``target``.

    Raises:
        UsageError: the destination has a job of that name with another history; nothing was changed.
        StoreError: an object is damaged or missing, at either end; the log was not touched.
        UnavailableError: a store did not answer; copy again.
    """
    state = log.state
    seqs = state.live if step is None else (_chosen(state, step),)
    records = () if step is None else _founding(state, seqs[0])
    _check_target(target, log) if step is None else check_log(target, state.job, records)
    sizes = [_bring(source, target, one, job=state.job) for one in objects]
    if step is None:
        appended = sum(_bring_record(target, entry) for entry in log.entries)
    else:
        before = read_log(target, state.job).n
        appended = found(target, state.job, records).n - before
    return Copied(
        job=state.job,
        checkpoints=tuple(state.readies[seq].step for seq in seqs),
        objects=sum(size is not None for size in sizes),
        bytes=sum(size or 0 for size in sizes),
        there=sum(size is None for size in sizes),
        records=appended,
    )


def _chosen(state: JobState, step: int) -> int:
    (seq,) = plan_restore(state, step=step)
    if state.is_tainted(attempt=state.readies[seq].attempt, step=step):
        raise UsageError(f"job {state.job}: step {step} is tainted; only a copy of the whole job takes it along")
    return seq


def _founding(state: JobState, seq: int) -> tuple[Record, ...]:
    """Return the log of a job that has this one checkpoint: its attempt keeps number and uid, which its shards name."""
    ready = state.readies[seq]
    attempts = state.attempts[: ready.attempt]
    spec = attempts[-1].spec_sha256
    return (
        Job(uid=state.job_uid, name=state.job),
        Job(uid=state.job_uid, name=state.job, spec_sha256=spec),
        *(_as_fresh(attempt, spec) for attempt in attempts),
        msgspec.structs.replace(ready, parent=None),
    )


def _as_fresh(attempt: Attempt, spec_sha256: str) -> Attempt:
    return msgspec.structs.replace(
        attempt,
        ready=None,
        held=None,
        from_step=0,
        struck=(),
        spec_sha256=spec_sha256,
        why="copied",
    )


def _facts(records: Sequence[Record]) -> tuple[str, ...]:
    """Return the hashes of what these records name."""
    named = [
        digest
        for record in records
        if isinstance(record, Attempt)
        for digest in (record.spec_sha256, record.facts_sha256)
    ]
    named += [record.spec_sha256 for record in records if isinstance(record, Job) and record.spec_sha256 is not None]
    return tuple(dict.fromkeys(named))


def _check_target(target: ObjectStore, log: JobLog) -> None:
    """Check that what the destination has of the log is a beginning of it, or goes on after it."""
    for entry in log.entries:
        try:
            there = target.read(entry.key)
        except MissingObjectError:
            return
        if there != encode(entry.record):
            raise taken(log.state.job, entry.number)


def _bring(source: ObjectStore, target: ObjectStore, one: NamedObject, *, job: str) -> int | None:
    """Bring an object over unless it is there, and return its length or None. It is checked in both cases."""
    key = Key(one.key)
    try:
        size = source.size(key)
    except MissingObjectError as error:
        raise StoreError(f"job {job}: {error}; the log was not copied") from error
    if _is_there(target, one, job=job):
        return None
    with spool(size) as file:
        _check(one, _digest(source, one, file), job=job, where="the source")
        with mapped(file) as body:
            try:
                target.create(key, body)
            except AlreadyExistsError:
                _is_there(target, one, job=job)
                return None
    return size


def _is_there(target: ObjectStore, one: NamedObject, *, job: str) -> bool:
    try:
        target.size(Key(one.key))
    except MissingObjectError:
        return False
    _check(one, _digest(target, one), job=job, where="the destination")
    return True


def _digest(store: ObjectStore, one: NamedObject, file: BinaryIO | None = None) -> str:
    """Return the digest of an object, and write its bytes to ``file``."""
    hasher = Hasher() if one.kind == "shard" else hashlib.sha256()
    for chunk in chunks_of_object(store, Key(one.key)):
        hasher.update(chunk)
        if file is not None:
            file.write(chunk)
    return hasher.hexdigest()


def _check(one: NamedObject, found_digest: str, *, job: str, where: str) -> None:
    if found_digest != one.digest:
        raise CorruptObjectError(
            f"job {job}: at {where} {one.key} has digest {found_digest}, expected {one.digest}; "
            "the log was not copied. `ckpt verify` says more"
        )


def _bring_record(target: ObjectStore, entry: Entry) -> bool:
    """Bring a record over and return True, or False if it is there.

    Raises:
        UsageError: another one is.
    """
    body = encode(entry.record)
    try:
        target.create(entry.key, body)
    except AlreadyExistsError as error:
        if target.read(entry.key) != body:
            raise taken(entry.key.partition("/")[0], entry.number) from error
        return False
    return True
