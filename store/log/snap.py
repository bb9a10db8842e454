"""Folds of the log, beside it, so that a long log is read quickly: ``snap/<N>.json`` is that of its first N records.

A fold can be computed again and is never needed. A reader takes the newest one that is whole and whose record N-1 has
the bytes that it was made of, then reads on from record N; a damaged one is passed over with a warning. A whole one
of the same job whose record N-1 is gone proves that the end of the log was lost, which nothing else would tell of.
"""

from __future__ import annotations

import hashlib
import logging

import msgspec
from msgspec import UNSET, UnsetType

from toprope.store.errors import AlreadyExistsError, CorruptObjectError, LogCorruptError, MissingObjectError
from toprope.store.log.chain import apply
from toprope.store.log.fold import JobState
from toprope.store.log.ready_book import ReadyBook
from toprope.store.log.records import Attempt, Base, Metric, Ready, Taint
from toprope.store.names import Key, log_key, snap_key, snaps_prefix
from toprope.store.objects.protocol import ObjectStore

FORMAT = 1
EVERY = 500
"""After so many records a new fold is worth its bytes."""

MAX_SNAP_BYTES = 256 * 1024 * 1024

_LOG = logging.getLogger("toprope.store")


class Snap(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A ``JobState`` as JSON. ``sum`` is the SHA-256 of the rest, encoded with an empty one."""

    format: int = FORMAT
    job: str
    n: int
    tail_sha256: str
    job_uid: str
    spec_sha256: str | None
    term: int
    writer_id: str
    attempts: tuple[Attempt, ...]
    last_step: int
    head: int | None
    readies: tuple[tuple[int, Ready], ...]
    retired: tuple[int, ...]
    pins: tuple[int, ...]
    taints: tuple[Taint, ...]
    struck: tuple[tuple[str, int], ...]
    retain: str
    url: str
    passing: bool
    base: Base | UnsetType = UNSET
    metrics: tuple[Metric, ...] | UnsetType = UNSET
    settled: int | UnsetType = UNSET
    sum: str = ""


def encode(state: JobState) -> bytes:
    """Return the fold as JSON with sorted keys."""
    snap = Snap(
        job=state.job,
        n=state.n,
        tail_sha256=state.tail_sha256,
        job_uid=state.job_uid,
        spec_sha256=state.spec_sha256,
        term=state.term,
        writer_id=state.writer_id,
        attempts=state.attempts,
        last_step=state.last_step,
        head=state.head,
        readies=tuple(state.readies.items()),
        retired=tuple(sorted(state.retired)),
        pins=tuple(sorted(state.pins)),
        taints=state.taints,
        struck=tuple(sorted(state.struck)),
        retain=state.retain,
        url=state.url,
        passing=state.passing,
        base=UNSET if state.base is None else state.base,
        metrics=state.metrics or UNSET,
        settled=state.settled or UNSET,
    )
    return _encoded(msgspec.structs.replace(snap, sum=_sum(snap)))


def decode(body: bytes, *, key: Key, job: str) -> JobState:
    """Return the fold in these bytes.

    Raises:
        CorruptObjectError: they are none, were changed, or are of another job or number than their key says.
    """
    try:
        snap = msgspec.json.decode(body, type=Snap)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise CorruptObjectError(f"{key}: not a fold of a log: {error}") from error
    if snap.format != FORMAT or (snap.job, snap_key(job, snap.n)) != (job, key):
        raise CorruptObjectError(f"{key}: it is of format {snap.format}, job {snap.job!r} and {snap.n} records")
    if _sum(msgspec.structs.replace(snap, sum="")) != snap.sum or _encoded(snap) != body:
        raise CorruptObjectError(f"{key}: its bytes do not agree with its sum")
    return JobState(
        job=snap.job,
        n=snap.n,
        tail_sha256=snap.tail_sha256,
        job_uid=snap.job_uid,
        spec_sha256=snap.spec_sha256,
        term=snap.term,
        writer_id=snap.writer_id,
        attempts=snap.attempts,
        last_step=snap.last_step,
        head=snap.head,
        readies=ReadyBook(snap.readies),
        retired=frozenset(snap.retired),
        pins=frozenset(snap.pins),
        taints=snap.taints,
        struck=frozenset(snap.struck),
        retain=snap.retain,
        url=snap.url,
        passing=snap.passing,
        base=None if snap.base is UNSET else snap.base,
        metrics=() if snap.metrics is UNSET else snap.metrics,
        settled=0 if snap.settled is UNSET else snap.settled,
    )


def newest_snap(store: ObjectStore, job: str) -> JobState:
    """Return the newest fold that hangs together with the log, or that of no records if there is none.

    Raises:
        LogCorruptError: the log has lost records that a fold was made of.
        UnavailableError: the store did not answer.
    """
    for key in sorted(store.list(snaps_prefix(job)), reverse=True):
        if (state := _usable(store, key, job)) is not None:
            return state
    return JobState(job=job)


def check_end(store: ObjectStore, state: JobState) -> None:
    """Check that no fold that is kept was made of more records than the log was found to have. Raises as above."""
    for key in store.list(snaps_prefix(state.job)):
        if key > snap_key(state.job, state.n):
            _usable(store, key, state.job)


def _usable(store: ObjectStore, key: Key, job: str) -> JobState | None:
    try:
        return _checked(store, key, job)
    except (CorruptObjectError, MissingObjectError) as error:
        _LOG.warning("passed over, as the log tells it all: %s", error)
        return None


def _checked(store: ObjectStore, key: Key, job: str) -> JobState:
    size = store.size(key)
    if size > MAX_SNAP_BYTES:
        raise CorruptObjectError(f"{key}: {size} bytes; at most {MAX_SNAP_BYTES}")
    state = decode(store.read(key), key=key, job=job)
    tail = log_key(job, state.n - 1)
    try:
        body = store.read(tail)
    except MissingObjectError:
        if (uid := _uid_of(store, job)) != state.job_uid:
            raise CorruptObjectError(f"{key}: it is of job uid {state.job_uid}, and this log of {uid}") from None
        raise LogCorruptError(
            f"LOG_CORRUPT record {state.n - 1} ({tail}): it is missing, although {key} was made of it, so the end of "
            "the log was lost. Nothing was changed; restore this object from a copy of the store"
        ) from None
    if hashlib.sha256(body).hexdigest() != state.tail_sha256:
        raise CorruptObjectError(f"{key}: it was made of another log than this one, whose record is {tail}")
    return state


def _uid_of(store: ObjectStore, job: str) -> str:
    state, _ = apply(JobState(job=job), store.read(log_key(job, 0)))
    return state.job_uid


def put_snap(store: ObjectStore, state: JobState) -> None:
    """Write the fold, unless it is there.

    Raises:
        UnavailableError: the store did not answer.
    """
    try:
        store.create(snap_key(state.job, state.n), encode(state))
    except AlreadyExistsError:
        return


def _encoded(snap: Snap) -> bytes:
    return msgspec.json.encode(snap, order="deterministic")


def _sum(snap: Snap) -> str:
    return hashlib.sha256(_encoded(snap)).hexdigest()
