"""Copies that this node holds for others: what to pull, into which spare, and what to give up. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from toprope.coordinator.wire import Copy, Inventory
from toprope.sidecar.effects import Effect, Pull, RemoveSpares
from toprope.sidecar.events import Pulled, PullFailed
from toprope.sidecar.slot_book import HOLD_S
from toprope.sidecar.values import Shard, shard_of_copy

SPARES_PER_RANK = 2
RETRY_S = 1.0


@dataclass(slots=True, kw_only=True)
class Spare:
    """One spare file: what it holds, or what is flowing into it; ``uses`` counts readers."""

    held: Shard | None = None
    pulling: Shard | None = None
    held_at_s: float = 0.0
    uses: set[str] = field(default_factory=set)


@dataclass(slots=True)
class PeerBook:
    """The spares of this node by rank and number, and what their owners say that they hold."""

    spares: dict[tuple[int, int], Spare] = field(default_factory=dict)
    owners: dict[str, Inventory] = field(default_factory=dict)
    retry_at_s: dict[int, float] = field(default_factory=dict)

    def held(self) -> list[tuple[int, Shard]]:
        """Return the spare's number and the shard of each verified copy."""
        found = [(number, self.spares[rank, number].held) for rank, number in sorted(self.spares)]
        return [(number, shard) for number, shard in found if shard is not None]

    def copies(self) -> list[Copy]:
        """Return the inventory's lines."""
        return [shard.copy("peer") for _, shard in self.held()]

    def find(self, attempt_uid: str, step: int, rank: int) -> tuple[int, Spare] | None:
        """Return the spare that holds this shard."""
        for (of_rank, number), spare in sorted(self.spares.items(), key=lambda item: item[0]):
            if of_rank == rank and spare.held is not None and spare.held.of_step == (attempt_uid, step):
                return number, spare
        return None

    def adopt(self, rank: int, number: int, shard: Shard, *, now_s: float) -> None:
        """Take in a copy that was found in memory at start and has its digest."""
        self.spares[rank, number] = Spare(held=shard, held_at_s=now_s)

    def on_pulled(self, event: Pulled, *, now_s: float) -> None:
        """Take in a verified copy."""
        self.spares[event.shard.rank, event.spare] = Spare(held=event.shard, held_at_s=now_s)

    def on_failed(self, event: PullFailed, *, now_s: float) -> None:
        """Take in that a pull came to nothing; the spare is empty, and the rank is tried again soon."""
        self.spares[event.shard.rank, event.spare] = Spare()
        self.retry_at_s[event.shard.rank] = now_s + RETRY_S

    def drop(self, rank: int, number: int) -> None:
        """Forget a copy that was found to be damaged."""
        self.spares[rank, number].held = None

    def plan(
        self,
        owners: dict[str, str],
        *,
        kept: frozenset[tuple[str, int]],
        dropped: frozenset[tuple[str, int]],
        attempt: int,
        attempt_uid: str,
        now_s: float,
    ) -> list[Effect]:
        """Pull the newest memory copy of each rank of each owner, given by node and url, one at a time for a rank."""
        effects: list[Effect] = []
        for node in sorted(set(owners) & set(self.owners)):
            wanted = _newest(self.owners[node], kept=kept, dropped=dropped, attempt=attempt, attempt_uid=attempt_uid)
            for shard in wanted:
                number = self._place_for(shard, kept=kept, dropped=dropped, attempt_uid=attempt_uid, now_s=now_s)
                if number is not None:
                    self.spares[shard.rank, number] = Spare(pulling=shard)
                    effects.append(Pull(url=owners[node], shard=shard, spare=number))
        return effects

    def _place_for(
        self,
        shard: Shard,
        *,
        kept: frozenset[tuple[str, int]],
        dropped: frozenset[tuple[str, int]],
        attempt_uid: str,
        now_s: float,
    ) -> int | None:
        """Return the spare to pull into, or None: it is here, it is coming, or nothing may be overwritten."""
        spares = {number: self.spares.get((shard.rank, number), Spare()) for number in range(SPARES_PER_RANK)}
        if now_s < self.retry_at_s.get(shard.rank, 0.0) or any(spare.pulling for spare in spares.values()):
            return None
        held = {number: spare.held for number, spare in spares.items() if spare.held is not None}
        if any(other.of_step == shard.of_step and other.digest == shard.digest for other in held.values()):
            return None
        empty = [number for number, spare in spares.items() if spare.held is None and not spare.uses]
        if empty:
            return empty[0]
        newest_kept = max((other for other in held.values() if other.of_step in kept), default=None)
        over = [
            (other, number)
            for number, other in held.items()
            if not spares[number].uses
            and other.of_step not in kept
            and (
                other.attempt_uid != attempt_uid
                or other.of_step in dropped
                or (newest_kept is not None and other < newest_kept)
                or now_s - spares[number].held_at_s >= HOLD_S
            )
        ]
        return min(over)[1] if over else None

    def release(self, *, owners: frozenset[str], kept: frozenset[tuple[str, int]], attempt_uid: str) -> list[Effect]:
        """Give back the memory of copies of earlier attempts that are neither placed here any more nor kept.

        Those of the current attempt stay: its next restore may want them, whatever became of their owner.
        """
        if not owners <= set(self.owners):
            return []
        placed = {copy.rank for node in owners if node in self.owners for copy in self.owners[node].copies}
        effects: list[Effect] = []
        for rank in sorted({rank for rank, _ in self.spares} - placed):
            over = [
                number
                for (of_rank, number), spare in sorted(self.spares.items(), key=lambda item: item[0])
                if of_rank == rank
                and not spare.pulling
                and not spare.uses
                and (spare.held is None or (spare.held.of_step not in kept and spare.held.attempt_uid != attempt_uid))
            ]
            for number in over:
                del self.spares[rank, number]
            if over:
                effects.append(RemoveSpares(rank=rank, spares=tuple(over)))
        return effects


def _newest(
    inventory: Inventory,
    *,
    kept: frozenset[tuple[str, int]],
    dropped: frozenset[tuple[str, int]],
    attempt: int,
    attempt_uid: str,
) -> list[Shard]:
    """Return the newest memory copy of each rank that is of this attempt or kept, and of no attempt after it."""
    newest: dict[int, Shard] = {}
    for copy in inventory.copies:
        current = copy.attempt_uid == attempt_uid or (copy.attempt_uid, copy.step) in kept
        if copy.tier != "memory" or not current or copy.attempt > attempt or (copy.attempt_uid, copy.step) in dropped:
            continue
        shard = shard_of_copy(copy)
        if copy.rank not in newest or newest[copy.rank] < shard:
            newest[copy.rank] = shard
    return [newest[rank] for rank in sorted(newest)]
