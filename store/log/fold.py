"""What the records of a job log add up to: one pure fold, used by every writer, every reader and the test oracle.

``violation`` holds the rules of legality; a record that breaks one is never skipped, whoever reads it stops.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import assert_never

from msgspec import UNSET

from toprope.store.log.ready_book import ReadyBook
from toprope.store.log.records import (
    FORMAT,
    Attempt,
    Base,
    Elected,
    Job,
    Metric,
    Pin,
    Ready,
    Record,
    Retire,
    Taint,
    Unpin,
)

_HEX = re.compile(r"[0-9a-f]{8,128}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
METRIC_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Steps of one attempt that led to where the job is: those past ``after``, up to ``upto`` if that is not None."""

    attempt_uid: str
    after: int
    upto: int | None

    def holds(self, step: int) -> bool:
        """Return whether a step of the attempt is one of them."""
        return self.after < step and (self.upto is None or step <= self.upto)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """The fold of the first ``n`` records.

    ``head`` is the newest READY on the lineage of the current attempt, or None; a READY's name is its ``seq``, the
    number of its record. ``last_step`` is the step that the next READY must pass. ``struck`` holds the sources,
    as (attempt uid, step), that were tried and failed. ``retain`` is the policy of retention. ``base`` is the
    checkpoint of another job that this one started from, the oldest of its lineage. ``url`` is where the coordinator
    serves that was elected last, not counting commands; the term is ``passing`` if it is a command's. An attempt that
    was decided without the log must have known the first ``settled`` records.
    """

    job: str
    n: int = 0
    tail_sha256: str = ""
    job_uid: str = ""
    spec_sha256: str | None = None
    term: int = 0
    writer_id: str = ""
    attempts: tuple[Attempt, ...] = ()
    last_step: int = 0
    head: int | None = None
    readies: ReadyBook = field(default_factory=ReadyBook)
    retired: frozenset[int] = frozenset()
    pins: frozenset[int] = frozenset()
    taints: tuple[Taint, ...] = ()
    metrics: tuple[Metric, ...] = ()
    struck: frozenset[tuple[str, int]] = frozenset()
    retain: str = ""
    base: Base | None = None
    url: str = ""
    passing: bool = False
    settled: int = 0

    @property
    def attempt(self) -> Attempt | None:
        """The current attempt, or None before the first."""
        return self.attempts[-1] if self.attempts else None

    @property
    def attempt_number(self) -> int:
        """The number of the current attempt, 0 before the first."""
        return len(self.attempts)

    @property
    def live(self) -> tuple[int, ...]:
        """The READYs that are not retired, oldest first."""
        return tuple(seq for seq in self.readies if seq not in self.retired)

    def is_live(self, seq: int) -> bool:
        """Return whether that is a READY which is not retired."""
        return seq in self.readies and seq not in self.retired

    def attempt_of(self, *, launch_id: str, round_number: int) -> Attempt | None:
        """Return the attempt that this round of this launch was given, if it was."""
        matching = (one for one in self.attempts if (one.launch_id, one.round) == (launch_id, round_number))
        return next(matching, None)

    def is_tainted(self, *, attempt: int, step: int) -> bool:
        """Return whether this step of this attempt is not to be trusted."""
        return any(covers(taint, attempt=attempt, step=step) for taint in self.taints)

    def values_of(self, metric: str) -> dict[int, float]:
        """Return the value of a metric for each READY that has one."""
        return {one.seq: one.value for one in self.metrics if one.name == metric}

    def ready_lineage(self) -> Iterator[tuple[int, Ready]]:
        """Yield the READYs from head up the parents, newest first, retired and tainted ones included."""
        seq = self.head
        while seq is not None:
            yield seq, self.readies[seq]
            seq = self.readies[seq].parent

    def restorable(self) -> tuple[tuple[int, Ready], ...]:
        """Return the READYs that a restore may use, newest first: of the lineage, live and untainted."""
        return tuple(
            (seq, ready)
            for seq, ready in self.ready_lineage()
            if seq not in self.retired and not self.is_tainted(attempt=ready.attempt, step=ready.step)
        )

    def source_of(self, attempt: Attempt) -> tuple[str, int] | None:
        """Return (attempt uid, step) of the snapshot that an attempt began with, or None for a fresh start."""
        if attempt.held is not None:
            return attempt.held.attempt_uid, attempt.held.step
        if attempt.ready is not None:
            return self.readies[attempt.ready].attempt_uid, attempt.from_step
        return None

    def lineage(self) -> Iterator[Stretch]:
        """Yield the attempts that led to where the job is, current first, with their steps that did; not the base."""
        by_uid = {attempt.uid: attempt for attempt in self.attempts}
        current, upto = self.attempt, None
        while current is not None:
            yield Stretch(attempt_uid=current.uid, after=current.from_step, upto=upto)
            source = self.source_of(current)
            current, upto = (by_uid.get(source[0]), source[1]) if source else (None, None)

    def is_on_lineage(self, *, attempt_uid: str, step: int) -> bool:
        """Return whether that snapshot was written by the current attempt or by what it descends from."""
        return any(stretch.attempt_uid == attempt_uid and stretch.holds(step) for stretch in self.lineage())

    def is_base(self, snapshot: tuple[str, int] | None) -> bool:
        """Return whether a snapshot, as (attempt uid, step), is the job's base."""
        return self.base is not None and snapshot == self.base.snapshot

    def is_ended(self, attempt: int) -> bool:
        """Return whether a taint without an end has ended this attempt: nothing more of it can become READY."""
        return any(taint.attempt == attempt and taint.to_step is None for taint in self.taints)


def fold(state: JobState, record: Record, *, record_sha256: str) -> JobState:
    """Return the state after ``record``, of which ``violation`` has said that it is legal.

    ``record_sha256`` is that of its bytes.
    """
    after = replace(state, n=state.n + 1, tail_sha256=record_sha256, settled=_settled(state, record))
    match record:
        case Job():
            after = replace(
                after,
                job_uid=record.uid,
                spec_sha256=record.spec_sha256 or state.spec_sha256,
                retain=state.retain if record.retain is UNSET else record.retain,
                base=state.base if record.base is UNSET else record.base,
            )
        case Elected():
            passing = record.passing is True
            url = state.url if passing else record.url or ""
            after = replace(after, term=record.term, writer_id=record.writer_id, passing=passing, url=url)
        case Attempt():
            after = replace(
                after,
                attempts=(*state.attempts, record),
                last_step=record.from_step,
                head=_head_of(state, record),
                struck=state.struck | {(one.attempt_uid, one.step) for one in record.struck},
            )
        case Ready():
            after = replace(after, last_step=record.step, head=state.n, readies=state.readies.grown(state.n, record))
        case Taint():
            after = replace(after, taints=(*state.taints, record))
        case Pin():
            after = replace(after, pins=state.pins | {record.seq})
        case Unpin():
            after = replace(after, pins=state.pins - {record.seq})
        case Metric():
            after = replace(after, metrics=(*state.metrics, record))
        case Retire():
            after = replace(after, retired=state.retired | set(record.seqs))
        case _:
            assert_never(record)
    return after


def _settled(state: JobState, record: Record) -> int:
    """Return how many records an attempt must have known that is decided without the log and follows this one.

    Who leads, what is pinned, measured and to be retained decides nothing about it. A step of the attempt before it
    that became READY meanwhile is passed over; one that was tainted may be its source, which is checked with that.
    """
    match record:
        case Job() if record.spec_sha256 is None and record.base is UNSET:
            return state.settled
        case Elected() | Ready() | Pin() | Unpin() | Metric():
            return state.settled
        case Taint(attempt=state.attempt_number):
            return state.settled
        case Attempt() if record.decided_at is not UNSET:
            return max(state.settled, record.decided_at)
        case Job() | Attempt() | Taint() | Retire():
            return state.n + 1
        case _:
            assert_never(record)


def violation(state: JobState, record: Record) -> str | None:  # noqa: C901, PLR0911 - one line per kind of record
    """Return which rule ``record`` would break as number ``state.n``, or None if it is legal."""
    if why := _broken_by_any(state, record):
        return why
    match record:
        case Job():
            return _broken_by_job(state, record)
        case Elected():
            return None
        case Attempt():
            return _broken_by_attempt(state, record)
        case Ready():
            return _broken_by_ready(state, record)
        case Taint():
            return _broken_by_taint(state, record)
        case Pin():
            return None if state.is_live(record.seq) else f"it pins {record.seq}, which is no live READY"
        case Unpin():
            return None if record.seq in state.pins else f"it unpins {record.seq}, which is not pinned"
        case Metric():
            return _broken_by_metric(state, record)
        case Retire():
            return _broken_by_retire(state, record)
        case _:
            assert_never(record)


def _first(*checks: tuple[bool, str]) -> str | None:
    """Return the text of the first check that failed."""
    return next((text for holds, text in checks if not holds), None)


def _broken_by_any(state: JobState, record: Record) -> str | None:
    if _HEX.fullmatch(record.nonce) is None:
        return "its nonce is not lower-case hexadecimal of at least 8 digits"
    if record.prev != state.tail_sha256:
        return (
            f"prev is {record.prev or 'empty'}, expected {state.tail_sha256 or 'empty'}: the record before is another"
        )
    if state.n == 0:
        return _first((isinstance(record, Job), "a log begins with JOB"), (record.term == 0, "its term is not 0"))
    if isinstance(record, Elected):
        return _first(
            (record.term == state.term + 1, f"term {record.term} is elected after term {state.term}"),
            (bool(record.writer_id), "it has no writer_id"),
        )
    return _first(
        (record.term > 0, "nobody has been elected yet"),
        (record.term == state.term, f"it is of term {record.term}, but the current term is {state.term}"),
        (record.writer_id == state.writer_id, f"{record.writer_id!r} wrote it; {state.writer_id!r} was elected"),
    )


def _broken_by_job(state: JobState, record: Job) -> str | None:
    shape = _first(
        (record.format == FORMAT, f"format {record.format}; this version reads format {FORMAT}"),
        (record.name == state.job, f"it names job {record.name!r} in the log of {state.job!r}"),
        (_HEX.fullmatch(record.uid) is not None, "its uid is not lower-case hexadecimal"),
    )
    sets_spec, sets_policy, base = record.spec_sha256 is not None, record.retain is not UNSET, record.base
    if shape or state.n == 0:
        return shape or _first(
            (not sets_spec, "record 0 sets no spec"),
            (not sets_policy and record.replaces is UNSET and base is UNSET, "record 0 names the job only"),
        )
    if why := _first(
        (record.uid == state.job_uid, f"it is of job uid {record.uid}, not {state.job_uid}"),
        (sum((sets_spec, sets_policy, base is not UNSET)) == 1, "it sets no spec, policy or base, or more than one"),
        (sets_spec or record.replaces is UNSET, "it replaces a spec with none"),
    ):
        return why
    if isinstance(base, Base):
        return _broken_by_base(state, base)
    return _broken_by_spec(state, record) if sets_spec else None


def _broken_by_base(state: JobState, base: Base) -> str | None:
    return _first(
        (state.base is None, "a base is set already"),
        (not state.attempts, "it sets a base after the first attempt"),
        (all(_HEX.fullmatch(one) for one in (base.job_uid, base.attempt_uid)), "a uid of its base is not hexadecimal"),
        (base.job_uid != state.job_uid, "its base is of the job itself"),
        (_SHA256.fullmatch(base.manifest_sha256) is not None, "its base names no manifest"),
        (base.seq > 0 and base.step > 0 and base.world > 0, "its base is no READY"),
    )


def _broken_by_spec(state: JobState, record: Job) -> str | None:
    return _first(
        (
            state.spec_sha256 is None or record.replaces == state.spec_sha256,
            "the spec is set already, and it does not replace it",
        ),
        (state.spec_sha256 is not None or record.replaces is UNSET, "it replaces a spec, but none is set"),
        (record.spec_sha256 != state.spec_sha256, "the spec is that one already"),
        (_SHA256.fullmatch(record.spec_sha256 or "") is not None, "it sets no spec"),
    )


def _broken_by_attempt(state: JobState, record: Attempt) -> str | None:
    expected = state.attempt_number + 1
    shape = _first(
        (record.attempt == expected, f"attempt {record.attempt}, expected {expected}"),
        (_HEX.fullmatch(record.uid) is not None, "its uid is not lower-case hexadecimal"),
        (all(record.uid != one.uid for one in state.attempts), f"uid {record.uid} belongs to another attempt"),
        (record.world_size > 0, f"a world of {record.world_size} ranks"),
        (record.round >= 0, f"round {record.round}"),
        (
            state.attempt_of(launch_id=record.launch_id, round_number=record.round) is None,
            f"round {record.round} of launch {record.launch_id} has an attempt already",
        ),
        (state.spec_sha256 is not None, "no spec has been set"),
        (record.spec_sha256 == state.spec_sha256, "its spec is not the job's"),
        (_SHA256.fullmatch(record.facts_sha256) is not None, "it names no facts"),
    )
    return shape or _broken_by_delay(state, record) or _broken_by_source(state, record)


def _broken_by_delay(state: JobState, record: Attempt) -> str | None:
    if record.decided_at is UNSET:
        return None
    return _first(
        (record.held is not None, "it was decided without the log, and its source is not held by the nodes"),
        (
            state.settled <= record.decided_at <= state.n,
            f"it was decided on {record.decided_at} records; record {state.settled - 1} has changed what it rests on",
        ),
    )


def _broken_by_source(state: JobState, record: Attempt) -> str | None:
    if record.held is not None and record.ready is not None:
        return "it has two sources"
    struck = state.struck | {(one.attempt_uid, one.step) for one in record.struck}
    if record.held is not None:
        return _broken_by_held(state, record, struck)
    if record.ready is not None:
        return _broken_by_ready_source(state, record, struck)
    return _first(
        (record.from_step == 0, f"a fresh start from step {record.from_step}"),
        (not state.readies, "a fresh start although there are READY checkpoints"),
        (state.base is None, "a fresh start although the job has a base"),
    )


def _broken_by_held(state: JobState, record: Attempt, struck: frozenset[tuple[str, int]]) -> str | None:
    held = record.held
    assert held is not None
    if state.base is not None and state.is_base((held.attempt_uid, held.step)):
        begins = state.base.from_step
        return _first(
            (record.from_step == begins, f"from_step {record.from_step} is not that of the base, {begins}"),
            (state.base.snapshot not in struck, "its source, the base, has been struck off"),
        )
    number = next((one.attempt for one in state.attempts if one.uid == held.attempt_uid), None)
    if number is None:
        return f"its source is of attempt uid {held.attempt_uid}, which is unknown"
    source = f"its source, step {held.step} of attempt {number},"
    return _first(
        (held.step == record.from_step, f"from_step {record.from_step} is not that of its source, {held.step}"),
        (
            state.is_on_lineage(attempt_uid=held.attempt_uid, step=held.step),
            f"{source} is not on the lineage of attempt {state.attempt_number}",
        ),
        (not state.is_tainted(attempt=number, step=held.step), f"{source} is tainted"),
        ((held.attempt_uid, held.step) not in struck, f"{source} has been struck off"),
    )


def _broken_by_ready_source(state: JobState, record: Attempt, struck: frozenset[tuple[str, int]]) -> str | None:
    seq = record.ready
    ready = dict(state.ready_lineage()).get(-1 if seq is None else seq)
    if ready is None:
        return f"its source {seq} is neither head nor an ancestor of it"
    return _first(
        (ready.step == record.from_step, f"from_step {record.from_step} is not that of READY {seq}, {ready.step}"),
        (seq not in state.retired, f"its source {seq} is retired"),
        (not state.is_tainted(attempt=ready.attempt, step=ready.step), f"its source {seq} is tainted"),
        ((ready.attempt_uid, ready.step) not in struck, f"its source {seq} has been struck off"),
    )


def _broken_by_ready(state: JobState, record: Ready) -> str | None:
    current = state.attempt
    if current is None:
        return "READY before any attempt"
    return _first(
        (record.attempt == current.attempt, f"it is of attempt {record.attempt}; the current is {current.attempt}"),
        (record.attempt_uid == current.uid, f"it is of attempt uid {record.attempt_uid}, not {current.uid}"),
        (record.step > state.last_step, f"step {record.step} is not past step {state.last_step}"),
        (record.parent == state.head, f"its parent is {record.parent}, but head is {state.head}"),
        (not state.is_ended(record.attempt), f"a taint ended attempt {record.attempt}"),
        (not state.is_tainted(attempt=record.attempt, step=record.step), f"step {record.step} is tainted"),
        (_SHA256.fullmatch(record.manifest_sha256) is not None, "it names no manifest"),
        (record.bytes >= 0, f"{record.bytes} bytes"),
    )


def _broken_by_taint(state: JobState, record: Taint) -> str | None:
    return _first(
        (1 <= record.attempt <= state.attempt_number, f"it taints attempt {record.attempt}, which does not exist"),
        (record.from_step >= 0, f"it taints from step {record.from_step}"),
        (record.to_step is None or record.to_step >= record.from_step, "its range is empty"),
    )


def _broken_by_metric(state: JobState, record: Metric) -> str | None:
    return _first(
        (state.is_live(record.seq), f"it measures {record.seq}, which is no live READY"),
        (METRIC_NAME.fullmatch(record.name) is not None, "its metric has no usable name"),
        (math.isfinite(record.value), f"its {record.name} is {record.value}"),
    )


def _broken_by_retire(state: JobState, record: Retire) -> str | None:
    if not record.seqs or len(set(record.seqs)) != len(record.seqs):
        return "it retires nothing, or one READY twice"
    needed = needed_by(state)
    for seq in record.seqs:
        if not state.is_live(seq):
            return f"it retires {seq}, which is no live READY"
        if seq in needed:
            return f"it retires {seq}, which is {needed[seq]}"
    return None


def needed_by(state: JobState) -> dict[int, str]:
    """Return the READYs that may not be retired, each with the reason."""
    needed = dict.fromkeys(state.pins, "pinned")
    untainted = (
        seq
        for seq in reversed(state.readies)
        if seq not in state.retired
        and not state.is_tainted(attempt=state.readies[seq].attempt, step=state.readies[seq].step)
    )
    if (newest := next(untainted, None)) is not None:
        needed[newest] = "the newest untainted READY"
    if state.attempt is not None and state.attempt.ready is not None:
        needed[state.attempt.ready] = "the source of the current attempt"
    if state.head is not None:
        parent = state.readies[state.head].parent
        if parent is not None:
            needed[parent] = "the parent of head"
        needed[state.head] = "head"
    return needed


def _head_of(state: JobState, record: Attempt) -> int | None:
    """Return the head after an attempt opened: its READY source, or the newest READY that its held source follows."""
    if record.held is None:
        return record.ready
    if state.is_base((record.held.attempt_uid, record.held.step)):
        return None
    lineage = state.ready_lineage()
    return next((seq for seq, ready in lineage if _precedes(state, ready, record)), None)


def _precedes(state: JobState, ready: Ready, record: Attempt) -> bool:
    held = record.held
    assert held is not None
    number = next(one.attempt for one in state.attempts if one.uid == held.attempt_uid)
    return ready.attempt <= number and ready.step <= record.from_step


def covers(taint: Taint, *, attempt: int, step: int) -> bool:
    """Return whether this taint is on a step of an attempt; both ends of its range are."""
    within = taint.from_step <= step and (taint.to_step is None or step <= taint.to_step)
    return taint.attempt == attempt and within
