"""What a sidecar tells the world: the copies here, where each rank stands, and when that is worth publishing. Pure."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import msgspec

from toprope.coordinator.wire import Adopted, Copy, Desired, Inventory, RankState, ReadBack
from toprope.sidecar.admission import troubles
from toprope.sidecar.adoption_book import AdoptionBook
from toprope.sidecar.conversation import Conversation, RankNotes
from toprope.sidecar.peer_book import PeerBook
from toprope.sidecar.restore_book import RestoreBook
from toprope.sidecar.slot_book import SlotBook
from toprope.sidecar.tier_book import TierBook
from toprope.sidecar.values import Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """What an inventory is made from."""

    me: Identity
    slots: SlotBook
    tiers: TierBook
    peers: PeerBook
    restore: RestoreBook
    adoptions: AdoptionBook
    conversation: Conversation

    def copies(self) -> list[Copy]:
        """Return the verified copies of this node, and its objects."""
        memory = sorted(shard for _, shard in self.slots.hashed())
        return [*(shard.copy("memory") for shard in memory), *self.peers.copies(), *self.tiers.copies()]

    def rank_states(self, desired: Desired) -> list[RankState]:
        """Return where each rank stands that is connected, holds a lock, or is placed here and was heard."""
        connected = {trainer.rank for trainer in self.conversation.in_order()}
        attempt = desired.attempt
        placed = {p.rank for p in attempt.world if p.node == self.me.node} if attempt is not None else set()
        locked = {rank for rank in self.slots.ranks() if self.slots.holder_launch(rank) is not None}
        heard = set(self.conversation.notes)
        return [self._rank_state(rank, desired) for rank in sorted(connected | locked | (placed & heard))]

    def _rank_state(self, rank: int, desired: Desired) -> RankState:
        """Return where a rank stands; what its frames have not said since this sidecar started, its slots say."""
        notes = self.conversation.notes.get(rank, RankNotes())
        holder = self.slots.holder_launch(rank)
        records = self.slots.of_rank(rank)
        newest = max((record.shard for record in records if record.shard is not None), default=None)
        known = notes.attempt_uid != "" or newest is None
        attempt_uid = notes.attempt_uid if newest is None or known else newest.attempt_uid
        current = desired.attempt is not None and desired.attempt.uid == attempt_uid
        return RankState(
            rank=rank,
            world=notes.world or max((record.world for record in records), default=0),
            launch_id=holder if holder is not None else notes.launch_id,
            attempt_uid=attempt_uid,
            step=notes.step if newest is None or known else newest.step,
            lock_held=holder is not None,
            state_bytes=self.slots.wanted_bytes.get(rank, 0),
            verdict=self.restore.verdict(notes.attempt_uid) or notes.verdict,
            ask=notes.ask,
            extra_step=desired.extra_step if current else 0,
        )

    def inventory(self, desired: Desired, *, read_backs: tuple[ReadBack, ...], reading: bool) -> Inventory:
        """Return the inventory as it is now, of no version yet."""
        return Inventory(
            job=self.me.job,
            job_uid=desired.job_uid,
            node=self.me.node,
            boot_id=self.me.boot_id,
            incarnation=self.me.incarnation,
            version=0,
            url=self.me.url,
            domain=self.me.domain,
            ranks=tuple(self.rank_states(desired)),
            copies=tuple(self.copies()),
            skipped=tuple(self.slots.skipped),
            read_backs=read_backs,
            reading=reading,
            troubles=troubles(self.slots, self.tiers, self.peers),
            no_room_for=tuple(sorted(self.peers.no_room)),
            adopted=self.adoptions.listed(desired),
        )


def next_version(published: Inventory | None, now: Inventory) -> Inventory | None:
    """Return what is to be published in the place of ``published``; None when nothing has changed."""
    version = published.version if published is not None else 0
    if msgspec.structs.replace(now, version=version) == published:
        return None
    return msgspec.structs.replace(now, version=version + 1)


def is_urgent(newest: Inventory, told: Inventory | None) -> bool:
    """Say whether somebody waits for what is new: that ranks came, ended, were restored, or ask for something.

    For copies nobody waits: there are others, and the next ones come soon.
    """
    return told is None or _waited_for(newest) != _waited_for(told)


def _waited_for(inventory: Inventory) -> tuple[list[RankState], bool, tuple[Adopted, ...]]:
    ranks = [msgspec.structs.replace(state, step=0) for state in inventory.ranks]
    return ranks, inventory.reading, inventory.adopted


def until_turn_s(every_s: float, *, node: str, now_s: float) -> float:
    """Return how long a node waits until it may tell of what is new: each has its own moment of every ``every_s``.

    All have news at once, when a step ends. If each told it at once, the last would be heard after all others.
    """
    if not every_s:
        return 0.0
    moment_s = every_s * (zlib.crc32(node.encode()) / 2**32)
    return (moment_s - now_s) % every_s
