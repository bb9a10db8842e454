"""The records of a job log, as values. ``log.py`` encodes and checks them; ``fold.py`` says what they add up to.

Every record carries who wrote it: ``term`` and ``writer_id`` of the coordinator and a fresh ``nonce``, by which a
writer whose reply was lost knows its own. ``prev`` is the SHA-256 of the record before (of its bytes; empty for
record 0) and ``sum`` that of this record without ``sum``. What is large (a spec; the world and digests of an attempt)
is an object named by its hash, under ``facts/``.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

FORMAT = 1
MAX_RECORD_BYTES = 64 * 1024
NOBODY = "00" * 16
"""The launch id of an attempt that no launch has asked for: a rollback's, which only ends the one before it."""


class _Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", forbid_unknown_fields=True):
    term: int = 0
    writer_id: str = ""
    nonce: str = ""
    prev: str = ""
    sum: str = ""


class Base(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The checkpoint of another job, in the same store, that a job starts from: its READY ``seq``, named by hash.

    ``take``: ``all``, and training goes on after ``step``; or the ``weights`` of the models only, and it begins with
    step 1.
    """

    job: str
    job_uid: str
    seq: int
    attempt_uid: str
    step: int
    world: int
    manifest_sha256: str
    take: Literal["all", "weights"]

    @property
    def from_step(self) -> int:
        """The step that an attempt from here begins with."""
        return self.step if self.take == "all" else 0

    @property
    def snapshot(self) -> tuple[str, int]:
        """The snapshot, as attempt uid and step."""
        return self.attempt_uid, self.step


class Job(_Record, frozen=True, kw_only=True, tag="JOB"):
    """Record 0 names the job; a later one sets its spec (``spec_sha256``, an object under ``facts/``), policy or base.

    The spec is set once; after that only in place of the one that ``replaces`` names. ``retain`` is the policy of
    retention, empty for none. ``base`` is set once, before the first attempt. What a record does not say is left out
    of it, so older ones keep their bytes.
    """

    uid: str
    name: str
    format: int = FORMAT
    spec_sha256: str | None = None
    replaces: str | UnsetType = UNSET
    retain: str | UnsetType = UNSET
    base: Base | UnsetType = UNSET


class Elected(_Record, frozen=True, kw_only=True, tag="ELECTED"):
    """A coordinator's reign begins: ``term`` is one more than any before.

    ``url`` is where it serves. One that is ``passing`` was elected for a few records, by a command: whom it replaced
    may be elected again.
    """

    url: str | UnsetType = UNSET
    passing: bool | UnsetType = UNSET


class Ready(_Record, frozen=True, kw_only=True, tag="READY"):
    """A checkpoint is READY. Its number in the log, ``seq``, is its name from now on.

    ``at_s`` is the wall time of whoever appended it, in seconds since 1970: for people, and for retention by time.
    """

    attempt: int
    attempt_uid: str
    step: int
    parent: int | None
    manifest_sha256: str
    bytes: int
    at_s: int | UnsetType = UNSET


class Held(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A source that is no READY of this job: the shards of one step, in memory, peer, local or object tier.

    Or it is the job's base. Their digests are in the attempt's facts.
    """

    attempt_uid: str
    step: int


class Struck(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A source that was tried and failed; it is not tried again."""

    attempt_uid: str
    step: int
    why: str


class Attempt(_Record, frozen=True, kw_only=True, tag="ATTEMPT"):
    """An attempt opens, with its restore decision: one decision, the same for every rank, whatever crashes.

    The source is ``ready`` (the seq of a READY), ``held``, or neither: a fresh start. ``facts_sha256`` names an
    ``AttemptFacts`` object. ``why`` is for people. One that was opened while the log could not be reached says how many
    records the log had when it was ``decided_at``.
    """

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
    why: str
    decided_at: int | UnsetType = UNSET


class Taint(_Record, frozen=True, kw_only=True, tag="TAINT"):
    """Steps ``from_step`` to ``to_step`` (or open-ended) of an attempt are not to be trusted, in any tier."""

    attempt: int
    from_step: int
    to_step: int | None
    reason: str


class Pin(_Record, frozen=True, kw_only=True, tag="PIN"):
    """A READY that may not be retired."""

    seq: int


class Unpin(_Record, frozen=True, kw_only=True, tag="UNPIN"):
    """A pin is lifted."""

    seq: int


class Metric(_Record, frozen=True, kw_only=True, tag="METRIC"):
    """What somebody found a READY to be worth, for policies that keep the best: of one name the last value counts."""

    seq: int
    name: str
    value: float


class Retire(_Record, frozen=True, kw_only=True, tag="RETIRE"):
    """READYs that are no longer offered, and whose objects may be deleted."""

    seqs: tuple[int, ...]


Record: TypeAlias = Job | Elected | Attempt | Ready | Taint | Pin | Unpin | Metric | Retire


class Member(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a rank of an attempt sits."""

    rank: int
    node: str
    boot_id: str


class AttemptFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an ATTEMPT record names by hash: its world, the digests of a held source by rank, and versions in use."""

    world: tuple[Member, ...]
    held_digests: tuple[str, ...]
    versions: dict[str, str]
