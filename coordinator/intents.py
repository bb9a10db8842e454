"""What is to be appended to the log, as values, with the decision that is made anew each time the log has moved. Pure.

A record is made only if the log still is what the intent was decided on; else nothing is appended.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toprope.coordinator.readiness import Receipt
from toprope.store.checkpoint.incremental import Grounds
from toprope.store.checkpoint.manifest import Index, Manifest, Shard
from toprope.store.log.fold import JobState
from toprope.store.log.records import Attempt, AttemptFacts, Held, Job, Ready, Struck


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """What a restore decision rests on in the log."""

    attempts: int
    head: int | None
    taints: int
    retired: int


def basis_of(state: JobState) -> Basis:
    """Return what a restore decision rests on in this log."""
    return Basis(attempts=state.attempt_number, head=state.head, taints=len(state.taints), retired=len(state.retired))


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAttempt:
    """Open an attempt that was decided on ``basis``; the source is ``ready``, ``held`` or neither."""

    basis: Basis
    uid: str
    launch_id: str
    round: int
    ready: int | None
    held: Held | None
    from_step: int
    struck: tuple[Struck, ...]
    facts: AttemptFacts
    spec: Mapping[str, Any]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitStep:
    """Make a step READY whose shards all have been read back; ``receipts`` are in order of rank.

    ``others`` were read back too, because what the shards name lies in them: uploads that were repeated since.
    """

    attempt: int
    attempt_uid: str
    step: int
    receipts: tuple[Receipt, ...]
    others: tuple[Receipt, ...] = ()
    rested_on: frozenset[str] = frozenset()
    """The keys of the files that hold tensors of other shards of the step."""

    @property
    def world(self) -> int:
        """Return how many ranks there are."""
        return len(self.receipts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadIndexes:
    """Read and check the indexes of some receipts of a step, which may be committed soon."""

    attempt: int
    attempt_uid: str
    step: int
    world: int
    receipts: tuple[Receipt, ...]


def make_spec(state: JobState, *, spec_sha256: str) -> Job | None:
    """Return the record that sets the job's spec; None when it is set."""
    if state.spec_sha256 is not None:
        return None
    return Job(uid=state.job_uid, name=state.job, spec_sha256=spec_sha256)


def make_attempt(state: JobState, intent: OpenAttempt, *, spec_sha256: str, facts_sha256: str) -> Attempt | None:
    """Return the record that opens the attempt; None when what it was decided on has changed."""
    if basis_of(state) != intent.basis or state.spec_sha256 != spec_sha256:
        return None
    return Attempt(
        attempt=state.attempt_number + 1,
        uid=intent.uid,
        launch_id=intent.launch_id,
        round=intent.round,
        ready=intent.ready,
        held=intent.held,
        from_step=intent.from_step,
        struck=intent.struck,
        world_size=len(intent.facts.world),
        facts_sha256=facts_sha256,
        spec_sha256=spec_sha256,
        why=intent.why,
    )


def make_manifest(
    state: JobState, intent: CommitStep, indexes: Sequence[Index | None], bases: Mapping[int, Sequence[Index]]
) -> Manifest | str:
    """Return the manifest of a step, or what is wrong with an index; each is as its receipt says.

    What it names of other files must be what their indexes name: ``indexes`` are those of the step, the others last,
    and ``bases`` those of the READYs that it rests on, by seq. None: one that stands alone.
    """
    grounds = Grounds([index for index in indexes if index is not None], bases)
    for receipt, index in zip(intent.receipts, indexes, strict=False):
        if index is not None and (why := grounds.unfounded(index)):
            return f"index {receipt.copy.index_key}: {why}"
    return Manifest(
        job=state.job,
        job_uid=state.job_uid,
        attempt=intent.attempt,
        attempt_uid=intent.attempt_uid,
        step=intent.step,
        world=intent.world,
        spec_sha256=state.spec_sha256 or "",
        shards=tuple(
            Shard(
                rank=receipt.copy.rank,
                index_key=receipt.copy.index_key,
                index_sha256=receipt.copy.index_sha256,
                bytes=receipt.copy.bytes,
                digest=receipt.copy.digest,
            )
            for receipt in intent.receipts
        ),
    )


def make_ready(
    state: JobState, intent: CommitStep, *, manifest_sha256: str, bases: Collection[int] = ()
) -> Ready | None:
    """Return the record that makes a step READY; None when the log makes that impossible by now.

    ``bases`` are the READYs into whose files it points: they must be live in the very log that it is appended to, so
    that nothing it names has been condemned.
    """
    current = state.attempt
    if current is None or current.uid != intent.attempt_uid or intent.step <= state.last_step:
        return None
    if not set(bases) <= set(state.live):
        return None
    if state.is_ended(intent.attempt) or state.is_tainted(attempt=intent.attempt, step=intent.step):
        return None
    return Ready(
        attempt=intent.attempt,
        attempt_uid=intent.attempt_uid,
        step=intent.step,
        parent=state.head,
        manifest_sha256=manifest_sha256,
        bytes=sum(receipt.copy.bytes for receipt in intent.receipts),
    )
