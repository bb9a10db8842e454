"""What goes from the slots to the local and the object tier, when, and what lies there: pure.

Each tier takes one shard of a rank at a time. What comes due meanwhile waits; of those that wait the coarsest step is
taken first, so that ranks that each miss some steps still meet at the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from toprope.coordinator.wire import Cadence, Copy
from toprope.sidecar.effects import DropLocal, Effect, StoreLocal, StoreObject
from toprope.sidecar.events import LocalStored, ObjectStored, StoreFailed
from toprope.sidecar.slot_book import SlotRecord
from toprope.sidecar.values import Attempt, Shard, SlowTier, coarseness, is_due, shard_of_copy

LOCAL_STEPS_KEPT = 2
RECEIPTS_KEPT = 8
FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 30.0
QUARANTINE_S = 60.0
LONGEST_QUARANTINE_S = 960.0
"""How long a disk that lost writes is left alone before it is tried again: at first, and at most."""

SLOW_TIERS: tuple[SlowTier, ...] = ("local", "object")
_KEPT: dict[SlowTier, int] = {"local": LOCAL_STEPS_KEPT, "object": RECEIPTS_KEPT}
_PATIENCE_S: dict[SlowTier, float] = {"local": 60.0, "object": 300.0}
_LEAST_BYTES_PER_S: dict[SlowTier, float] = {"local": 20e6, "object": 1e6}
"""A tier that takes longer for a shard than this allows hangs: it loses the copy rather than the trainer a slot."""


@dataclass(slots=True)
class TierBook:
    """Copies in the local and object tiers, and what is on its way there."""

    local: dict[Shard, str] = field(default_factory=dict)
    receipts: dict[Shard, Copy] = field(default_factory=dict)
    flying: dict[tuple[SlowTier, int], Shard] = field(default_factory=dict)
    retry_at_s: dict[SlowTier, float] = field(default_factory=dict)
    failures: dict[SlowTier, int] = field(default_factory=dict)
    reasons: dict[SlowTier, str] = field(default_factory=dict)
    quarantined: bool = False
    disk_room: int | None = None
    """Bytes of local copies that this node's disk has room for, those that are there among them."""
    crowded: bool = False
    """The disk had no room for the last one: of each rank only the newest copy stays, until one has landed."""
    jobs: dict[Shard, str] = field(default_factory=dict)
    """Of local copies that an earlier life has left: the job of each, by uid."""
    attempt: Attempt = (0, "")
    """The current one."""

    def stored(self, tier: SlowTier) -> Iterable[Shard]:
        """Return the shards that lie in a tier."""
        return self.local if tier == "local" else self.receipts

    def copies(self) -> list[Copy]:
        """Return the inventory's lines for both tiers."""
        local = [shard.copy("local", key=self.local[shard]) for shard in sorted(self.local)]
        return local + [self.receipts[shard] for shard in sorted(self.receipts)]

    def troubles(self) -> list[str]:
        """Return what is wrong with each tier that fails now."""
        alone = {"local"} if self.quarantined else set()
        return [
            f"the {tier} tier {'is left alone' if tier in alone else 'fails'}: {reason}"
            for tier, reason in sorted(self.reasons.items())
        ]

    def awaited(self, slots: list[tuple[SlotRecord, Shard]], cadence: Cadence, *, attempt_uid: str) -> frozenset[Shard]:
        """Return the shards that a slot holds and a tier still awaits."""
        due = (self._due(tier, slots, cadence, attempt_uid=attempt_uid) for tier in SLOW_TIERS)
        return frozenset(shard for waiting in due for _, shard in waiting)

    def plan(
        self, slots: list[tuple[SlotRecord, Shard]], cadence: Cadence, *, attempt_uid: str, now_s: float
    ) -> list[Effect]:
        """Send what is due on its way, one shard of a rank for each tier."""
        effects: list[Effect] = []
        self.quarantined &= now_s < self.retry_at_s.get("local", 0.0)
        for tier in SLOW_TIERS:
            if now_s < self.retry_at_s.get(tier, 0.0):
                continue
            every = cadence.local_every if tier == "local" else cadence.object_every
            due = self._due(tier, slots, cadence, attempt_uid=attempt_uid)
            for rank in sorted({record.rank for record, _ in due}):
                if (tier, rank) not in self.flying:
                    waiting = [pair for pair in due if pair[0].rank == rank]
                    chosen = max(waiting, key=lambda w: _order(w[1], cadence, every))
                    effects.append(self._send(tier, chosen, now_s=now_s))
        return effects

    def _due(
        self, tier: SlowTier, slots: list[tuple[SlotRecord, Shard]], cadence: Cadence, *, attempt_uid: str
    ) -> list[tuple[SlotRecord, Shard]]:
        """Return what a tier awaits; the object tier takes the current attempt only: no other can become READY.

        What has been overtaken is not awaited: it would be the first to go again, and so come and go for ever.
        """
        if tier == "local" and self.quarantined:
            return []
        every = cadence.local_every if tier == "local" else cadence.object_every
        there = set(self.stored(tier)) | {shard for (of, _), shard in self.flying.items() if of == tier}
        return [
            (record, shard)
            for record, shard in slots
            if (shard.asked or is_due(cadence, shard.step, every=every))
            and shard not in there
            and not self._overtaken(tier, shard)
            and (tier == "local" or shard.attempt_uid == attempt_uid)
        ]

    def _overtaken(self, tier: SlowTier, shard: Shard) -> bool:
        """Say whether a tier has as many newer shards of the rank as it keeps."""
        age = shard.age(self.attempt)
        newer = sum(other.rank == shard.rank and other.age(self.attempt) > age for other in self.stored(tier))
        return newer >= _KEPT[tier]

    def _send(self, tier: SlowTier, waiting: tuple[SlotRecord, Shard], *, now_s: float) -> Effect:
        record, shard = waiting
        record.uses[tier] = now_s + _PATIENCE_S[tier] + shard.bytes / _LEAST_BYTES_PER_S[tier]
        self.flying[tier, record.rank] = shard
        if tier == "local":
            return StoreLocal(slot=record.number, shard=shard)
        return StoreObject(slot=record.number, shard=shard)

    def on_local(self, event: LocalStored) -> None:
        """Take in a local copy."""
        self.local[event.shard] = event.path
        self.crowded = False
        if event.job_uid:
            self.jobs[event.shard] = event.job_uid
        self._landed("local", event.shard)

    def on_object(self, event: ObjectStored) -> None:
        """Take in a receipt; the newest few of each rank are told."""
        shard = shard_of_copy(event.receipt)
        self.receipts[shard] = event.receipt
        self._landed("object", shard)
        of_rank = self._by_age(other for other in self.receipts if other.rank == shard.rank)
        for old in of_rank[:-RECEIPTS_KEPT]:
            del self.receipts[old]

    def _by_age(self, shards: Iterable[Shard]) -> list[Shard]:
        return sorted(shards, key=lambda shard: shard.age(self.attempt))

    def _landed(self, tier: SlowTier, shard: Shard) -> None:
        self.failures.pop(tier, None)
        self.reasons.pop(tier, None)
        if self.flying.get((tier, shard.rank)) == shard:
            del self.flying[tier, shard.rank]

    def on_failed(self, event: StoreFailed, *, now_s: float) -> None:
        """Take in a failure: the tier is tried again after a while, a disk that lost writes after a long one."""
        tier = event.tier
        if self.flying.get((tier, event.shard.rank)) == event.shard:
            del self.flying[tier, event.shard.rank]
        if event.damaged:
            return
        count = self.failures.get(tier, 0) + 1
        self.failures[tier] = count
        self.reasons[tier] = event.reason
        first, longest = (QUARANTINE_S, LONGEST_QUARANTINE_S) if event.quarantine else (FIRST_RETRY_S, LONGEST_RETRY_S)
        self.retry_at_s[tier] = now_s + min(longest, first * 2 ** min(count - 1, 10))
        self.quarantined |= event.quarantine
        self.crowded |= event.no_room

    def hold_to(self, job_uid: str) -> list[str]:
        """Forget the local copies of other jobs, which are not ours to list or to delete; return their paths."""
        foreign = [shard for shard in sorted(self.jobs) if self.jobs[shard] != job_uid]
        self.jobs.clear()
        return [self.local.pop(shard) for shard in foreign if shard in self.local]

    def drop_local(self, attempt_uid: str, step: int, rank: int) -> list[Effect]:
        """Delete the local copies of a shard."""
        wrong = [shard for shard in sorted(self.local) if shard.of_step == (attempt_uid, step) and shard.rank == rank]
        return [DropLocal(path=self.local.pop(shard)) for shard in wrong]

    def retire_local(self, *, kept: frozenset[tuple[str, int]]) -> list[Effect]:
        """Delete local copies that are neither kept nor among the newest of their rank."""
        old: list[Shard] = []
        newest = 1 if self.crowded else LOCAL_STEPS_KEPT
        for rank in sorted({shard.rank for shard in self.local}):
            of_rank = self._by_age(shard for shard in self.local if shard.rank == rank)
            old += [shard for shard in of_rank[:-newest] if shard.of_step not in kept]
        return [DropLocal(path=self.local.pop(shard)) for shard in old]


def _order(shard: Shard, cadence: Cadence, every: int) -> tuple[int, Shard]:
    return coarseness(cadence, shard.step, every=every), shard
