"""What a sidecar's core wants done, as values. The runtime does it and reports back with events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from toprope.coordinator.wire import Inventory, OpenRequest, Provisional, ReadBackTask, RestoreShard
from toprope.sidecar.values import Alarm, Shard, Way
from toprope.trainer_hooks.link.slot import Page
from toprope.trainer_hooks.link.wire import FromSidecar


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send a frame to a trainer."""

    connection: int
    frame: FromSidecar


@dataclass(frozen=True, slots=True, kw_only=True)
class Hangup:
    """Close a trainer's connection once what was sent has left."""

    connection: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeSlots:
    """Make these slots of a rank, each of ``bytes``; answer SlotsSeen or SlotsRefused."""

    rank: int
    slots: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveSlots:
    """Delete these slots of a rank: the memory is wanted back."""

    rank: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAtSlots:
    """Read pages and locks of a rank's slots, and see whether those ``known`` are there; answer SlotsSeen."""

    rank: int
    known: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantSlot:
    """Write the EMPTY page and send SLOT; answer SlotGone if the slot's files are there no more.

    With ``check_lock`` first see that nobody holds the lock, else answer SlotHeld.
    """

    connection: int
    slot: int
    page: Page
    capacity: int
    check_lock: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EmptySlot:
    """Write the page EMPTY: what the slot held is gone."""

    slot: int
    page: Page


@dataclass(frozen=True, slots=True, kw_only=True)
class HashSlot:
    """Hash a sealed slot, or check one against ``digest``; answer SlotHashed or SlotDropped."""

    rank: int
    slot: int
    seq: int
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLocal:
    """Write a hashed slot to the local tier; answer LocalStored or StoreFailed."""

    slot: int
    shard: Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreObject:
    """Write a hashed slot and its index to the object store; answer ObjectStored or StoreFailed."""

    slot: int
    shard: Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class DropLocal:
    """Delete a local copy that nothing needs."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Follow:
    """Watch these owners (node, url), and no others; report OwnerSeen."""

    owners: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """Receive a shard from its owner into a spare file, hash what was stored, acknowledge it."""

    url: str
    shard: Shard
    spare: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveSpares:
    """Delete these spare files of a rank."""

    rank: int
    spares: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Get a verified copy of a shard, trying the ways in order; answer ShardStaged or StageFailed.

    Of its tensors only ``tensors`` need be there; where it has to be fetched it is put into a file of its own,
    numbered ``part``.
    """

    attempt_uid: str
    source_attempt_uid: str
    step: int
    shard: RestoreShard
    ways: tuple[Way, ...]
    tensors: frozenset[str]
    part: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DropStage:
    """Delete staged files, but for those of attempt ``keep``."""

    keep: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadObjectBack:
    """Read an object past the page cache and say what digest it has."""

    task: ReadBackTask


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAttempt:
    """Ask the coordinator for an attempt; answer OpenAnswered."""

    connection: int
    request: OpenRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopt:
    """Write down durably that an attempt is adopted, and forget these numbers; answer Adopted or AdoptFailed."""

    proposed: Provisional
    forget: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchDesired:
    """Ask the coordinator for its document now: someone waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Tell the world the new inventory; it replaces any that is still waiting to be told."""

    inventory: Inventory


@dataclass(frozen=True, slots=True, kw_only=True)
class Shout:
    """Log and count something that costs protection or that a person should know."""

    what: Alarm
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """End this process: it is not wanted."""

    reason: str


Instant: TypeAlias = Send | Hangup | Follow | Publish | Shout | Exit
"""What takes no time."""
Near: TypeAlias = MakeSlots | RemoveSlots | RemoveSpares | LookAtSlots | GrantSlot | EmptySlot | HashSlot | DropStage
"""What is done in this node's memory."""
Far: TypeAlias = (
    StoreLocal | StoreObject | DropLocal | Pull | Stage | ReadObjectBack | OpenAttempt | Adopt | FetchDesired
)
"""What goes beyond it."""
Lasting: TypeAlias = Near | Far
Effect: TypeAlias = Instant | Lasting
