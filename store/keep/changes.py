"""Changes of a job that a person asks for: pins, taints, the policy of retention, another spec.

A change is a record without its envelope. The coordinator appends it; where none answers, a command is elected for the
moment and does. Both decide by ``checked``, so both refuse the same things in the same words.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import msgspec
from msgspec import UNSET

from toprope.store.errors import FencedError, NothingToVerifyError, UsageError
from toprope.store.keep.retention import parse_policy
from toprope.store.log.chain import append, read_on
from toprope.store.log.fold import METRIC_NAME, JobState, covers, needed_by, violation
from toprope.store.log.records import NOBODY, Attempt, Elected, Job, Metric, Pin, Record, Retire, Taint, Unpin
from toprope.store.log.snap import newest_snap
from toprope.store.objects.protocol import ObjectStore

Change: TypeAlias = Job | Pin | Unpin | Taint | Metric | Retire | Attempt
MAX_CHANGE_BYTES = 32 * 1024
NO_CHANGE = "not a change of a job"
"""How a coordinator begins to refuse what it does not know as one."""

_REASON_CHARS_MAX = 1000
_TRIES = 5


class ChangeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a command asks of the coordinator of a job.

    ``probe`` is the nonce of a probe in the store whose job is to be changed: a copy of that store has the same job.
    """

    job_uid: str
    probe: str
    change: Change


class OtherStoreError(UsageError):
    """The coordinator that was asked serves another store; nothing was changed."""


class ChangeAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The number of the record that was appended; None if things were so already."""

    seq: int | None


def checked(state: JobState, change: Change) -> Change | None:
    """Return the change if it may be made now, None if things are so already.

    Raises:
        UsageError: it may not; the message says why.
    """
    wanted = _wanted(state, change)
    if wanted is not None:
        elected = replace(state, term=max(state.term, 1))
        stamps = {"term": elected.term, "writer_id": elected.writer_id, "nonce": "0" * 8, "prev": elected.tail_sha256}
        if why := violation(elected, msgspec.structs.replace(wanted, **stamps)):
            raise UsageError(f"job {state.job}: that may not be changed so: {why}")
    return wanted


def _wanted(state: JobState, change: Change) -> Change | None:  # noqa: PLR0911 - one line per kind of change
    match change:
        case Pin():
            _check_live(state, change.seq, "pinned")
            return None if change.seq in state.pins else change
        case Unpin():
            _check_live(state, change.seq, "unpinned")
            return change if change.seq in state.pins else None
        case Taint():
            return _checked_taint(state, change)
        case Metric():
            return _checked_metric(state, change)
        case Retire():
            needed = needed_by(state)
            for seq in change.seqs:
                _check_live(state, seq, "retired")
                if seq in needed:
                    raise UsageError(f"READY {seq} of job {state.job} can't be retired: it is {needed[seq]}")
            return change if change.seqs else None
        case Job():
            return _checked_job(state, change)
        case Attempt():
            return _checked_rollback(state, change)


def _check_live(state: JobState, seq: int, done: str) -> None:
    if not state.is_live(seq):
        why = "is retired" if seq in state.retired else "does not exist"
        raise UsageError(f"READY {seq} of job {state.job} {why}, so it can't be {done}")


def _checked_taint(state: JobState, taint: Taint) -> Taint | None:
    job = f"job {state.job}"
    if not taint.reason.strip() or len(taint.reason) > _REASON_CHARS_MAX:
        raise UsageError(f"{job}: a taint needs a reason of 1 to {_REASON_CHARS_MAX} characters")
    if not 1 <= taint.attempt <= state.attempt_number:
        raise UsageError(f"{job}: there is no attempt {taint.attempt}; there are {state.attempt_number}")
    if taint.from_step < 1 or (taint.to_step is not None and taint.to_step < taint.from_step):
        raise UsageError(f"{job}: steps {taint.from_step} to {taint.to_step} are no range; the first step is 1")
    same = (taint.attempt, taint.from_step, taint.to_step)
    known = {(one.attempt, one.from_step, one.to_step) for one in state.taints}
    return None if same in known else taint


def _checked_metric(state: JobState, metric: Metric) -> Metric | None:
    _check_live(state, metric.seq, "measured")
    if METRIC_NAME.fullmatch(metric.name) is None or not math.isfinite(metric.value):
        raise UsageError(
            f"metric {metric.name[:80]!r} of {metric.value} is not usable: give NAME=VALUE, as val_loss=2.31; a name "
            "is 1 to 64 of a-z A-Z 0-9 . _ / - and begins with a letter or digit, a value is a finite number"
        )
    return None if state.values_of(metric.name).get(metric.seq) == metric.value else metric


def taints_of(
    state: JobState, *, from_step: int, to_step: int | None, reason: str, attempt: int | None = None
) -> tuple[Taint, ...]:
    """Return the taints of these steps (to the end of the job without ``to_step``): of one attempt, or of the lineage.

    Raises:
        UsageError: the lineage has none of these steps.
    """
    if to_step is not None and to_step < from_step:
        raise UsageError(f"steps {from_step} to {to_step} are no range: the last is before the first")
    if attempt is not None:
        return (Taint(attempt=attempt, from_step=from_step, to_step=to_step, reason=reason),)
    numbers = {one.uid: one.attempt for one in state.attempts}
    taints = []
    for stretch in state.lineage():
        begin, ends = max(from_step, stretch.after + 1), [end for end in (to_step, stretch.upto) if end is not None]
        if not ends or begin <= min(ends):
            end = min(ends) if ends else None
            taints.append(Taint(attempt=numbers[stretch.attempt_uid], from_step=begin, to_step=end, reason=reason))
    if not taints:
        raise UsageError(f"job {state.job}: no attempt that led to where it is has step {from_step}")
    return tuple(reversed(taints))


def given_up(state: JobState, taints: Sequence[Taint]) -> tuple[int, ...]:
    """Return the READY steps, in order, that nothing may begin from any more once these taints are in the log.

    Raises:
        NothingToVerifyError: they cover no step that was ever READY, and none past the newest, which nodes may hold.
    """
    newest, covered = dict.fromkeys(range(1, state.attempt_number + 1), 0), list[int]()
    for seq, ready in state.readies.items():
        newest[ready.attempt] = max(newest[ready.attempt], ready.step)
        if any(covers(taint, attempt=ready.attempt, step=ready.step) for taint in taints):
            covered.append(seq)
    past = any(taint.to_step is None or taint.to_step > newest[taint.attempt] for taint in taints)
    if not covered and not past:
        first, last = taints[0].from_step, taints[-1].to_step
        steps = f"step {first}" if first == last else f"any of the steps {first} to {last}"
        have = sorted({ready.step for ready in state.readies.values()})
        raise NothingToVerifyError(f"job {state.job}: {steps} has never been READY; there are steps {have}")
    live = (state.readies[seq] for seq in covered if state.is_live(seq))
    return tuple(sorted({one.step for one in live if not state.is_tainted(attempt=one.attempt, step=one.step)}))


def _checked_rollback(state: JobState, attempt: Attempt) -> Attempt | None:
    newest = next((seq for seq, _ in state.restorable()), None)
    if attempt.launch_id != NOBODY or attempt.ready is None or attempt.struck:
        raise UsageError(f"job {state.job}: an attempt is opened by its launch, or for nobody by `ckpt rollback`")
    if attempt.ready != newest:
        raise UsageError(f"job {state.job}: READY {attempt.ready} is not the newest that is left, which is {newest}")
    current = state.attempt
    if current is not None and (current.launch_id, current.ready) == (NOBODY, attempt.ready):
        return None
    if attempt.attempt != state.attempt_number + 1:
        raise UsageError(f"job {state.job}: attempt {state.attempt_number} was opened meanwhile: go back again")
    return attempt


def _checked_job(state: JobState, job: Job) -> Job | None:
    if job.base is not UNSET:
        raise UsageError(f"job {state.job}: a base is set when a job begins, by `ckpt coordinator --base JOB@STEP`")
    if job.spec_sha256 is not None:
        if state.spec_sha256 is None:
            raise UsageError(f"job {state.job}: no spec has been set yet; its first attempt sets it")
        if job.spec_sha256 == state.spec_sha256:
            return None
        if job.replaces != state.spec_sha256:
            raise UsageError(f"job {state.job}: its spec is {state.spec_sha256[:12]} by now, not {job.replaces}")
        return job
    if job.retain is UNSET:
        raise UsageError(f"job {state.job}: a change that names neither a spec nor a policy of retention")
    policy = parse_policy(job.retain)
    text = "" if policy is None else str(policy)
    return None if text == state.retain else msgspec.structs.replace(job, retain=text)


def policy_change(state: JobState, text: str) -> Job:
    """Return the change that sets the policy of retention.

    Raises:
        UsageError: it is none.
    """
    policy = parse_policy(text)
    return Job(uid=state.job_uid, name=state.job, retain="" if policy is None else str(policy))


def make_policy(state: JobState, *, text: str) -> Change | None:
    """Return the record that sets the policy of retention, or None if it is that already."""
    return checked(state, policy_change(state, text))


def decode(body: bytes) -> ChangeRequest:
    """Return the request in these bytes, which come from the network.

    Raises:
        UsageError: they are none.
    """
    if len(body) > MAX_CHANGE_BYTES:
        raise UsageError(f"a change of {len(body)} bytes; at most {MAX_CHANGE_BYTES}")
    try:
        return msgspec.json.decode(body, type=ChangeRequest)
    except msgspec.DecodeError as error:
        raise UsageError(f"{NO_CHANGE}: {error}") from error


def append_in_passing(
    store: ObjectStore, job: str, make: Callable[[JobState], Record | None], *, purpose: str
) -> tuple[JobState, int | None]:
    """Append what ``make`` decides on by being elected for the moment; return the log as it is, and the record's seq.

    Nobody is elected if there is nothing to append. A coordinator that lives notices, and is elected again.

    Raises:
        FencedError: others were elected again and again in between.
        CkptError: as ``make``, and as ``append``.
    """
    state = read_on(store, newest_snap(store, job))
    writer_id = f"{purpose}-{socket.gethostname()[:100]}-{os.getpid()}-{secrets.token_hex(4)}"
    for attempt in range(_TRIES):
        if make(state) is None:
            return state, None
        state = append(store, state, _elected, term=state.term, writer_id=writer_id).state
        try:
            done = append(store, state, make, term=state.term, writer_id=writer_id)
        except FencedError:
            if attempt == _TRIES - 1:
                raise
            state = read_on(store, state)
        else:
            return done.state, done.seq
    raise AssertionError


def _elected(_: JobState) -> Elected:
    return Elected(passing=True)
