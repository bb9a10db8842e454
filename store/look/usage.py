"""Usage: what the objects of a store weigh, by job, attempt, step and kind, and which of them no record names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from toprope.store.checkpoint.manifest import File, Index, Manifest
from toprope.store.checkpoint.ready import Damage, damage_of, length_damaged, read_index, read_manifest
from toprope.store.errors import CorruptObjectError, MissingObjectError, UsageError
from toprope.store.log.fold import JobState
from toprope.store.look.show import read_job
from toprope.store.names import Key, facts_key, is_id, manifest_key, shard_key
from toprope.store.objects.protocol import ObjectStore


@dataclass(slots=True, kw_only=True)
class Pile:
    """Objects that are counted together."""

    objects: int = 0
    bytes: int = 0
    keys: list[Key] = field(default_factory=list)

    def add(self, key: Key, size: int) -> None:
        """Count an object."""
        self.objects += 1
        self.bytes += size
        self.keys.append(key)


@dataclass(slots=True, kw_only=True)
class StepUse:
    """What a READY checkpoint weighs, each object counted with the first that names it."""

    seq: int
    attempt: int
    step: int
    retired: bool
    manifest: int = 0
    index: int = 0
    shard: int = 0

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.manifest + self.index + self.shard


@dataclass(slots=True, kw_only=True)
class JobUse:
    """What a job weighs. ``orphans`` are named by no record; ``unknown`` may be by a damaged manifest or index."""

    job: str
    log: int = 0
    facts: int = 0
    steps: list[StepUse] = field(default_factory=list)
    orphans: Pile = field(default_factory=Pile)
    unknown: Pile = field(default_factory=Pile)
    damages: list[Damage] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.log + self.facts + sum(step.bytes for step in self.steps) + self.orphans.bytes + self.unknown.bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a store weighs. ``others`` are objects of no job that has a log; ``foreign`` look like jobs, and are none.

    Files whose name no object can have are not weighed.
    """

    jobs: tuple[JobUse, ...]
    others: Pile
    foreign: tuple[str, ...] = ()


def usage(store: ObjectStore, *, job: str | None = None) -> Usage:
    """Return what a store weighs, or one job of it.

    Objects are listed before the log is read, so that what becomes READY meanwhile is not taken for an orphan. What is
    on its way to READY is one until then.

    Raises:
        UsageError: there is no such job.
        LogCorruptError: a log is damaged, so what it names is not known.
        UnavailableError: the store did not answer.
    """
    listed: dict[str, list[Key]] = {}
    for key in store.list(f"{job}/" if job else ""):
        listed.setdefault(key.partition("/")[0], []).append(key)
    named = {job} if job else {name for name, keys in listed.items() if any("/log/" in key for key in keys)}
    names = {name for name in named if job or is_id(name)}
    jobs = tuple(_Count(store, name, listed.get(name, [])).counted() for name in sorted(names))
    others = Pile()
    for name in sorted(listed.keys() - names):
        for key in listed[name]:
            if (size := _size(store, key)) is not None:
                others.add(key, size)
    return Usage(jobs=jobs, others=others, foreign=tuple(sorted(named - names)))


def _size(store: ObjectStore, key: Key) -> int | None:
    """Return the size of an object that was listed; None if it has been deleted since, or is none by its name."""
    try:
        return store.size(key)
    except (MissingObjectError, UsageError):
        return None


class _Count:
    def __init__(self, store: ObjectStore, job: str, listed: list[Key]) -> None:
        log = read_job(store, job)
        self._store = store
        self._state: JobState = log.state
        self._listed = listed
        self._named: set[str] = {entry.key for entry in log.entries}
        self._unreadable: list[str] = []
        self._use = JobUse(job=job, log=sum(entry.bytes for entry in log.entries))

    def counted(self) -> JobUse:
        """Count all that the log names, then what is left."""
        state = self._state
        digests = dict.fromkeys([state.spec_sha256, *(attempt.facts_sha256 for attempt in state.attempts)])
        for digest in filter(None, digests):
            self._use.facts += self._take(facts_key(state.job, digest))
        for seq, ready in state.readies.items():
            step = StepUse(seq=seq, attempt=ready.attempt, step=ready.step, retired=seq in state.retired)
            self._use.steps.append(step)
            self._count_step(step)
        for key in self._listed:
            if key not in self._named and (size := _size(self._store, key)) is not None:
                unknown = any(key.startswith(prefix) for prefix in self._unreadable)
                (self._use.unknown if unknown else self._use.orphans).add(key, size)
        return self._use

    def _count_step(self, step: StepUse) -> None:
        ready = self._state.readies[step.seq]
        key = manifest_key(self._state.job, attempt=step.attempt, step=step.step, sha256=ready.manifest_sha256)
        step.manifest += self._take(key, step)
        try:
            manifest, _ = read_manifest(self._store, self._state, step.seq)
        except (CorruptObjectError, MissingObjectError) as error:
            self._unreadable.append(self._prefix(step, world=1))
            self._note(error, step)
            return
        for rank in range(manifest.world):
            self._count_rank(step, manifest, rank)

    def _count_rank(self, step: StepUse, manifest: Manifest, rank: int) -> None:
        shard = manifest.shards[rank]
        try:
            index = read_index(self._store, manifest, shard)
        except (CorruptObjectError, MissingObjectError) as error:
            self._unreadable.append(self._prefix(step, world=manifest.world, rank=rank))
            self._note(error, step, rank)
            return
        step.index += self._take(Key(shard.index_key), step)
        for file in index.files:
            step.shard += self._take_file(step, index, file)

    def _take_file(self, step: StepUse, index: Index, file: File) -> int:
        """Return the size of a file of a rank, once; that it is missing or of another length is noted."""
        key = Key(file.key)
        if key in self._named:
            return 0
        try:
            size = self._store.size(key)
        except MissingObjectError as error:
            self._note(error, step, index.rank)  # not taken: a step that is not retired may need it too
            return 0
        self._named.add(key)
        if size != file.stored_bytes:
            self._use.damages.append(length_damaged(index, file, size, job=self._use.job))
        return size

    def _prefix(self, step: StepUse, *, world: int, rank: int | None = None) -> str:
        """Return what the keys of a rank's objects, or those of all ranks, begin with."""
        key = shard_key(self._state.job, attempt=step.attempt, step=step.step, rank=rank or 0, world=world, nonce="0")
        return key.removesuffix("0.safetensors") if rank is not None else key.rpartition("/")[0] + "/"

    def _take(self, key: Key, step: StepUse | None = None) -> int:
        """Return the size of an object that is named, once; 0 if it is missing, which is noted."""
        if key in self._named:
            return 0
        self._named.add(key)
        try:
            return self._store.size(key)
        except MissingObjectError as error:
            if step is None:
                self._use.damages.append(Damage(job=self._use.job, key=key, what=str(error).removeprefix(f"{key}: ")))
            return 0  # of a manifest or an index, to read it will tell

    def _note(self, error: CorruptObjectError | MissingObjectError, step: StepUse, rank: int | None = None) -> None:
        if not (step.retired and isinstance(error, MissingObjectError)):  # what is retired may be deleted
            self._use.damages.append(damage_of(error, self._state, seq=step.seq, rank=rank))


def damages(found: Usage) -> Iterator[Damage]:
    """Yield what is wrong with any job."""
    for job in found.jobs:
        yield from job.damages
