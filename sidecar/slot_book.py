"""Which slot is whose and in what state: the pure part of the memory tier.

A slot goes FREE > GRANTED > SEALED > HASHED > FREE. HASHED slots stay as long as they may: one is given back when the
rank has no other slot to write into, nothing uses it, and ``keep`` does not name it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from toprope.coordinator.wire import Skip
from toprope.sidecar.effects import Effect, EmptySlot, GrantSlot, HashSlot, MakeSlots, RemoveSlots, Shout
from toprope.sidecar.events import SlotDropped, SlotGone, SlotHashed, SlotHeld, SlotsSeen
from toprope.sidecar.values import Shard, SlotSight
from toprope.trainer_hooks.link.slot import Page, SlotState
from toprope.trainer_hooks.link.wire import Sealed

SLOTS_PER_RANK = 3
HOLD_S = 30.0
"""How long a hashed snapshot that is not yet kept goes before a newer one of the same rank."""
RETRY_S = 5.0
FOREVER = float("inf")


class Phase(enum.Enum):
    """Where a slot stands. SEALED is being hashed."""

    FREE = enum.auto()
    GRANTED = enum.auto()
    SEALED = enum.auto()
    HASHED = enum.auto()


@dataclass(slots=True, kw_only=True)
class SlotRecord:
    """What is known of one slot. ``launch_id`` is the process that it was last granted to; ``uses`` end at a time.

    ``gone``: somebody has removed files of it. Who has it open goes on with it, and it is lent to nobody any more.
    """

    rank: int
    number: int
    capacity: int
    seq: int = 0
    phase: Phase = Phase.FREE
    launch_id: str = ""
    connection: int | None = None
    lock_held: bool = False
    shard: Shard | None = None
    hashed_at_s: float = 0.0
    uses: dict[str, float] = field(default_factory=dict)
    world: int = 0
    gone: bool = False

    def fits(self, size: int) -> bool:
        """Say whether it may be lent for a snapshot of so many bytes."""
        return not self.gone and self.capacity >= size


@dataclass(frozen=True, slots=True, kw_only=True)
class Grantee:
    """A trainer that may be given slots, of ``image_bytes`` each (0: it has not said yet)."""

    rank: int
    connection: int
    launch_id: str
    world: int
    image_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What slots are needed for: steps that must stay, the attempt that trains, shards that a slower tier awaits.

    ``dropped``: steps that can't be protected any more.
    """

    kept: frozenset[tuple[str, int]]
    attempt_uid: str
    dropped: frozenset[tuple[str, int]] = frozenset()
    awaited: frozenset[Shard] = frozenset()


@dataclass(slots=True)
class SlotBook:
    """The slots of this node."""

    slots: dict[tuple[int, int], SlotRecord] = field(default_factory=dict)
    wanted_bytes: dict[int, int] = field(default_factory=dict)
    making: set[int] = field(default_factory=set)
    retry_at_s: dict[int, float] = field(default_factory=dict)
    refusals: dict[int, str] = field(default_factory=dict)
    """By rank why there are no slots of the size that it announced."""
    skipped: list[Skip] = field(default_factory=list)
    asked: dict[int, tuple[str, int]] = field(default_factory=dict)
    """By rank the sealed step that its trainer wants in each tier."""
    numbered: dict[int, int] = field(default_factory=dict)
    """By rank how many numbers its slots have had. None is used again: what was seen of one slot is not of another."""

    def of_rank(self, rank: int) -> list[SlotRecord]:
        """Return the slots of a rank, in order."""
        return [self.slots[key] for key in sorted(self.slots) if key[0] == rank]

    def ranks(self) -> list[int]:
        """Return the ranks that have slots here."""
        return sorted({rank for rank, _ in self.slots})

    def numbers(self, rank: int) -> tuple[int, ...]:
        """Return the numbers of the slots of a rank."""
        return tuple(record.number for record in self.of_rank(rank))

    def hashed(self) -> list[tuple[SlotRecord, Shard]]:
        """Return the slots that hold a verified shard."""
        records = [self.slots[key] for key in sorted(self.slots)]
        return [(record, record.shard) for record in records if record.phase is Phase.HASHED and record.shard]

    def is_hashing(self) -> bool:
        """Say whether a slot is being hashed or checked, so that it is not listed yet."""
        return any(record.phase is Phase.SEALED for record in self.slots.values())

    def holder_launch(self, rank: int) -> str | None:
        """Return the launch whose process holds a lock on a slot of this rank, if one does."""
        return next((record.launch_id for record in self.of_rank(rank) if record.lock_held), None)

    # What was seen or said

    def see(self, event: SlotsSeen, *, connected: frozenset[int]) -> list[Effect]:
        """Take in slots as they lie in memory: adopt new ones, notice dead owners, finish what a lost frame said."""
        if event.made:
            self.making.discard(event.rank)
            self.refusals.pop(event.rank, None)
        effects = self._note_gone(event)
        for sight in event.sights:
            record = self.slots.get((event.rank, sight.slot))
            if record is not None:
                # a lock that has no name any more can't be looked at, and its holder is there while it is connected
                held = sight.lock_held or (sight.gone and record.lock_held and record.connection in connected)
                record.lock_held = held
                effects += self._reconcile(record, sight, connected=connected)
            elif event.rank not in self.making and not sight.gone:  # those being made may yet be taken back
                effects += self._adopt(event.rank, sight)
        return effects

    def _note_gone(self, event: SlotsSeen) -> list[Effect]:
        """Take in which slots are gone, and say so."""
        seen = {sight.slot for sight in event.sights if sight.gone}
        new = [record for record in self.of_rank(event.rank) if record.number in seen and not record.gone]
        for record in new:
            record.gone = True
        numbers = ", ".join(str(record.number) for record in new)
        text = f"rank {event.rank}: files of its slots {numbers} were removed from memory; others are made"
        return [Shout(what="slots-gone", text=text)] if new else []

    def _adopt(self, rank: int, sight: SlotSight) -> list[Effect]:
        page = sight.page
        self.numbered[rank] = max(self.numbered.get(rank, 0), sight.slot + 1)
        record = SlotRecord(
            rank=rank,
            number=sight.slot,
            capacity=sight.capacity,
            seq=page.seq,
            launch_id=page.launch_id,
            lock_held=sight.lock_held,
            world=page.world,
        )
        self.slots[rank, sight.slot] = record
        match page.state:
            case SlotState.EMPTY:
                return []
            case SlotState.SEALED:
                record.phase = Phase.SEALED
                return [HashSlot(rank=rank, slot=sight.slot, seq=page.seq)]
            case SlotState.HASHED:
                record.phase = Phase.SEALED
                return [HashSlot(rank=rank, slot=sight.slot, seq=page.seq, digest=page.digest)]
            case SlotState.WRITING:
                record.phase = Phase.GRANTED
                return [] if sight.lock_held else self._torn(record, page)

    def _reconcile(self, record: SlotRecord, sight: SlotSight, *, connected: frozenset[int]) -> list[Effect]:
        """Follow the page of a granted slot once the connection over which it was granted is gone, or its owner is.

        Whoever writes holds the lock, so a snapshot that was begun and has no lock has lost its writer, although a
        forked child may keep the connection open.
        """
        page = sight.page
        begun = page.seq == record.seq and page.state is not SlotState.EMPTY
        lost = record.connection not in connected or (begun and not sight.lock_held and not sight.gone)
        if record.phase is not Phase.GRANTED or not lost:
            return []
        if begun and page.state is SlotState.SEALED:
            record.phase = Phase.SEALED
            return [HashSlot(rank=record.rank, slot=record.number, seq=record.seq)]
        if begun and sight.lock_held:
            return []
        if begun:
            return self._torn(record, page)
        record.phase = Phase.FREE
        return []

    def _torn(self, record: SlotRecord, page: Page) -> list[Effect]:
        self.skip(Skip(attempt_uid=page.attempt_uid, step=page.step, rank=record.rank, reason="torn: the trainer died"))
        return [self._release(record)]

    def seal(self, rank: int, launch_id: str, frame: Sealed) -> list[Effect]:
        """Take back a slot that its trainer has sealed; a frame that does not fit the current grant is ignored."""
        record = self.slots.get((rank, frame.slot))
        if record is None or record.phase is not Phase.GRANTED:
            return []
        if record.seq != frame.seq or record.launch_id != launch_id:
            return []
        if not 0 < frame.bytes <= record.capacity:
            reason = f"an image of {frame.bytes} bytes in a slot of {record.capacity}"
            self.skip(Skip(attempt_uid=frame.attempt_uid, step=frame.step, rank=rank, reason=reason))
            return [self._release(record)]
        record.phase = Phase.SEALED
        return [HashSlot(rank=rank, slot=frame.slot, seq=frame.seq)]

    def on_hashed(self, event: SlotHashed, *, now_s: float) -> None:
        """Take in that a slot now holds a verified shard."""
        record = self._current(event.shard.rank, event.slot, event.seq)
        if record is not None:
            record.phase, record.shard, record.hashed_at_s = Phase.HASHED, self._wanted(event.shard), now_s
            record.world = event.shard.world

    def ask(self, rank: int, attempt_uid: str, step: int) -> None:
        """Let a sealed step of a rank go to each tier, due or not."""
        self.asked[rank] = (attempt_uid, step)
        for record in self.of_rank(rank):
            record.shard = self._wanted(record.shard) if record.shard is not None else None

    def _wanted(self, shard: Shard) -> Shard:
        return replace(shard, asked=True) if self.asked.get(shard.rank) == shard.of_step else shard

    def on_dropped(self, event: SlotDropped) -> list[Effect]:
        """Drop a slot whose content is not what it should be. It is lent again once nothing reads it any more."""
        record = self._current(event.rank, event.slot, event.seq)
        if record is None:
            return []
        if record.shard is not None:
            self.skip(_skip_of(record.shard, event.reason))
        reading = {use: end for use, end in record.uses.items() if not use.startswith("peer:")}
        released = self._release(record)
        record.uses.update(reading)
        return [released]

    def _current(self, rank: int, slot: int, seq: int) -> SlotRecord | None:
        record = self.slots.get((rank, slot))
        return record if record is not None and record.seq == seq and record.phase is Phase.SEALED else None

    def check(self, record: SlotRecord) -> HashSlot:
        """Doubt a hashed slot: nothing uses it until it has been checked against its digest."""
        assert record.shard is not None
        record.phase = Phase.SEALED
        return HashSlot(rank=record.rank, slot=record.number, seq=record.seq, digest=record.shard.digest)

    def find(self, attempt_uid: str, step: int, rank: int) -> SlotRecord | None:
        """Return the slot that holds this verified shard."""
        return next((r for r, shard in self.hashed() if shard.of_step == (attempt_uid, step) and r.rank == rank), None)

    def skip(self, skip: Skip) -> None:
        """Remember a due step of which there is no snapshot; the newest 32 are told."""
        self.skipped = [*self.skipped, skip][-32:]

    # Uses

    def expire_uses(self, *, now_s: float) -> list[tuple[SlotRecord, str]]:
        """End uses whose deadline has passed, and say which."""
        over = [
            (self.slots[k], use) for k in sorted(self.slots) for use, end in self.slots[k].uses.items() if end <= now_s
        ]
        for record, use in over:
            del record.uses[use]
        return over

    # What to do

    def plan(self, to: Grantee, *, needs: Needs, now_s: float) -> list[Effect]:
        """Make the slots that a rank needs for the size it announced, and give up those that have become too small."""
        wanted = to.image_bytes
        if wanted == 0 or to.rank in self.making:
            return []
        first = self.numbered.get(to.rank, 0)
        effects = self._give_up_unfit(to, wanted, needs=needs, now_s=now_s)
        missing = SLOTS_PER_RANK - sum(record.fits(wanted) for record in self.of_rank(to.rank))
        if missing <= 0 or now_s < self.retry_at_s.get(to.rank, 0.0):
            return effects
        self.making.add(to.rank)
        return [*effects, MakeSlots(rank=to.rank, slots=tuple(range(first, first + missing)), bytes=wanted)]

    def _give_up_unfit(self, to: Grantee, wanted: int, *, needs: Needs, now_s: float) -> list[Effect]:
        """Remove the slots that are too small by now, or gone, each as soon as its content is needed no more."""
        records = self.of_rank(to.rank)
        expendable = _expendable(records, needs=needs, launch_id=to.launch_id, now_s=now_s)
        unfit = tuple(
            record.number
            for record in records
            if not record.fits(wanted)
            and not record.uses
            and (record.phase is Phase.FREE or (needs.attempt_uid and any(record is other for _, other in expendable)))
        )
        for number in unfit:
            del self.slots[to.rank, number]
        return [RemoveSlots(rank=to.rank, slots=unfit)] if unfit else []

    def refuse(self, rank: int, reason: str, *, now_s: float) -> None:
        """Take in that there was no room; it is tried again later."""
        self.refusals[rank] = reason
        self.making.discard(rank)
        self.retry_at_s[rank] = now_s + RETRY_S

    def grants(self, to: Grantee, *, needs: Needs, now_s: float) -> list[Effect]:
        """Lend the trainer each free slot; if it then has none at all, free one for it.

        Before it has said how large they must be it gets those alone that were lent to it before this sidecar began.
        """
        records = [
            record
            for record in self.of_rank(to.rank)
            if record.fits(to.image_bytes) and (to.image_bytes or record.launch_id == to.launch_id)
        ]
        free = [record for record in records if _is_free_for(record, to)]
        # without a word of the coordinator since its own start, a sidecar can't know what is kept: it frees nothing
        if needs.attempt_uid and not free and not any(record.phase is Phase.GRANTED for record in records):
            victim = _victim(records, needs=needs, launch_id=to.launch_id, now_s=now_s)
            free = [victim] if victim is not None else []
        return [self._grant(record, to) for record in free]

    def _grant(self, record: SlotRecord, to: Grantee) -> Effect:
        known = record.launch_id in {"", to.launch_id}
        record.seq += 1
        record.phase, record.shard, record.world = Phase.GRANTED, None, to.world
        record.launch_id, record.connection = to.launch_id, to.connection
        page = self._empty_page(record)
        return GrantSlot(
            connection=to.connection, slot=record.number, page=page, capacity=record.capacity, check_lock=not known
        )

    def on_held(self, event: SlotHeld) -> None:
        """Take in that a grant was not made, since another process can still write into the slot."""
        record = self.slots.get((event.rank, event.slot))
        if record is not None and record.seq == event.seq and record.phase is Phase.GRANTED:
            record.phase, record.lock_held, record.connection = Phase.FREE, True, None
            record.launch_id = event.launch_id

    def on_gone(self, event: SlotGone) -> None:
        """Take in that a grant was not made, since the slot lacks a file."""
        record = self.slots.get((event.rank, event.slot))
        if record is not None and record.seq == event.seq and record.phase is Phase.GRANTED:
            record.phase, record.gone, record.connection = Phase.FREE, True, None

    def release_departed(self, rank: int, *, kept: frozenset[tuple[str, int]]) -> list[Effect]:
        """Give back the memory of a rank that lives on another node now, as far as nothing needs it."""
        gone = [
            record
            for record in self.of_rank(rank)
            if record.phase in {Phase.FREE, Phase.HASHED}
            and not record.uses
            and not record.lock_held
            and (record.shard is None or record.shard.of_step not in kept)
        ]
        for record in gone:
            del self.slots[rank, record.number]
        return [RemoveSlots(rank=rank, slots=tuple(record.number for record in gone))] if gone else []

    def _release(self, record: SlotRecord) -> Effect:
        record.phase, record.shard = Phase.FREE, None
        record.uses.clear()
        return EmptySlot(slot=record.number, page=self._empty_page(record))

    def _empty_page(self, record: SlotRecord) -> Page:
        return Page(seq=record.seq, launch_id=record.launch_id, rank=record.rank, world=record.world)


def _victim(records: Iterable[SlotRecord], *, needs: Needs, launch_id: str, now_s: float) -> SlotRecord | None:
    """Return the hashed slot that is needed least, or None when each is needed more than a new snapshot."""
    over = _expendable(records, needs=needs, launch_id=launch_id, now_s=now_s)
    return min(over, key=lambda pair: (pair[0] in needs.awaited, pair[0]))[1] if over else None


def _expendable(
    records: Iterable[SlotRecord], *, needs: Needs, launch_id: str, now_s: float
) -> list[tuple[Shard, SlotRecord]]:
    """Return the hashed slots, with their shards, that are needed less than a new snapshot."""
    hashed = [(record, record.shard) for record in records if record.phase is Phase.HASHED and record.shard is not None]
    current = [shard for _, shard in hashed if shard.attempt_uid == needs.attempt_uid]
    newest = max(current, default=None)
    newest_kept = max((shard for shard in current if shard.of_step in needs.kept), default=None)
    idle = [
        (record, shard)
        for record, shard in hashed
        if not record.uses
        and shard.of_step not in needs.kept
        and not (record.lock_held and record.launch_id != launch_id)
    ]
    return [
        (shard, record)
        for record, shard in idle
        if shard.attempt_uid != needs.attempt_uid
        or (newest_kept is not None and shard < newest_kept)
        or shard.of_step in needs.dropped
        or (shard != newest and now_s - record.hashed_at_s >= HOLD_S)
    ]


def _is_free_for(record: SlotRecord, to: Grantee) -> bool:
    """Say whether a slot may be lent: nobody reads it or can write into it, a superseded process has not begun to."""
    theirs = record.launch_id != to.launch_id
    unused = record.phase is Phase.FREE or (theirs and record.phase is Phase.GRANTED)
    return unused and not record.uses and not (theirs and record.lock_held)


def _skip_of(shard: Shard, reason: str) -> Skip:
    return Skip(attempt_uid=shard.attempt_uid, step=shard.step, rank=shard.rank, reason=reason)
