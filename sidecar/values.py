"""The values that sidecar modules exchange: who it is, which snapshot a file holds, what a slot looks like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from toprope.coordinator.wire import Cadence, Copy, Tier
from toprope.trainer_hooks.link.slot import Page, SlotState

SlowTier: TypeAlias = Literal["local", "object"]
"""A tier that may take fewer steps than are snapshot."""


Alarm: TypeAlias = Literal[
    "ack-failed",
    "adopt-failed",
    "adoption-lost",
    "coordinator-away",
    "digest-differs",
    "dropped",
    "local-damaged",
    "local-failed",
    "local-foreign",
    "no-room",
    "object-failed",
    "owner-away",
    "peer-failed",
    "read-back-failed",
    "refused",
    "slots-gone",
    "stage-failed",
    "use-deadline",
]
"""The kinds of what a sidecar says aloud; docs/guides/operations.md says what each means."""


RESTORE_PATIENCE_S = 240.0
"""So long a shard is tried again for want of an answer, and then it is said what was tried: within the deadline."""
LEAST_PEER_BYTES_PER_S = 20e6
"""A peer that takes longer for a copy than this allows loses the copy, rather than the trainer a slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this sidecar is. ``slot_path`` and ``spare_path`` name the files of (rank, number)."""

    job: str
    node: str
    boot_id: str
    incarnation: str
    url: str
    domain: dict[str, str]
    use_deadline_s: float
    slot_path: Callable[[int, int], str]
    spare_path: Callable[[int, int], str]
    restore_patience_s: float = RESTORE_PATIENCE_S

    def patience_s(self, size: int) -> float:
        """Return how long a copy of so many bytes is held for a peer that is to have it."""
        return self.use_deadline_s + size / LEAST_PEER_BYTES_PER_S


Attempt: TypeAlias = tuple[int, str]
"""An attempt by number and uid; number 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Shard:
    """The snapshot of one rank after one step of one attempt, as so many bytes of this digest.

    ``asked``: the trainer asked for it by name, so each tier takes it; that is no part of which shard it is.
    """

    attempt: int
    step: int
    attempt_uid: str
    rank: int
    world: int
    bytes: int
    digest: str
    asked: bool = field(default=False, compare=False)

    @property
    def of_step(self) -> tuple[str, int]:
        """Return the step of the attempt that it belongs to."""
        return self.attempt_uid, self.step

    def age(self, current: Attempt) -> tuple[bool, Shard]:
        """Return what shards are ordered by from old to new while this attempt is the current one.

        Attempts that were opened without the job log may have higher numbers, and the log have gone on without them:
        what they left is older than all else.
        """
        number, uid = current
        return self.attempt < number or self.attempt_uid == uid or not number, self

    def copy(self, tier: Tier, *, key: str = "") -> Copy:
        """Return the inventory's line for this shard in a tier."""
        return Copy(
            attempt=self.attempt,
            attempt_uid=self.attempt_uid,
            step=self.step,
            rank=self.rank,
            world=self.world,
            tier=tier,
            bytes=self.bytes,
            digest=self.digest,
            key=key,
        )

    def page(self) -> Page:
        """Return the control page of a spare that holds this shard, verified."""
        return Page(
            state=SlotState.HASHED,
            rank=self.rank,
            world=self.world,
            attempt=self.attempt,
            attempt_uid=self.attempt_uid,
            step=self.step,
            bytes=self.bytes,
            digest=self.digest,
        )


def shard_of_copy(copy: Copy) -> Shard:
    """Return the shard that an inventory's line is about."""
    return Shard(
        attempt=copy.attempt,
        attempt_uid=copy.attempt_uid,
        step=copy.step,
        rank=copy.rank,
        world=copy.world,
        bytes=copy.bytes,
        digest=copy.digest,
    )


def shard_of_page(page: Page) -> Shard:
    """Return the shard that a control page describes."""
    return Shard(
        attempt=page.attempt,
        attempt_uid=page.attempt_uid,
        step=page.step,
        rank=page.rank,
        world=page.world,
        bytes=page.bytes,
        digest=page.digest,
        asked=page.asked,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSight:
    """One slot as it lies in memory. ``gone``: one that was there lacks a file by now."""

    slot: int
    capacity: int
    page: Page
    lock_held: bool
    gone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to a shard that is wanted for a restore.

    ``here``: a file of this node, by ``path``; ``node``: another node's tier by ``url``; ``object``: by ``key``.
    """

    kind: Literal["here", "node", "object"]
    tier: Tier
    node: str = ""
    path: str = ""
    url: str = ""
    key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lying:
    """A copy of this node, and the file in which it lies."""

    way: Way
    shard: Shard


def coarseness(cadence: Cadence, step: int, *, every: int) -> int:
    """Return how often 2 divides the number of intervals up to a step.

    Who can't store each step takes the coarsest ones, and so all ranks, who can't either, come to the same.
    """
    count = (step - cadence.from_step) // every
    return (count & -count).bit_length()


def is_due(cadence: Cadence, step: int, *, every: int) -> bool:
    """Say whether a tier of this ``every`` takes the step."""
    return step > cadence.from_step and (step - cadence.from_step) % every == 0
