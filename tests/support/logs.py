"""Job logs for tests: a writer that appends records of one term with few words."""

from __future__ import annotations

import functools
from typing import TypedDict, Unpack

from toprope.store.log.chain import append
from toprope.store.log.fold import JobState
from toprope.store.log.records import Attempt, Elected, Held, Job, Ready, Record, Struck
from toprope.store.objects.protocol import ObjectStore

JOB_UID = "0b" * 16
SPEC = "5e" * 32
FACTS = "fa" * 32
MANIFEST = "3a" * 32


class AttemptFields(TypedDict, total=False):
    """What a test may say about an attempt."""

    attempt: int
    uid: str
    launch_id: str
    round: int
    ready: int | None
    held: Held | None
    from_step: int
    struck: tuple[Struck, ...]
    world_size: int
    facts_sha256: str
    spec_sha256: str
    decided_at: int


def uid(number: int) -> str:
    """Return the uid that tests give to attempt ``number``."""
    return f"{number:032x}"


def job(name: str = "job", *, spec: str | None = None, job_uid: str = JOB_UID) -> Job:
    return Job(uid=job_uid, name=name, spec_sha256=spec)


def attempt(number: int, **fields: Unpack[AttemptFields]) -> Attempt:
    """Return attempt ``number``, a fresh start unless the fields say otherwise."""
    defaults: AttemptFields = {
        "attempt": number,
        "uid": uid(number),
        "launch_id": f"{number + 1000:032x}",
        "round": 0,
        "ready": None,
        "held": None,
        "from_step": 0,
        "struck": (),
        "world_size": 2,
        "facts_sha256": FACTS,
        "spec_sha256": SPEC,
    }
    return Attempt(**(defaults | fields), why="because a test says so")


def ready(
    step: int, *, number: int = 1, parent: int | None = None, manifest: str = MANIFEST, size_bytes: int = 100
) -> Ready:
    return Ready(
        attempt=number, attempt_uid=uid(number), step=step, parent=parent, manifest_sha256=manifest, bytes=size_bytes
    )


def _always(record: Record, _: JobState) -> Record:
    return record


class LogWriter:
    """Appends records, filling in the envelope, and knows the state after each."""

    def __init__(self, store: ObjectStore, name: str = "job") -> None:
        self.store = store
        self.state = JobState(job=name)
        self.term = 0
        self.writer_id = "c1"

    def begin(self) -> LogWriter:
        """Append JOB, ELECTED, the spec: what precedes attempt 1."""
        self.add(job(self.state.job), Elected(), job(self.state.job, spec=SPEC))
        return self

    def add(self, *records: Record) -> int:
        """Append these records and return the number of the last."""
        for record in records:
            make = functools.partial(_always, record)
            self.state = append(self.store, self.state, make, term=self.term, writer_id=self.writer_id).state
            if isinstance(record, Elected):
                self.term = self.state.term
        return self.state.n - 1
