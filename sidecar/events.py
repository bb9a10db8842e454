"""What can happen to a sidecar, as values. The core is told these and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from toprope.coordinator.wire import Copy, Desired, Inventory, OpenAnswer, Provisional, ReadBack, Tier
from toprope.sidecar.values import Shard, SlotSight, SlowTier
from toprope.trainer_hooks.link.wire import ALL, FromHook, StagedShard


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameArrived:
    """A trainer sent a frame on this connection."""

    connection: int
    frame: FromHook


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionClosed:
    """A trainer's connection is gone: a hint that it died, not a proof."""

    connection: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredArrived:
    """The coordinator's document, by whichever way it came."""

    desired: Desired


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredConfirmed:
    """The coordinator itself was asked, and what is known now is what it said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAnswered:
    """The coordinator answered the OPEN of this connection."""

    connection: int
    answer: OpenAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptionsRead:
    """What an earlier life of this node has adopted was read; all that is ``found`` is durable.

    ``lost``: the numbers that were given to an attempt which can't be read any more, each with the reason.
    ``unread``: why nothing could be read; which numbers were given away is not known then.
    """

    found: tuple[Provisional, ...] = ()
    lost: Mapping[int, str] = field(default_factory=dict)
    unread: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """An adoption is durable. Those of ``forgotten`` are gone."""

    adopted: Provisional
    forgotten: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptFailed:
    """An adoption could not be written down."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsSeen:
    """The slots of a rank as they lie in memory now: pages, capacities, locks; ``made``: those wanted are there."""

    rank: int
    sights: tuple[SlotSight, ...]
    made: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsRefused:
    """Slots could not be made: there is no room, but ``room`` bytes for all that lies in memory here."""

    rank: int
    reason: str
    room: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotHeld:
    """A grant was not made: a process of another launch holds the slot's lock."""

    rank: int
    slot: int
    seq: int
    launch_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotGone:
    """A grant was not made: the slot lacks a file."""

    rank: int
    slot: int
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotHashed:
    """A sealed slot has this digest; its page says so."""

    slot: int
    seq: int
    shard: Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotDropped:
    """A sealed or hashed slot is not what it should be."""

    rank: int
    slot: int
    seq: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareSeen:
    """A peer copy found in memory at start, and checked."""

    rank: int
    spare: int
    shard: Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStored:
    """A shard lies in the local tier, durably, under this path.

    One found at start has no ``slot``, and ``job_uid`` says of which job it is.
    """

    shard: Shard
    path: str
    slot: int | None
    job_uid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSeen:
    """So many bytes are free on this node's disk."""

    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftoversRead:
    """All that an earlier life left on this node's disk has been read and told of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStored:
    """A shard and its index lie in the object store: a receipt."""

    slot: int
    receipt: Copy


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFailed:
    """A shard could not be stored in a tier.

    ``damaged``: the slot's own bytes are wrong. ``quarantine``: the medium lost writes and is not to be trusted.
    ``no_room``: it is full.
    """

    tier: SlowTier
    shard: Shard
    slot: int
    reason: str
    damaged: bool = False
    quarantine: bool = False
    no_room: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerSeen:
    """The inventory of a node of which this one holds copies."""

    inventory: Inventory


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """A peer copy was received, hashed as stored, and found right."""

    shard: Shard
    spare: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PullFailed:
    """A peer copy could not be had, or its bytes were wrong; ``no_room``: it does not fit here."""

    shard: Shard
    spare: int
    reason: str
    no_room: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySeen:
    """So many bytes of this node's memory are free for copies."""

    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Acked:
    """A peer says which digest it computed over the copy that it stored."""

    holder: str
    attempt_uid: str
    step: int
    rank: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeBegan:
    """Bytes of a copy begin to flow to a reader."""

    serve: int
    attempt_uid: str
    step: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeEnded:
    """No more bytes of it flow: sent to the end, or the connection was destroyed."""

    serve: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStaged:
    """A shard of the attempt's source is here and verified, or those of its ``tensors`` that were wanted."""

    attempt_uid: str
    shard: StagedShard
    tensors: frozenset[str] = frozenset({ALL})


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFailed:
    """A shard of the attempt's source can't be had; ``reason`` lists what was tried.

    ``again``: somebody did not answer who may have it, and may answer yet. That says nothing against the source.
    """

    attempt_uid: str
    rank: int
    reason: str
    again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyDoubted:
    """A copy of this node was wanted for a restore and did not have its digest."""

    attempt_uid: str
    step: int
    rank: int
    tier: Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBackDone:
    """An object was read back past the cache."""

    result: ReadBack


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBackFailed:
    """The store did not answer; nothing is known about the object."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed; ``now_s`` is monotonic."""

    now_s: float


OfService: TypeAlias = (
    Tick
    | FrameArrived
    | ConnectionClosed
    | OpenAnswered
    | DesiredArrived
    | DesiredConfirmed
    | AdoptionsRead
    | Adopted
    | AdoptFailed
)
OfSlots: TypeAlias = SlotsSeen | SlotsRefused | SlotHeld | SlotGone | SlotHashed | SlotDropped
OfTiers: TypeAlias = LocalStored | ObjectStored | StoreFailed | LeftoversRead | DiskSeen | ReadBackDone | ReadBackFailed
OfPeers: TypeAlias = SpareSeen | OwnerSeen | Pulled | PullFailed | MemorySeen | Acked | ServeBegan | ServeEnded
OfRestore: TypeAlias = ShardStaged | StageFailed | CopyDoubted
Event: TypeAlias = OfService | OfSlots | OfTiers | OfPeers | OfRestore
