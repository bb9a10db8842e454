"""The job log: records under consecutive keys, each created once, each naming the one before by its SHA-256.

Appending is a generator, ``append_steps``, that yields the calls it needs and is sent their results. ``append``
performs them on the spot and ``drive`` in an event loop; the rules are the same lines for both.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, assert_never

import msgspec

from toprope.store.errors import (
    AlreadyExistsError,
    CkptError,
    FencedError,
    LogCorruptError,
    MissingObjectError,
    UnavailableError,
)
from toprope.store.log.fold import JobState, fold, violation
from toprope.store.log.records import MAX_RECORD_BYTES, Elected, Job, Record
from toprope.store.names import Key, is_log_key, log_key, log_prefix
from toprope.store.objects.protocol import ObjectStore

BACK_OFF_S = (0.1, 0.2, 0.5, 1.0, 2.0)
"""How long an append waits before each new try of a call whose outcome is open. Then it gives up."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A record of the log with its number, its key and the length of its bytes."""

    number: int
    key: Key
    bytes: int
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Create:
    """A call: ``ObjectStore.create``."""

    key: Key
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A call: ``ObjectStore.read``."""

    key: Key
    uncached: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleep:
    """A call: wait."""

    seconds: float


Call: TypeAlias = Create | Read | Sleep
Steps: TypeAlias = Generator[Call, bytes | None, _T]


@dataclass(frozen=True, slots=True, kw_only=True)
class Appended:
    """The outcome of an append: the log as it now is, and the record if one was written, at number ``seq``."""

    state: JobState
    seq: int | None
    record: Record | None


def encode(record: Record) -> bytes:
    """Return the one encoding of a record: JSON, keys sorted, no white space, ``sum`` computed."""
    fields = msgspec.to_builtins(record)
    del fields["sum"]
    total = hashlib.sha256(msgspec.json.encode(fields, order="deterministic")).hexdigest()
    body = msgspec.json.encode(fields | {"sum": total}, order="deterministic")
    assert len(body) <= MAX_RECORD_BYTES, f"a record of {len(body)} bytes; name large facts by their hash"
    return body


def apply(state: JobState, body: bytes) -> tuple[JobState, Record]:
    """Return the state after the record in these bytes, which are number ``state.n`` of the log, and the record.

    Raises:
        LogCorruptError: it is not a record, is damaged, or may not follow what is before it.
    """
    record = _decoded(state, body)
    if why := violation(state, record):
        raise _corrupt(state, why)
    return fold(state, record, record_sha256=hashlib.sha256(body).hexdigest()), record


def _decoded(state: JobState, body: bytes) -> Record:
    if len(body) > MAX_RECORD_BYTES:
        raise _corrupt(state, f"{len(body)} bytes; a record has at most {MAX_RECORD_BYTES}")
    try:
        record: Record = msgspec.json.decode(body, type=Record)
        canonical = encode(record)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise _corrupt(state, f"not a record: {error}") from error
    if canonical != body:
        raise _corrupt(state, "its bytes do not agree with its sum: it was changed after it was written")
    return record


def _corrupt(state: JobState, why: str) -> LogCorruptError:
    return LogCorruptError(
        f"LOG_CORRUPT record {state.n} ({log_key(state.job, state.n)}): {why}. "
        "Nothing was changed; restore this object from a copy of the store"
    )


def read_entries(store: ObjectStore, job: str) -> Iterator[tuple[Entry, JobState]]:
    """Yield each record of the log with the state after it, in order.

    Raises:
        LogCorruptError: a record is damaged, illegal, or missing before a later one.
        UnavailableError: the store did not answer.
    """
    state = JobState(job=job)
    body = b""
    while (following := _read_if_there(store, log_key(job, state.n))) is not None:
        body = following
        entry, state = _entry(state, body)
        yield entry, state
    _check_no_gap(store, state)
    if state.n and store.read(log_key(job, state.n - 1), uncached=True) != body:
        raise LogCorruptError(
            f"LOG_CORRUPT record {state.n - 1} ({log_key(job, state.n - 1)}): "
            "the medium holds other bytes than the cache. Nothing was changed"
        )


def _entry(state: JobState, body: bytes) -> tuple[Entry, JobState]:
    after, record = apply(state, body)
    return Entry(number=state.n, key=log_key(state.job, state.n), bytes=len(body), record=record), after


def follow_entries(store: ObjectStore, state: JobState, *, wait: Callable[[], None]) -> Iterator[Entry]:
    """Yield each record past ``state`` as it comes, without an end; ``wait`` is called when there is none yet.

    Raises:
        LogCorruptError: a record is damaged or illegal.
        UnavailableError: the store did not answer.
    """
    while True:
        body = _read_if_there(store, log_key(state.job, state.n))
        if body is None:
            wait()
        else:
            entry, state = _entry(state, body)
            yield entry


def read_log(store: ObjectStore, job: str) -> JobState:
    """Return the fold of the whole log; ``n`` is 0 if there is none. Raises as ``read_entries``."""
    state = JobState(job=job)
    for _, after in read_entries(store, job):
        state = after
    return state


def read_on(store: ObjectStore, state: JobState) -> JobState:
    """Return the log as it is now, given the fold of its beginning. Raises as ``append_steps``."""
    return run_steps(_catch_up(state), lambda call: perform(store, call))


def glance(store: ObjectStore, state: JobState) -> JobState:
    """Return the fold with what has been appended since, for whoever need not be sure of it. Asks once, and no medium.

    Raises:
        LogCorruptError: a record is damaged or illegal, or ``state`` is not of this log.
        UnavailableError: the store did not answer.
    """
    while (body := _read_if_there(store, log_key(state.job, state.n))) is not None:
        state, _ = apply(state, body)
    return state


def _read_if_there(store: ObjectStore, key: Key) -> bytes | None:
    try:
        return store.read(key)
    except MissingObjectError:
        return None


def _check_no_gap(store: ObjectStore, state: JobState) -> None:
    """Raise if records lie beyond the end of the log and the end is still the end."""
    end = log_key(state.job, state.n)
    keys = store.list(log_prefix(state.job))
    beyond = next((key for key in keys if key > end and is_log_key(state.job, key)), None)
    if beyond is not None and _read_if_there(store, end) is None:
        raise _corrupt(state, f"it is missing, although {beyond} is there")


def append_steps(
    state: JobState,
    make: Callable[[JobState], Record | None],
    *,
    term: int,
    writer_id: str,
    draw_nonce: Callable[[], str] = lambda: secrets.token_hex(16),
) -> Steps[Appended]:
    """Append what ``make`` decides on, once, whatever is lost on the way.

    ``make`` is given the state of the whole log and returns a record without its envelope, or None to append nothing.
    It is asked again whenever another record came first. ``term`` is the writer's own; an Elected takes the next one.
    One writer runs one append at a time.

    Raises:
        FencedError: a later term has been elected.
        UnavailableError: the outcome is open: the record may be there or may land yet. Append again from ``state``.
        LogCorruptError: the log is damaged.
    """
    while True:
        state = yield from _catch_up(state)
        wanted = make(state)
        if wanted is None:
            return Appended(state=state, seq=None, record=None)
        if state.term > term and not isinstance(wanted, Elected):
            raise FencedError(
                f"job {state.job}: term {state.term} of {state.writer_id} has been elected; "
                f"{writer_id} of term {term} appends nothing more"
            )
        begins = state.n == 0 or isinstance(wanted, Elected)
        if begins and (yield from _is_passed(state)):
            continue
        record = _stamped(state, wanted, writer_id=writer_id, nonce=draw_nonce())
        body = encode(record)
        if (yield from _put(log_key(state.job, state.n), body)):
            after, written = apply(state, body)
            return Appended(state=after, seq=state.n, record=written)


def _stamped(state: JobState, record: Record, *, writer_id: str, nonce: str) -> Record:
    if state.n == 0 and isinstance(record, Job):
        term = 0
    else:
        term = state.term + 1 if isinstance(record, Elected) else state.term
    stamped = msgspec.structs.replace(record, term=term, writer_id=writer_id, nonce=nonce, prev=state.tail_sha256)
    why = violation(state, stamped)
    assert why is None, f"record {state.n} of {state.job} would be illegal: {why}"
    return stamped


def _catch_up(state: JobState) -> Steps[JobState]:
    """Fold in what others have appended, and make sure of the last of it before anybody acts on it."""
    known = state.n
    while True:
        body = yield from _read(Read(key=log_key(state.job, state.n)))
        if body is None:
            break
        state, _ = apply(state, body)
    if state.n > known:
        yield from _read(Read(key=log_key(state.job, state.n - 1), uncached=True))
    return state


def _is_passed(state: JobState) -> Steps[bool]:
    """Say whether the log has grown since; whoever begins to write looks first whether it does not end in a hole."""
    beyond = log_key(state.job, state.n + 1)
    if (yield from _read(Read(key=beyond))) is None:
        return False
    if (yield from _read(Read(key=log_key(state.job, state.n)))) is None:
        raise _corrupt(state, f"it is missing, although {beyond} is there")
    return True


def _put(key: Key, body: bytes) -> Steps[bool]:
    """Return True once this body is the object of ``key``, False once another one is; never guess."""
    refused: UnavailableError | None = None
    for delay_s in (*BACK_OFF_S, None):
        try:
            yield Create(key=key, body=body)
        except AlreadyExistsError:
            pass
        except UnavailableError as error:
            refused = error
            if delay_s is not None:
                yield Sleep(seconds=delay_s)
        else:
            return True
        found = yield from _read(Read(key=key, uncached=True))
        if found is not None:
            return found == body
    why = f" ({refused})" if refused is not None else ""
    text = f"{key}: the store does not say whether this record was written{why}; append again later"
    raise UnavailableError(text) from refused


def _read(call: Read) -> Steps[bytes | None]:
    """Return the bytes of an object, or None if there is none, trying again while the store does not answer."""
    for delay_s in BACK_OFF_S:
        try:
            return (yield call)
        except MissingObjectError:
            return None
        except UnavailableError:
            yield Sleep(seconds=delay_s)
    try:
        return (yield call)
    except MissingObjectError:
        return None


def append(
    store: ObjectStore,
    state: JobState,
    make: Callable[[JobState], Record | None],
    *,
    term: int,
    writer_id: str,
) -> Appended:
    """Append as ``append_steps`` does, performing each call at once."""
    steps = append_steps(state, make, term=term, writer_id=writer_id)
    return run_steps(steps, lambda call: perform(store, call))


def perform(store: ObjectStore, call: Call) -> bytes | None:
    """Do one call."""
    match call:
        case Create():
            store.create(call.key, call.body)
            return None
        case Read():
            return store.read(call.key, uncached=call.uncached)
        case Sleep():
            time.sleep(call.seconds)
            return None
        case _:
            assert_never(call)


def run_steps(steps: Steps[_T], call: Callable[[Call], bytes | None]) -> _T:
    """Run a generator of calls to its end, and return what it returns."""
    resume: Callable[[Any], Call] = steps.send
    argument: object = None
    while True:
        try:
            wanted = resume(argument)
        except StopIteration as done:
            value: _T = done.value
            return value
        try:
            resume, argument = steps.send, call(wanted)
        except CkptError as error:
            resume, argument = steps.throw, error


async def drive(steps: Steps[_T], call: Callable[[Call], Awaitable[bytes | None]]) -> _T:
    """Run a generator of calls to its end in an event loop, and return what it returns."""
    resume: Callable[[Any], Call] = steps.send
    argument: object = None
    while True:
        try:
            wanted = resume(argument)
        except StopIteration as done:
            value: _T = done.value
            return value
        try:
            resume, argument = steps.send, await call(wanted)
        except CkptError as error:
            resume, argument = steps.throw, error
