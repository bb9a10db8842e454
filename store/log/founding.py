"""Founding: the log of a job that no trainer began, because its checkpoint was brought here from somewhere else.

Whoever founds is elected for the moment. The records come last, after every object that they name, so that whatever
crashes before leaves no checkpoint behind that looks READY.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec

from toprope.store.errors import UsageError
from toprope.store.log.chain import append, read_entries
from toprope.store.log.fold import JobState
from toprope.store.log.records import Elected, Record
from toprope.store.objects.protocol import ObjectStore

_NOT_COMPARED = {"term": 0, "writer_id": "", "nonce": "", "prev": "", "sum": ""}


def found(store: ObjectStore, job: str, records: Sequence[Record]) -> JobState:
    """Append the records that the log of ``job`` lacks of these, the first of which is JOB; return its state.

    Done twice, or again after it was interrupted, it adds only what is missing.

    Raises:
        UsageError: the log has other records; nothing was appended.
        FencedError: somebody else was elected meanwhile.
        UnavailableError: the outcome of an append is open; found again.
    """
    state, kept = _checked(store, job, records)
    writer_id = f"ckpt-{secrets.token_hex(8)}"
    if state.n == 0 and records:
        state, kept = _append(store, state, records[0], only_at=0, writer_id=writer_id), 1
    if kept == len(records):
        return state
    append(store, state, lambda _: Elected(), term=state.term, writer_id=writer_id)
    state, kept = _checked(store, job, records)  # another one may have founded too, until this election fenced it
    for record in records[kept:]:
        state = _append(store, state, record, only_at=state.n, writer_id=writer_id)
    return state


def check_log(store: ObjectStore, job: str, records: Sequence[Record]) -> JobState:
    """Return the state of a log that has none but the first of these records, or none at all.

    Raises:
        UsageError: it has others.
    """
    state, _ = _checked(store, job, records)
    return state


def _checked(store: ObjectStore, job: str, records: Sequence[Record]) -> tuple[JobState, int]:
    """Return the state of a log, and how many of these records it has; raises as ``check_log``."""
    state, kept = JobState(job=job), 0
    for entry, after in read_entries(store, job):
        state = after
        if isinstance(entry.record, Elected):
            continue
        if kept == len(records) or _plain(entry.record) != _plain(records[kept]):
            raise taken(job, entry.number)
        kept += 1
    return state, kept


def taken(job: str, number: int) -> UsageError:
    """Return the error that says that a job of that name is there, and has another record of that number."""
    return UsageError(
        f"job {job}: there is a job of this name with another history (record {number} of its log differs); nothing "
        "was changed. Give another store, or another name"
    )


def _append(store: ObjectStore, state: JobState, record: Record, *, only_at: int, writer_id: str) -> JobState:
    done = append(store, state, lambda now: record if now.n == only_at else None, term=state.term, writer_id=writer_id)
    if done.seq is None:
        raise taken(state.job, only_at)
    return done.state


def _plain(record: Record) -> Record:
    return msgspec.structs.replace(record, **_NOT_COMPARED)
