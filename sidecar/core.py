"""The decisions of a sidecar: a synchronous state machine. ``handle(event)`` returns what is to be done.

Events change what is known; then ``_settle`` derives from it all that follows, so that a lost, doubled or late event
costs nothing but time. No I/O, no clock, no randomness here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import msgspec

from toprope.coordinator.wire import (
    Copy,
    Desired,
    Inventory,
    OpenRequest,
    Place,
    RankState,
    RankVerdict,
    ReadBack,
    Skip,
)
from toprope.sidecar import effects as do
from toprope.sidecar import events as on
from toprope.sidecar.effects import Effect
from toprope.sidecar.events import Event
from toprope.sidecar.peer_book import PeerBook
from toprope.sidecar.restore_book import RestoreBook, Trainer, ways_to
from toprope.sidecar.slot_book import FOREVER, Grantee, Needs, SlotBook
from toprope.sidecar.tier_book import TierBook
from toprope.sidecar.values import Shard, Way
from toprope.trainer_hooks import wire

FETCH_EVERY_S = 0.3
READING_FOR_S = 60.0
"""How long restores wait for what lies on this node's disk; a disk that takes longer must not stop the job."""


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


@dataclass(slots=True)
class RankNotes:
    """What is remembered of a rank between its frames."""

    world: int = 0
    launch_id: str = ""
    attempt_uid: str = ""
    step: int = 0
    verdict: RankVerdict | None = None


@dataclass(slots=True)
class Core:
    """All that one sidecar knows."""

    me: Identity
    now_s: float = 0.0
    desired: Desired | None = None
    slots: SlotBook = field(default_factory=SlotBook)
    tiers: TierBook = field(default_factory=TierBook)
    peers: PeerBook = field(default_factory=PeerBook)
    restore: RestoreBook = field(default_factory=RestoreBook)
    trainers: dict[int, Trainer] = field(default_factory=dict)
    notes: dict[int, RankNotes] = field(default_factory=dict)
    offered: set[tuple[int, int, int]] = field(default_factory=set)
    serves: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    reading: set[str] = field(default_factory=set)
    read_backs: dict[str, ReadBack] = field(default_factory=dict)
    published: Inventory | None = None
    followed: tuple[tuple[str, str], ...] = ()
    began_s: float | None = None
    leftovers_read: bool = False
    stage_kept: str = ""
    fetch_at_s: float = 0.0

    # The door

    def handle(self, event: Event) -> tuple[Effect, ...]:
        """Take in one event and return all that is to be done now, in order."""
        effects: list[Effect] = [*self._HANDLERS[type(event)](self, event), *self._settle()]
        return tuple(effects)

    # What happened

    def _on_tick(self, event: on.Tick) -> list[Effect]:
        self.now_s = event.now_s
        self.began_s = event.now_s if self.began_s is None else self.began_s
        late = [
            do.Shout(what="use-deadline", text=f"rank {r.rank} slot {r.number}: {use} took too long and lost its copy")
            for r, use in self.slots.expire_uses(now_s=self.now_s)
        ]
        return [*late, *(do.LookAtSlots(rank=rank) for rank in self.slots.ranks())]

    def _on_frame(self, event: on.FrameArrived) -> list[Effect]:
        frame = event.frame
        if isinstance(frame, wire.Hello):
            return self._on_hello(event.connection, frame)
        trainer = self.trainers.get(event.connection)
        if trainer is None:
            return self._refuse(event.connection, f"the first frame was {frame.kind}; expected HELLO")
        return self._on_trainer_frame(trainer, frame)

    def _on_hello(self, connection: int, frame: wire.Hello) -> list[Effect]:
        if frame.version != wire.VERSION:
            return self._refuse(connection, f"frames of version {frame.version}; this sidecar speaks {wire.VERSION}")
        if frame.job != self.me.job:
            return self._refuse(connection, f"this is the sidecar of job {self.me.job}, not of job {frame.job}")
        if not 0 <= frame.rank < frame.world or not frame.launch_id or len(frame.launch_id) > 64:  # noqa: PLR2004 - ids are hex
            return self._refuse(connection, f"rank {frame.rank} of {frame.world}, launch {frame.launch_id!r:.80}")
        trainer = Trainer(connection=connection, rank=frame.rank, world=frame.world, launch_id=frame.launch_id)
        self.trainers[connection] = trainer
        notes = self.notes.setdefault(frame.rank, RankNotes())
        if notes.launch_id != frame.launch_id:
            self.notes[frame.rank] = RankNotes(launch_id=frame.launch_id)
        self.notes[frame.rank].world = frame.world
        welcome = do.Send(connection=connection, frame=wire.Welcome(node=self.me.node, boot_id=self.me.boot_id))
        return [welcome, do.LookAtSlots(rank=frame.rank)]

    def _refuse(self, connection: int, text: str) -> list[Effect]:
        error = do.Send(connection=connection, frame=wire.Error(code="refused", text=text))
        return [error, do.Hangup(connection=connection), do.Shout(what="refused", text=f"trainer refused: {text}")]

    def _on_trainer_frame(self, trainer: Trainer, frame: wire.FromHook) -> list[Effect]:
        notes = self.notes[trainer.rank]
        match frame:
            case wire.Open():
                return self._on_open(trainer, frame)
            case wire.Join():
                self._on_join(trainer, frame)
            case wire.Verdict():
                if frame.phase in {"staged", "applied"}:
                    notes.verdict = _verdict(frame)
            case wire.Size():
                if frame.bytes > 0:
                    self.slots.wanted_bytes[trainer.rank] = frame.bytes
            case wire.Sealed():
                notes.attempt_uid, notes.step = frame.attempt_uid, max(frame.step, notes.step)
                return self.slots.seal(trainer.rank, trainer.launch_id, frame)
            case wire.Skipped():
                notes.attempt_uid, notes.step = frame.attempt_uid, max(frame.step, notes.step)
                self.slots.skip(
                    Skip(attempt_uid=frame.attempt_uid, step=frame.step, rank=trainer.rank, reason=frame.reason[:200])
                )
            case wire.Bye() | wire.Hello():
                return [do.Hangup(connection=trainer.connection)]
        return []

    def _on_open(self, trainer: Trainer, frame: wire.Open) -> list[Effect]:
        world = tuple(Place(rank=place.rank, node=place.node, boot_id=place.boot_id) for place in frame.world)
        request = OpenRequest(
            job=self.me.job,
            launch_id=frame.launch_id,
            round=frame.round,
            world=world,
            spec=frame.spec,
            versions=frame.versions,
        )
        return [do.OpenAttempt(connection=trainer.connection, request=request)]

    def _on_join(self, trainer: Trainer, frame: wire.Join) -> None:
        notes = self.notes[trainer.rank]
        trainer.attempt_uid, trainer.joined, trainer.seen, trainer.misses = frame.attempt_uid, True, False, 0
        trainer.told.clear()
        if notes.attempt_uid != frame.attempt_uid:
            notes.attempt_uid, notes.step, notes.verdict = frame.attempt_uid, 0, None

    def _on_closed(self, event: on.ConnectionClosed) -> list[Effect]:
        trainer = self.trainers.pop(event.connection, None)
        return [] if trainer is None else [do.LookAtSlots(rank=trainer.rank)]

    def _on_desired(self, event: on.DesiredArrived) -> list[Effect]:
        new, old = event.desired, self.desired
        if new.job != self.me.job or (old is not None and new.job_uid != old.job_uid):
            return []
        if old is not None and (new.term, new.version) <= (old.term, old.version):
            return []
        self.desired = new
        reason = new.refused.get(self.me.incarnation)
        return [] if reason is None else [do.Exit(reason=reason)]

    def _on_confirmed(self, _event: on.DesiredConfirmed) -> list[Effect]:
        if self.desired is not None:
            for connection in sorted(self.trainers):
                self.trainers[connection].miss(self.desired)
        return []

    def _on_open_answered(self, event: on.OpenAnswered) -> list[Effect]:
        trainer = self.trainers.get(event.connection)
        if trainer is None:
            return []
        if event.answer.attempt is None:
            frame = wire.Error(code=event.answer.code or "unavailable", text=event.answer.text)
            return [do.Send(connection=event.connection, frame=frame)]
        trainer.opening = event.answer.attempt
        return []

    def _on_slots_seen(self, event: on.SlotsSeen) -> list[Effect]:
        return self.slots.see(event, connected=frozenset(self.trainers))

    def _on_slots_refused(self, event: on.SlotsRefused) -> list[Effect]:
        self.slots.refuse(event.rank, now_s=self.now_s)
        return [
            do.Shout(what="no-room", text=f"rank {event.rank} has no slots, its snapshots are skipped: {event.reason}")
        ]

    def _on_slot_held(self, event: on.SlotHeld) -> list[Effect]:
        self.slots.on_held(event)
        return []

    def _on_hashed(self, event: on.SlotHashed) -> list[Effect]:
        self.slots.on_hashed(event, now_s=self.now_s)
        return []

    def _on_dropped(self, event: on.SlotDropped) -> list[Effect]:
        shout = do.Shout(what="dropped", text=f"rank {event.rank} slot {event.slot} was dropped: {event.reason}")
        return [*self.slots.on_dropped(event), shout]

    def _on_spare_seen(self, event: on.SpareSeen) -> list[Effect]:
        self.peers.adopt(event.rank, event.spare, event.shard, now_s=self.now_s)
        return []

    def _on_local_stored(self, event: on.LocalStored) -> list[Effect]:
        self.tiers.on_local(event)
        self._end_use(event.shard.rank, event.slot, "local")
        return []

    def _on_leftovers_read(self, _event: on.LeftoversRead) -> list[Effect]:
        self.leftovers_read = True
        return []

    def _on_object_stored(self, event: on.ObjectStored) -> list[Effect]:
        self.tiers.on_object(event)
        self._end_use(event.receipt.rank, event.slot, "object")
        return []

    def _on_store_failed(self, event: on.StoreFailed) -> list[Effect]:
        self.tiers.on_failed(event, now_s=self.now_s)
        self._end_use(event.shard.rank, event.slot, event.tier)
        shout = do.Shout(
            what=f"{event.tier}-failed", text=f"rank {event.shard.rank} step {event.shard.step}: {event.reason}"
        )
        record = self.slots.find(event.shard.attempt_uid, event.shard.step, event.shard.rank)
        if event.damaged and record is not None:
            return [shout, self.slots.check(record)]
        return [shout]

    def _end_use(self, rank: int, slot: int | None, use: str) -> None:
        record = self.slots.slots.get((rank, slot)) if slot is not None else None
        if record is not None:
            record.uses.pop(use, None)

    def _on_owner_seen(self, event: on.OwnerSeen) -> list[Effect]:
        inventory = event.inventory
        if self.desired is not None and inventory.job_uid == self.desired.job_uid:
            self.peers.owners[inventory.node] = inventory
        return []

    def _on_pulled(self, event: on.Pulled) -> list[Effect]:
        self.peers.on_pulled(event, now_s=self.now_s)
        return []

    def _on_pull_failed(self, event: on.PullFailed) -> list[Effect]:
        self.peers.on_failed(event, now_s=self.now_s)
        text = f"rank {event.shard.rank} step {event.shard.step} was not copied from its peer: {event.reason}"
        return [do.Shout(what="peer-failed", text=text)]

    def _on_acked(self, event: on.Acked) -> list[Effect]:
        record = self.slots.find(event.attempt_uid, event.step, event.rank)
        if record is None or record.shard is None:
            return []
        if event.digest == record.shard.digest:
            # a holder takes the newest only: it will not come for an older one any more
            for other in self.slots.of_rank(event.rank):
                if other.shard is not None and other.shard <= record.shard:
                    other.uses.pop(f"peer:{event.holder}", None)
            return []
        text = (
            f"rank {event.rank} step {event.step}: {event.holder} received digest {event.digest}, "
            f"expected {record.shard.digest}; the slot is checked"
        )
        return [do.Shout(what="digest-differs", text=text), self.slots.check(record)]

    def _on_serve_began(self, event: on.ServeBegan) -> list[Effect]:
        self.serves[event.serve] = (event.attempt_uid, event.step, event.rank)
        record = self.slots.find(event.attempt_uid, event.step, event.rank)
        if record is not None:
            record.uses[f"serve:{event.serve}"] = FOREVER
        spare = self.peers.find(event.attempt_uid, event.step, event.rank)
        if spare is not None:
            spare[1].uses.add(f"serve:{event.serve}")
        return []

    def _on_serve_ended(self, event: on.ServeEnded) -> list[Effect]:
        self.serves.pop(event.serve, None)
        for key in sorted(self.slots.slots):
            self.slots.slots[key].uses.pop(f"serve:{event.serve}", None)
        for key in sorted(self.peers.spares):
            self.peers.spares[key].uses.discard(f"serve:{event.serve}")
        return []

    def _on_shard_staged(self, event: on.ShardStaged) -> list[Effect]:
        self.restore.on_staged(event)
        return []

    def _on_stage_failed(self, event: on.StageFailed) -> list[Effect]:
        self.restore.on_failed(event)
        return [do.Shout(what="stage-failed", text=f"shard of rank {event.rank} can't be had: {event.reason}")]

    def _on_doubted(self, event: on.CopyDoubted) -> list[Effect]:
        """List a wrong copy no more; a slot is checked, since a slot may only be given up as a whole."""
        text = f"the {event.tier} copy of step {event.step} of rank {event.rank} here is damaged"
        shout = do.Shout(what="digest-differs", text=text)
        if event.tier == "memory":
            record = self.slots.find(event.attempt_uid, event.step, event.rank)
            return [shout] if record is None else [shout, self.slots.check(record)]
        if event.tier == "peer":
            found = self.peers.find(event.attempt_uid, event.step, event.rank)
            if found is not None:
                self.peers.drop(event.rank, found[0])
            return [shout]
        return [shout, *self.tiers.drop_local(event.attempt_uid, event.step, event.rank)]

    def _on_read_back(self, event: on.ReadBackDone) -> list[Effect]:
        self.reading.discard(event.result.key)
        self.read_backs[event.result.key] = event.result
        return []

    def _on_read_back_failed(self, event: on.ReadBackFailed) -> list[Effect]:
        self.reading.discard(event.key)
        return []

    # What follows

    def _settle(self) -> list[Effect]:
        desired = self.desired
        effects: list[Effect] = []
        if desired is not None:
            effects += self._carry_on(desired)
            effects += self._restore(desired)
            effects += self._read_back(desired)
        effects += self._lend()
        effects += self._fetch()
        return [*effects, *self._publish()]

    def _kept(self) -> frozenset[tuple[str, int]]:
        if self.desired is None:
            return frozenset()
        kept = {(kept.attempt_uid, kept.step) for kept in self.desired.keep}
        attempt = self.desired.attempt
        if attempt is not None and attempt.phase in {"opened", "staged"} and attempt.source != "fresh":
            kept.add((attempt.source_attempt_uid, attempt.from_step))
        return frozenset(kept)

    def _dropped(self) -> frozenset[tuple[str, int]]:
        dropped = self.desired.dropped if self.desired is not None else ()
        return frozenset((one.attempt_uid, one.step) for one in dropped) - self._kept()

    def _attempt_uid(self) -> str:
        attempt = self.desired.attempt if self.desired is not None else None
        return attempt.uid if attempt is not None else ""

    def _carry_on(self, desired: Desired) -> list[Effect]:
        """Send what is hashed to the other tiers; give up what nothing needs."""
        uid, kept = self._attempt_uid(), self._kept()
        self._offer(desired)
        effects = self.tiers.plan(self.slots.hashed(), desired.cadence, attempt_uid=uid, now_s=self.now_s)
        effects += self.tiers.retire_local(kept=kept)
        owners = {place.owner: place.url for place in desired.placement if place.holder == self.me.node and place.url}
        if tuple(sorted(owners.items())) != self.followed:
            self.followed = tuple(sorted(owners.items()))
            effects.append(do.Follow(owners=self.followed))
        attempt = desired.attempt
        if attempt is None:
            return effects
        effects += self.peers.plan(
            owners, kept=kept, dropped=self._dropped(), attempt=attempt.number, attempt_uid=uid, now_s=self.now_s
        )
        if attempt.phase == "applied":
            here = {place.rank for place in attempt.world if place.node == self.me.node}
            for rank in sorted(set(self.slots.ranks()) - here):
                effects += self.slots.release_departed(rank, kept=kept)
            effects += self.peers.release(owners=frozenset(owners), kept=kept, attempt_uid=uid)
        return effects

    def _offer(self, desired: Desired) -> None:
        """Hold each newly hashed slot for those who are to copy it, until they have or their time is up.

        A holder takes the newest of a rank only, so none older is held for it: after a restart all are newly hashed.
        """
        holders = [place.holder for place in desired.placement if place.owner == self.me.node]
        dropped = self._dropped()
        newest: dict[int, Shard] = {}
        for record, shard in self.slots.hashed():
            newest[record.rank] = max(shard, newest.get(record.rank, shard))
        for record, shard in self.slots.hashed():
            if shard.of_step in dropped:
                record.uses = {use: end for use, end in record.uses.items() if not use.startswith("peer:")}
                continue
            mark = (record.rank, record.number, record.seq)
            if holders and mark not in self.offered and shard == newest[record.rank]:
                self.offered = {other for other in self.offered if other[:2] != mark[:2]} | {mark}
                record.uses.update({f"peer:{holder}": self.now_s + self.me.use_deadline_s for holder in holders})

    def _restore(self, desired: Desired) -> list[Effect]:
        effects: list[Effect] = []
        attempt = desired.attempt
        if attempt is not None and any(t.joined and t.attempt_uid == attempt.uid for t in self.trainers.values()):
            live = attempt.phase in {"opened", "staged", "applied"}
            needed = any(t.joined and "STAGED" not in t.told for t in self.trainers.values())
            if live and needed and attempt.uid != self.restore.attempt_uid:
                ways = {
                    shard.rank: ways_to(
                        shard,
                        me=self.me.node,
                        here=self._here(attempt.source_attempt_uid, attempt.from_step, shard.rank),
                        url_of_me=self.me.url,
                    )
                    for shard in attempt.restore
                }
                effects += self.restore.begin(attempt, ways)
        for connection in sorted(self.trainers):
            effects += self.restore.tell(self.trainers[connection], desired)
        keep = attempt.uid if attempt is not None and attempt.phase in {"opened", "staged"} else ""
        if keep != self.stage_kept:
            self.stage_kept = keep
            effects.append(do.DropStage(keep=keep))
        return effects

    def _here(self, attempt_uid: str, step: int, rank: int) -> list[tuple[Way, str]]:
        """Return this node's own copies of a shard, nearest first, each with its digest."""
        found: list[tuple[Way, str]] = []
        record = self.slots.find(attempt_uid, step, rank)
        if record is not None and record.shard is not None:
            path = self.me.slot_path(rank, record.number)
            found.append((Way(kind="here", tier="memory", node=self.me.node, path=path), record.shard.digest))
        spare = self.peers.find(attempt_uid, step, rank)
        if spare is not None and spare[1].held is not None:
            path = self.me.spare_path(rank, spare[0])
            found.append((Way(kind="here", tier="peer", node=self.me.node, path=path), spare[1].held.digest))
        for shard in sorted(self.tiers.local):
            if shard.of_step == (attempt_uid, step) and shard.rank == rank:
                path = self.tiers.local[shard]
                found.append((Way(kind="here", tier="local", node=self.me.node, path=path), shard.digest))
        return found

    def locate(self, attempt_uid: str, step: int, rank: int) -> list[tuple[Way, int]]:
        """Return this node's files that hold a shard, nearest first, each with the shard's length."""
        lengths = {
            copy.digest: copy.bytes
            for copy in self._copies()
            if (copy.attempt_uid, copy.step, copy.rank) == (attempt_uid, step, rank)
        }
        return [(way, lengths[digest]) for way, digest in self._here(attempt_uid, step, rank) if digest in lengths]

    def _read_back(self, desired: Desired) -> list[Effect]:
        tasks = {task.key: task for task in desired.read_backs if task.node == self.me.node}
        self.read_backs = {key: done for key, done in self.read_backs.items() if key in tasks}
        new = [tasks[key] for key in sorted(tasks) if key not in self.read_backs and key not in self.reading]
        self.reading.update(task.key for task in new)
        return [do.ReadObjectBack(task=task) for task in new]

    def _lend(self) -> list[Effect]:
        """Make slots for the trainers of the current attempt and lend them out."""
        effects: list[Effect] = []
        awaited: frozenset[Shard] = frozenset()
        if self.desired is not None:
            hashed = self.slots.hashed()
            awaited = self.tiers.awaited(hashed, self.desired.cadence, attempt_uid=self._attempt_uid())
        needs = Needs(kept=self._kept(), attempt_uid=self._attempt_uid(), awaited=awaited, dropped=self._dropped())
        for connection in sorted(self.trainers):
            trainer = self.trainers[connection]
            if not self._may_save(trainer):
                continue
            grantee = Grantee(
                rank=trainer.rank, connection=connection, launch_id=trainer.launch_id, world=trainer.world
            )
            effects += self.slots.plan(grantee, needs=needs, now_s=self.now_s)
            effects += self.slots.grants(grantee, needs=needs, now_s=self.now_s)
        return effects

    def _may_save(self, trainer: Trainer) -> bool:
        """Say whether a trainer belongs to the attempt that trains, as far as this sidecar knows."""
        if any(
            other.rank == trainer.rank and other.connection > trainer.connection for other in self.trainers.values()
        ):
            return False
        if self.desired is None:
            return self.slots.holder_launch(trainer.rank) == trainer.launch_id
        attempt = self.desired.attempt
        return attempt is not None and attempt.launch_id == trainer.launch_id and attempt.phase == "applied"

    def _fetch(self) -> list[Effect]:
        """Ask for the coordinator's document while a trainer waits for an attempt that is not in it yet."""
        waits = any(
            trainer.opening is not None or (trainer.joined and not trainer.seen) for trainer in self.trainers.values()
        )
        if not (waits or self.desired is None) or self.now_s < self.fetch_at_s:
            return []
        self.fetch_at_s = self.now_s + FETCH_EVERY_S
        return [do.FetchDesired()]

    # The inventory

    def _copies(self) -> list[Copy]:
        memory = sorted(shard for _, shard in self.slots.hashed())
        return [*(shard.copy("memory") for shard in memory), *self.peers.copies(), *self.tiers.copies()]

    def _rank_states(self) -> list[RankState]:
        connected = {trainer.rank for trainer in self.trainers.values()}
        attempt = self.desired.attempt if self.desired is not None else None
        placed = {p.rank for p in attempt.world if p.node == self.me.node} if attempt is not None else set()
        locked = {rank for rank in self.slots.ranks() if self.slots.holder_launch(rank) is not None}
        return [self._rank_state(rank) for rank in sorted(connected | locked | (placed & set(self.notes)))]

    def _rank_state(self, rank: int) -> RankState:
        """Return where a rank stands; what its frames have not said since this sidecar started, its slots say."""
        notes = self.notes.get(rank, RankNotes())
        holder = self.slots.holder_launch(rank)
        records = self.slots.of_rank(rank)
        newest = max((record.shard for record in records if record.shard is not None), default=None)
        known = notes.attempt_uid != "" or newest is None
        return RankState(
            rank=rank,
            world=notes.world or max((record.world for record in records), default=0),
            launch_id=holder if holder is not None else notes.launch_id,
            attempt_uid=notes.attempt_uid if newest is None or known else newest.attempt_uid,
            step=notes.step if newest is None or known else newest.step,
            lock_held=holder is not None,
            state_bytes=self.slots.wanted_bytes.get(rank, 0),
            verdict=self.restore.verdict(notes.attempt_uid) or notes.verdict,
        )

    def _is_reading(self) -> bool:
        """Say whether there may be more here than is listed: a restore decided now could pass over the newest step."""
        in_time = self.began_s is None or self.now_s - self.began_s < READING_FOR_S
        return (not self.leftovers_read and in_time) or self.slots.is_hashing()

    def _publish(self) -> list[Effect]:
        if self.desired is None:
            return []
        inventory = Inventory(
            job=self.me.job,
            job_uid=self.desired.job_uid,
            node=self.me.node,
            boot_id=self.me.boot_id,
            incarnation=self.me.incarnation,
            version=self.published.version if self.published is not None else 0,
            url=self.me.url,
            domain=self.me.domain,
            ranks=tuple(self._rank_states()),
            copies=tuple(self._copies()),
            skipped=tuple(self.slots.skipped),
            read_backs=tuple(self.read_backs[key] for key in sorted(self.read_backs)),
            reading=self._is_reading(),
        )
        if inventory == self.published:
            return []
        self.published = _next(inventory)
        return [do.Publish(inventory=self.published)]

    _HANDLERS: ClassVar[dict[type[Any], Callable[[Any, Any], list[Effect]]]] = {
        on.Tick: _on_tick,
        on.FrameArrived: _on_frame,
        on.ConnectionClosed: _on_closed,
        on.DesiredArrived: _on_desired,
        on.DesiredConfirmed: _on_confirmed,
        on.OpenAnswered: _on_open_answered,
        on.SlotsSeen: _on_slots_seen,
        on.SlotsRefused: _on_slots_refused,
        on.SlotHeld: _on_slot_held,
        on.SlotHashed: _on_hashed,
        on.SlotDropped: _on_dropped,
        on.SpareSeen: _on_spare_seen,
        on.LocalStored: _on_local_stored,
        on.LeftoversRead: _on_leftovers_read,
        on.ObjectStored: _on_object_stored,
        on.StoreFailed: _on_store_failed,
        on.OwnerSeen: _on_owner_seen,
        on.Pulled: _on_pulled,
        on.PullFailed: _on_pull_failed,
        on.Acked: _on_acked,
        on.ServeBegan: _on_serve_began,
        on.ServeEnded: _on_serve_ended,
        on.ShardStaged: _on_shard_staged,
        on.StageFailed: _on_stage_failed,
        on.CopyDoubted: _on_doubted,
        on.ReadBackDone: _on_read_back,
        on.ReadBackFailed: _on_read_back_failed,
    }


def _next(inventory: Inventory) -> Inventory:
    return msgspec.structs.replace(inventory, version=inventory.version + 1)


def _verdict(frame: wire.Verdict) -> RankVerdict:
    phase: Literal["staged", "applied"] = "applied" if frame.phase == "applied" else "staged"
    return RankVerdict(
        attempt_uid=frame.attempt_uid,
        phase=phase,
        ok=frame.ok,
        reason=frame.reason[:2000],
        misfit=frame.misfit and not frame.ok,
    )
