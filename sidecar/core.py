"""The decisions of a sidecar: a synchronous state machine. ``handle(event)`` returns what is to be done.

Events change what is known; then ``_settle`` derives from it all that follows, so that a lost, doubled or late event
costs nothing but time. No I/O, no clock, no randomness here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import assert_never

from toprope.coordinator.wire import AttemptView, Desired, Inventory, Placement, ReadBack
from toprope.sidecar import effects as do
from toprope.sidecar import events as on
from toprope.sidecar.admission import copies_of, memory_advice
from toprope.sidecar.adoption_book import AdoptionBook
from toprope.sidecar.conversation import Conversation, Trainer
from toprope.sidecar.effects import Effect
from toprope.sidecar.events import Event
from toprope.sidecar.inventory import Books, next_version
from toprope.sidecar.peer_book import PeerBook
from toprope.sidecar.restore_book import Reach, RestoreBook, reach_of
from toprope.sidecar.slot_book import FOREVER, Grantee, Needs, SlotBook
from toprope.sidecar.tier_book import TierBook
from toprope.sidecar.values import Attempt, Identity, Lying, Shard, Way, shard_of_copy

FETCH_EVERY_S = 0.3
READING_FOR_S = 60.0
"""How long restores wait for what lies on this node's disk; a disk that takes longer must not stop the job."""


@dataclass(slots=True)
class Core:
    """All that one sidecar knows."""

    me: Identity
    conversation: Conversation = field(init=False)
    books: Books = field(init=False)
    now_s: float = 0.0
    desired: Desired | None = None
    slots: SlotBook = field(default_factory=SlotBook)
    tiers: TierBook = field(default_factory=TierBook)
    peers: PeerBook = field(default_factory=PeerBook)
    restore: RestoreBook = field(default_factory=RestoreBook)
    adoptions: AdoptionBook = field(default_factory=AdoptionBook)
    offered: set[tuple[int, int, int]] = field(default_factory=set)
    reading: set[str] = field(default_factory=set)
    read_backs: dict[str, ReadBack] = field(default_factory=dict)
    published: Inventory | None = None
    followed: tuple[tuple[str, str], ...] = ()
    began_s: float | None = None
    leftovers_read: bool = False
    stage_kept: str = ""
    fetch_at_s: float = 0.0

    def __post_init__(self) -> None:
        """Begin with nobody connected and nothing held."""
        self.conversation = Conversation(me=self.me)
        self.books = Books(
            me=self.me,
            slots=self.slots,
            tiers=self.tiers,
            peers=self.peers,
            restore=self.restore,
            adoptions=self.adoptions,
            conversation=self.conversation,
        )

    # The door

    def handle(self, event: Event) -> tuple[Effect, ...]:
        """Take in one event and return all that is to be done now, in order."""
        return (*self._take(event), *self._settle())

    def job_uid(self) -> str:
        """Return the uid of the job, or nothing while no document has said it."""
        return self.desired.job_uid if self.desired is not None else ""

    def coordinator_url(self) -> str:
        """Return the URL in the newest document of the coordinator, or nothing."""
        return self.desired.url if self.desired is not None else ""

    # What happened

    def _take(self, event: Event) -> list[Effect]:
        if isinstance(event, on.OfService):
            return self._take_of_service(event)
        if isinstance(event, on.OfSlots):
            return self._take_of_slots(event)
        if isinstance(event, on.OfTiers):
            return self._take_of_tiers(event)
        if isinstance(event, on.OfPeers):
            return self._take_of_peers(event)
        if isinstance(event, on.OfRestore):
            return self._take_of_restore(event)
        assert_never(event)

    def _take_of_service(self, event: on.OfService) -> list[Effect]:  # noqa: C901, PLR0911 - one case per kind of event
        match event:
            case on.Tick():
                return self._on_tick(event)
            case on.FrameArrived():
                return self.conversation.on_frame(event, self.slots)
            case on.ConnectionClosed():
                return self.conversation.on_closed(event)
            case on.OpenAnswered():
                return self.conversation.on_open_answered(event)
            case on.DesiredArrived():
                return self._on_desired(event)
            case on.DesiredConfirmed():
                if self.desired is not None:
                    self.conversation.on_confirmed(self.desired)
            case on.AdoptionsRead():
                return self.adoptions.on_read(event)
            case on.Adopted():
                self.adoptions.on_adopted(event.adopted, forgotten=event.forgotten)
            case on.AdoptFailed():
                self.adoptions.on_failed(now_s=self.now_s)
                return [do.Shout(what="adopt-failed", text=f"an attempt could not be adopted: {event.reason}")]
            case _:
                assert_never(event)
        return []

    def _take_of_slots(self, event: on.OfSlots) -> list[Effect]:
        match event:
            case on.SlotsSeen():
                return self.slots.see(event, connected=frozenset(self.conversation.trainers))
            case on.SlotsRefused():
                return self._on_slots_refused(event)
            case on.SlotHeld():
                self.slots.on_held(event)
            case on.SlotGone():
                self.slots.on_gone(event)
            case on.SlotHashed():
                self.slots.on_hashed(event, now_s=self.now_s)
            case on.SlotDropped():
                return self._on_dropped(event)
            case _:
                assert_never(event)
        return []

    def _take_of_tiers(self, event: on.OfTiers) -> list[Effect]:
        match event:
            case on.LocalStored():
                self.tiers.on_local(event)
                self._end_use(event.shard.rank, event.slot, "local")
            case on.ObjectStored():
                return self._on_object_stored(event)
            case on.StoreFailed():
                return self._on_store_failed(event)
            case on.LeftoversRead():
                self.leftovers_read = True
            case on.DiskSeen():
                self.tiers.disk_room = event.free + sum(shard.bytes for shard in self.tiers.local)
            case on.ReadBackDone():
                self.reading.discard(event.result.key)
                self.read_backs[event.result.key] = event.result
            case on.ReadBackFailed():
                self.reading.discard(event.key)
            case _:
                assert_never(event)
        return []

    def _take_of_peers(self, event: on.OfPeers) -> list[Effect]:
        match event:
            case on.SpareSeen():
                self.peers.adopt(event.rank, event.spare, event.shard, now_s=self.now_s)
            case on.OwnerSeen():
                self._on_owner_seen(event)
            case on.Pulled():
                self.peers.on_pulled(event, now_s=self.now_s)
            case on.PullFailed():
                return self._on_pull_failed(event)
            case on.MemorySeen():
                self.peers.on_room(event.free)
            case on.Acked():
                return self._on_acked(event)
            case on.ServeBegan():
                self._on_serve_began(event)
            case on.ServeEnded():
                self._on_serve_ended(event)
            case _:
                assert_never(event)
        return []

    def _take_of_restore(self, event: on.OfRestore) -> list[Effect]:
        match event:
            case on.ShardStaged():
                self.restore.on_staged(event)
            case on.StageFailed():
                self.restore.on_failed(event, now_s=self.now_s, patience_s=self.me.restore_patience_s)
                text = f"shard of rank {event.rank} can't be had: {event.reason}"
                return [do.Shout(what="stage-failed", text=text)]
            case on.CopyDoubted():
                return self._on_doubted(event)
            case _:
                assert_never(event)
        return []

    def _on_tick(self, event: on.Tick) -> list[Effect]:
        self.now_s = event.now_s
        self.began_s = event.now_s if self.began_s is None else self.began_s
        late = [
            do.Shout(what="use-deadline", text=f"rank {r.rank} slot {r.number}: {use} took too long and lost its copy")
            for r, use in self.slots.expire_uses(now_s=self.now_s)
        ]
        return [*late, *(do.LookAtSlots(rank=rank, known=self.slots.numbers(rank)) for rank in self.slots.ranks())]

    def _on_desired(self, event: on.DesiredArrived) -> list[Effect]:
        new, old = event.desired, self.desired
        if new.job != self.me.job or (old is not None and new.job_uid != old.job_uid):
            return []
        if old is not None and (new.term, new.version) <= (old.term, old.version):
            return []
        self.desired = self.adoptions.held_to(new, old)
        reason = new.refused.get(self.me.incarnation)
        return [] if reason is None else [do.Exit(reason=reason)]

    def _on_slots_refused(self, event: on.SlotsRefused) -> list[Effect]:
        held = self.peers.sizes_of_ranks({place.owner for place in self._placed_here()})
        advice = memory_advice(self.slots.wanted_bytes, held, copies=copies_of(self.desired), room=event.room)
        reason = f"{event.reason}. {advice}"
        self.slots.refuse(event.rank, reason, now_s=self.now_s)
        return [do.Shout(what="no-room", text=f"rank {event.rank} has no slots, its snapshots are skipped: {reason}")]

    def _placed_here(self) -> list[Placement]:
        placement = self.desired.placement if self.desired is not None else ()
        return [place for place in placement if place.holder == self.me.node]

    def _on_dropped(self, event: on.SlotDropped) -> list[Effect]:
        shout = do.Shout(what="dropped", text=f"rank {event.rank} slot {event.slot} was dropped: {event.reason}")
        return [*self.slots.on_dropped(event), shout]

    def _on_object_stored(self, event: on.ObjectStored) -> list[Effect]:
        """Take in a receipt, unless the slot was lent again while it was read: nobody knows what was stored then."""
        shard, record = shard_of_copy(event.receipt), self.slots.slots.get((event.receipt.rank, event.slot))
        if record is None or record.shard != shard:
            reason = "its slot was lent again before the upload had ended"
            return self._on_store_failed(
                on.StoreFailed(tier="object", shard=shard, slot=event.slot, reason=reason, damaged=True)
            )
        self.tiers.on_object(event)
        record.uses.pop("object", None)
        return []

    def _on_store_failed(self, event: on.StoreFailed) -> list[Effect]:
        self.tiers.on_failed(event, now_s=self.now_s)
        self._end_use(event.shard.rank, event.slot, event.tier)
        shout = do.Shout(
            what="local-failed" if event.tier == "local" else "object-failed",
            text=f"rank {event.shard.rank} step {event.shard.step}: {event.reason}",
        )
        record = self.slots.find(event.shard.attempt_uid, event.shard.step, event.shard.rank)
        if event.damaged and record is not None:
            return [shout, self.slots.check(record)]
        return [shout]

    def _end_use(self, rank: int, slot: int | None, use: str) -> None:
        record = self.slots.slots.get((rank, slot)) if slot is not None else None
        if record is not None:
            record.uses.pop(use, None)

    def _on_owner_seen(self, event: on.OwnerSeen) -> None:
        inventory = event.inventory
        if self.desired is not None and inventory.job_uid == self.desired.job_uid:
            self.peers.owners[inventory.node] = inventory

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

    def _on_serve_began(self, event: on.ServeBegan) -> None:
        record = self.slots.find(event.attempt_uid, event.step, event.rank)
        if record is not None:
            record.uses[f"serve:{event.serve}"] = FOREVER
        spare = self.peers.find(event.attempt_uid, event.step, event.rank)
        if spare is not None:
            spare[1].uses.add(f"serve:{event.serve}")

    def _on_serve_ended(self, event: on.ServeEnded) -> None:
        for key in sorted(self.slots.slots):
            self.slots.slots[key].uses.pop(f"serve:{event.serve}", None)
        for key in sorted(self.peers.spares):
            self.peers.spares[key].uses.discard(f"serve:{event.serve}")

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

    # What follows

    def _settle(self) -> list[Effect]:
        desired = self.desired
        effects: list[Effect] = []
        if desired is not None:
            effects += self._carry_on(desired)
            effects += self.adoptions.plan(desired, now_s=self.now_s)
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
        return frozenset(kept | self._aim())

    def _aim(self) -> frozenset[tuple[str, int]]:
        """Return the step that all go for, if pulls are so slow that one has to be named."""
        aim = self.desired.aim if self.desired is not None else 0
        return frozenset({(self._attempt_uid(), aim)}) if aim else frozenset()

    def _dropped(self) -> frozenset[tuple[str, int]]:
        dropped = self.desired.dropped if self.desired is not None else ()
        return frozenset((one.attempt_uid, one.step) for one in dropped) - self._kept()

    def _attempt_uid(self) -> str:
        attempt = self.desired.attempt if self.desired is not None else None
        return attempt.uid if attempt is not None else ""

    def _attempt(self) -> Attempt:
        attempt = self.desired.attempt if self.desired is not None else None
        return (attempt.number, attempt.uid) if attempt is not None else (0, "")

    def _carry_on(self, desired: Desired) -> list[Effect]:
        """Send what is hashed to the other tiers; give up what nothing needs."""
        uid, kept = self._attempt_uid(), self._kept()
        self._offer(desired)
        effects: list[Effect] = [
            do.Shout(what="local-foreign", text=f"{path} is of an earlier job of this name: not used, and not deleted")
            for path in self.tiers.hold_to(desired.job_uid)
        ]
        self.tiers.attempt = self._attempt()
        effects += self.tiers.plan(self.slots.hashed(), desired.cadence, attempt_uid=uid, now_s=self.now_s)
        effects += self.tiers.retire_local(kept=kept)
        owners = {place.owner: place.url for place in self._placed_here() if place.url}
        if tuple(sorted(owners.items())) != self.followed:
            self.followed = tuple(sorted(owners.items()))
            effects.append(do.Follow(owners=self.followed))
        attempt = desired.attempt
        if attempt is None:
            return effects
        effects += self.peers.plan(
            owners,
            kept=kept,
            dropped=self._dropped(),
            aim=self._aim(),
            attempt=attempt.number,
            attempt_uid=uid,
            now_s=self.now_s,
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
        dropped, current = self._dropped(), self._attempt()
        newest: dict[int, Shard] = {}
        for record, shard in self.slots.hashed():
            newest[record.rank] = max(shard, newest.get(record.rank, shard), key=lambda one: one.age(current))
        for record, shard in self.slots.hashed():
            if shard.of_step in dropped:
                record.uses = {use: end for use, end in record.uses.items() if not use.startswith("peer:")}
                continue
            mark = (record.rank, record.number, record.seq)
            if holders and mark not in self.offered and shard == newest[record.rank]:
                self.offered = {other for other in self.offered if other[:2] != mark[:2]} | {mark}
                until_s = self.now_s + self.me.patience_s(shard.bytes)
                record.uses.update({f"peer:{holder}": until_s for holder in holders})

    def _restore(self, desired: Desired) -> list[Effect]:
        effects: list[Effect] = []
        attempt = desired.attempt
        if attempt is not None and attempt.phase in {"opened", "staged", "applied"}:
            joined = [t for t in self.conversation.in_order() if t.joined and t.attempt_uid == attempt.uid]
            waiting = [trainer for trainer in joined if "STAGED" not in trainer.told]
            if waiting:
                effects += self.restore.plan(attempt, waiting, self._reaches(attempt), now_s=self.now_s)
        for trainer in self.conversation.in_order():
            if trainer.joined and (why := self.adoptions.end_of(trainer.attempt_uid, desired)):
                effects += self.restore.end(trainer, why)
                continue
            no_slots, trouble = self.slots.refusals.get(trainer.rank, ""), "; ".join(self.tiers.troubles())
            effects += self.restore.tell(trainer, desired, no_slots=no_slots, trouble=trouble)
        keep = attempt.uid if attempt is not None and attempt.phase in {"opened", "staged"} else ""
        if keep != self.stage_kept:
            self.stage_kept = keep
            effects.append(do.DropStage(keep=keep))
        return effects

    def _reaches(self, attempt: AttemptView) -> dict[int, Reach]:
        return {
            shard.rank: reach_of(
                shard,
                me=self.me.node,
                here=self._here(attempt.source_attempt_uid, attempt.from_step, shard.rank),
                url_of_me=self.me.url,
            )
            for shard in attempt.restore
        }

    def _here(self, attempt_uid: str, step: int, rank: int) -> list[Lying]:
        """Return this node's own copies of a shard, nearest first, whatever their digests."""
        found: list[Lying] = []
        record = self.slots.find(attempt_uid, step, rank)
        if record is not None and record.shard is not None:
            path = self.me.slot_path(rank, record.number)
            found.append(Lying(way=Way(kind="here", tier="memory", node=self.me.node, path=path), shard=record.shard))
        spare = self.peers.find(attempt_uid, step, rank)
        if spare is not None and spare[1].held is not None:
            path = self.me.spare_path(rank, spare[0])
            found.append(Lying(way=Way(kind="here", tier="peer", node=self.me.node, path=path), shard=spare[1].held))
        for shard in sorted(self.tiers.local):
            if shard.of_step == (attempt_uid, step) and shard.rank == rank:
                path = self.tiers.local[shard]
                found.append(Lying(way=Way(kind="here", tier="local", node=self.me.node, path=path), shard=shard))
        return found

    def lying(self) -> list[Lying]:
        """Return the copies that lie in files of this node and can be read now."""
        shards = {shard_of_copy(copy) for copy in self.books.copies() if copy.tier != "object"}
        return [
            Lying(way=one.way, shard=shard)
            for shard in sorted(shards)
            for one in self._here(shard.attempt_uid, shard.step, shard.rank)
            if one.shard.digest == shard.digest
        ]

    def locate(self, attempt_uid: str, step: int, rank: int) -> list[tuple[Way, int]]:
        """Return this node's files that hold a shard, nearest first, each with the shard's length."""
        listed = {
            copy.digest
            for copy in self.books.copies()
            if (copy.attempt_uid, copy.step, copy.rank) == (attempt_uid, step, rank)
        }
        here = self._here(attempt_uid, step, rank)
        return [(one.way, one.shard.bytes) for one in here if one.shard.digest in listed]

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
        for trainer in self.conversation.in_order():
            if not self._may_save(trainer):
                continue
            grantee = Grantee(
                rank=trainer.rank,
                connection=trainer.connection,
                launch_id=trainer.launch_id,
                world=trainer.world,
                image_bytes=trainer.image_bytes,
            )
            effects += self.slots.plan(grantee, needs=needs, now_s=self.now_s)
            effects += self.slots.grants(grantee, needs=needs, now_s=self.now_s)
        return effects

    def _may_save(self, trainer: Trainer) -> bool:
        """Say whether a trainer belongs to the attempt that trains, as far as this sidecar knows."""
        if self.conversation.is_superseded(trainer):
            return False
        if self.desired is None:
            return self.slots.holder_launch(trainer.rank) == trainer.launch_id
        attempt = self.desired.attempt
        return attempt is not None and attempt.launch_id == trainer.launch_id and attempt.phase == "applied"

    def _fetch(self) -> list[Effect]:
        """Ask for the coordinator's document while a trainer waits for an attempt that is not in it yet.

        Not before time runs, which it does once all that lies in memory has been looked at: by a document that comes
        earlier a peer's copy that was not looked at yet is taken for room, and another is pulled over it.
        """
        if self.began_s is None:
            return []
        waits = any(
            trainer.opening is not None or (trainer.joined and not trainer.seen)
            for trainer in self.conversation.in_order()
        )
        if not (waits or self.desired is None) or self.now_s < self.fetch_at_s:
            return []
        self.fetch_at_s = self.now_s + FETCH_EVERY_S
        return [do.FetchDesired()]

    def _is_reading(self) -> bool:
        """Say whether there may be more here than is listed: a restore decided now could pass over the newest step."""
        in_time = self.began_s is None or self.now_s - self.began_s < READING_FOR_S
        return (not self.leftovers_read and in_time) or self.slots.is_hashing()

    def _publish(self) -> list[Effect]:
        if self.desired is None:
            return []
        read_backs = tuple(self.read_backs[key] for key in sorted(self.read_backs))
        now = self.books.inventory(self.desired, read_backs=read_backs, reading=self._is_reading())
        new = next_version(self.published, now)
        if new is None:
            return []
        self.published = new
        return [do.Publish(inventory=new)]
