"""What ``ckpt ls`` and ``ckpt show`` say, as values: jobs, checkpoints, records, objects. Pure but for reading."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, assert_never

from msgspec import UNSET

from toprope.store.checkpoint.ready import Damage, read_index, read_manifest
from toprope.store.errors import CorruptObjectError, LogCorruptError, NothingToVerifyError, UsageError
from toprope.store.log.chain import Entry, read_entries, read_on
from toprope.store.log.fold import JobState
from toprope.store.log.records import Attempt, Elected, Job, Metric, Pin, Ready, Record, Retire, Taint, Unpin
from toprope.store.log.snap import check_end, newest_snap
from toprope.store.names import checked_id, facts_key, is_id, log_prefix, manifest_key
from toprope.store.objects.protocol import ObjectStore

ObjectKind = Literal["log", "facts", "manifest", "index", "shard"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLog:
    """A job's log, read whole: its records and what they add up to."""

    state: JobState
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLine:
    """A READY checkpoint in a list. ``notes`` says what is special about it."""

    seq: int
    step: int
    attempt: int
    world: int
    bytes: int
    parent: int | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordLine:
    """A record of the log in words."""

    number: int
    term: int
    kind: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedObject:
    """An object that a job's log names, by itself or through a manifest or an index.

    ``digest`` is SHA-256, for a shard XXH3-128; empty for a record of the log, which carries its own.
    """

    kind: ObjectKind
    key: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNames:
    """The jobs of a store, and what has checkpoints and no log: a log was removed, or a copy is not through.

    ``foreign`` look like jobs, and no job can have such a name.
    """

    jobs: tuple[str, ...]
    without_log: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()


def names_in(store: ObjectStore) -> JobNames:
    """Return the names of all that is in a store, in order."""
    with_log: set[str] = set()
    with_more: set[str] = set()
    for key in store.list(""):
        name, _, rest = key.partition("/")
        if rest.startswith("log/"):
            with_log.add(name)
        elif rest.startswith(("shards/", "manifests/")):
            with_more.add(name)
    foreign = {name for name in with_log | with_more if not is_id(name)}
    return JobNames(
        jobs=tuple(sorted(with_log - foreign)),
        without_log=tuple(sorted(with_more - with_log - foreign)),
        foreign=tuple(sorted(foreign)),
    )


def job_names(store: ObjectStore) -> tuple[str, ...]:
    """Return the names of all jobs in a store, in order."""
    return names_in(store).jobs


def without_log_text(names: Sequence[str]) -> str:
    """Return what to tell of jobs that have no log."""
    logs = ", ".join(f"{name}/log/" for name in names)
    return (
        f"{', '.join(names)}: objects of checkpoints and no log that names them, so nothing is known of them: it was "
        f"removed (bring back {logs}), or a copy is not through (run it again); `ckpt du` weighs them"
    )


def foreign_text(names: Sequence[str]) -> str:
    """Return what to tell of what lies in a store and has a name that no job can have."""
    return (
        f"passed over {', '.join(map(repr, names))}: a job's name is 1 to 64 of a-z 0-9 . _ - that begin with a letter "
        "or digit, without '..', so what lies there is none; move it out of the store"
    )


def read_job(store: ObjectStore, name: str) -> JobLog:
    """Return the log of a job.

    Raises:
        UsageError: there is no such job; the message names those that there are.
        NothingToVerifyError: it has objects and no log.
        LogCorruptError: its log is damaged.
    """
    state = JobState(job=checked_id(name, what="job"))
    entries = []
    for entry, after in read_entries(store, name):
        entries.append(entry)
        state = after
    if not entries:
        known = names_in(store)
        if name in known.without_log:
            raise NothingToVerifyError(without_log_text([name]))
        there = f"there are {', '.join(known.jobs)}" if known.jobs else "there are none"
        raise UsageError(f"job {name!r}: no such job in this store; {there}")
    check_end(store, state)
    return JobLog(state=state, entries=tuple(entries))


def read_jobs(store: ObjectStore, names: Sequence[str]) -> tuple[tuple[JobLog, ...], tuple[Damage, ...]]:
    """Return the logs of jobs, and what is wrong with those that can't be read: one of several hides no other.

    Raises:
        LogCorruptError: there is but one, and it can't be read.
    """
    logs: list[JobLog] = []
    broken: list[Damage] = []
    for name in names:
        try:
            logs.append(read_job(store, name))
        except (LogCorruptError, CorruptObjectError) as error:
            if len(names) == 1:
                raise
            broken.append(Damage(job=name, key=log_prefix(name), what=str(error)))
    return tuple(logs), tuple(broken)


def read_beginning(store: ObjectStore, name: str) -> tuple[JobLog, str]:
    """Return the log of a job as far as it can be read, and what is wrong with the rest, which is empty if all is well.

    Raises:
        UsageError: there is no such job.
    """
    try:
        return read_job(store, name), ""
    except (LogCorruptError, CorruptObjectError) as error:
        said = str(error)
    state, entries = JobState(job=name), list[Entry]()
    with contextlib.suppress(LogCorruptError, CorruptObjectError):
        for entry, after in read_entries(store, name):
            entries.append(entry)
            state = after
    return JobLog(state=state, entries=tuple(entries)), said


def read_state(store: ObjectStore, name: str) -> JobState:
    """Return what the log of a job adds up to, from the newest fold on that is kept of it; raises as ``read_job``."""
    state = read_on(store, newest_snap(store, checked_id(name, what="job")))
    return state if state.n else read_job(store, name).state


def checkpoint_lines(state: JobState) -> tuple[CheckpointLine, ...]:
    """Return the READY checkpoints, oldest first."""
    return tuple(
        CheckpointLine(
            seq=seq,
            step=ready.step,
            attempt=ready.attempt,
            world=state.attempts[ready.attempt - 1].world_size,
            bytes=ready.bytes,
            parent=ready.parent,
            notes=_notes(state, seq, ready),
        )
        for seq, ready in state.readies.items()
    )


def _notes(state: JobState, seq: int, ready: Ready) -> tuple[str, ...]:
    restorable = [one for one, _ in state.restorable()]
    checks = (
        (bool(restorable) and seq == restorable[0], "newest"),
        (seq in state.pins, "pinned"),
        (seq in state.retired, "retired"),
        (state.is_tainted(attempt=ready.attempt, step=ready.step), "tainted"),
        (all(seq != one for one, _ in state.ready_lineage()), "left behind"),
    )
    measured = {one.name: f"{one.name} {one.value:.6g}" for one in state.metrics if one.seq == seq}
    return (*(note for holds, note in checks if holds), *measured.values())


def record_lines(entries: tuple[Entry, ...]) -> tuple[RecordLine, ...]:
    """Return the records in words."""
    return tuple(
        RecordLine(
            number=entry.number,
            term=entry.record.term,
            kind=type(entry.record).__name__.upper(),
            what=on_one_line(_in_words(entry.record)),
        )
        for entry in entries
    )


def on_one_line(words: str) -> str:
    """Return words without what moves a terminal's cursor: reasons are what people and programs wrote."""
    return " ".join("".join(one if one.isprintable() else " " for one in words).split())


def _in_words(record: Record) -> str:
    match record:
        case Job(prev=""):
            words = f"job {record.name}, uid {record.uid}, format {record.format}"
        case Job():
            words = _set_by(record)
        case Elected():
            words = f"coordinator {record.writer_id}"
        case Attempt():
            words = f"attempt {record.attempt}, {record.world_size} ranks, {_source(record)}{_struck(record)}"
            words += "" if record.decided_at is UNSET else f"; decided without the log, on {record.decided_at} records"
            words += f" ({record.why})" if record.why else ""
        case Ready():
            words = f"step {record.step} of attempt {record.attempt}, {record.bytes:,} bytes"
        case Taint():
            end = "on" if record.to_step is None else f"to {record.to_step}"
            words = f"attempt {record.attempt} from step {record.from_step} {end}: {record.reason}"
        case Pin() | Unpin():
            words = f"READY {record.seq}"
        case Metric():
            words = f"READY {record.seq}: {record.name} {record.value:.6g}"
        case Retire():
            words = "READY " + ", ".join(str(seq) for seq in record.seqs)
        case _:
            assert_never(record)
    return words


def _set_by(record: Job) -> str:
    if record.base:
        what = "everything" if record.base.take == "all" else "the weights"
        return f"base {record.base.job}@{record.base.step}, READY {record.base.seq} of that job: {what}"
    if record.spec_sha256 is None:
        return f"retention {record.retain or 'all'}"
    return f"spec {record.spec_sha256[:12]}" + (f" replaces {record.replaces[:12]}" if record.replaces else "")


def _source(record: Attempt) -> str:
    if record.held is not None:
        return f"from step {record.from_step}, held by the nodes"
    if record.ready is not None:
        return f"from step {record.from_step}, READY {record.ready}"
    return "a fresh start"


def _struck(record: Attempt) -> str:
    return "".join(f"; struck off step {one.step}: {one.why}" for one in record.struck)


def named_objects(store: ObjectStore, log: JobLog) -> Iterator[NamedObject]:
    """Yield every object that the log names, each once: records, facts, manifests, indexes, shards.

    Raises:
        CorruptObjectError: a manifest or an index is damaged, so what it names is not known.
        MissingObjectError: one is missing.
    """
    state = log.state
    for entry in log.entries:
        yield NamedObject(kind="log", key=entry.key, digest="")
    facts = dict.fromkeys([state.spec_sha256 or "", *(attempt.facts_sha256 for attempt in state.attempts)])
    for digest in filter(None, facts):
        yield NamedObject(kind="facts", key=facts_key(state.job, digest), digest=digest)
    seen: set[str] = set()
    for seq in state.live:
        for one in objects_of(store, state, seq):
            if one.key not in seen:
                seen.add(one.key)
                yield one


def objects_of(store: ObjectStore, state: JobState, seq: int) -> Iterator[NamedObject]:
    """Yield what READY ``seq`` consists of: its manifest, indexes and files. Raises as ``named_objects``."""
    ready = state.readies[seq]
    key = manifest_key(state.job, attempt=ready.attempt, step=ready.step, sha256=ready.manifest_sha256)
    yield NamedObject(kind="manifest", key=key, digest=ready.manifest_sha256)
    manifest, _ = read_manifest(store, state, seq)
    for shard in manifest.shards:
        yield NamedObject(kind="index", key=shard.index_key, digest=shard.index_sha256)
        for file in read_index(store, manifest, shard).files:
            yield NamedObject(kind="shard", key=file.key, digest=file.stored_digest)


def xxhsum_lines(objects: Iterator[NamedObject]) -> Iterator[str]:
    """Yield the lines of a check file for the shards, which ``xxhsum -c`` accepts in the root of the store."""
    for one in objects:
        if one.kind == "shard":
            yield f"{one.digest}  {one.key}"
