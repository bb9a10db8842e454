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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expendable:
    """What a held copy is measured by when room is wanted for another one."""

    kept: frozenset[tuple[str, int]]
    dropped: frozenset[tuple[str, int]]
    aim: frozenset[tuple[str, int]]
    attempt_uid: str
    now_s: float

    def covers(self, held: Shard, spare: Spare, newest_kept: Shard | None, *, place_for: Shard) -> bool:
        """Say whether a copy may be overwritten by another."""
        return held.of_step not in self.kept and (
            held.attempt_uid != self.attempt_uid
            or held.of_step in self.dropped
            or place_for.of_step in self.aim
            or (newest_kept is not None and held < newest_kept)
            or self.now_s - spare.held_at_s >= HOLD_S
        )


@dataclass(slots=True)
class PeerBook:
    """The spares of this node by rank and number, and what their owners say that they hold."""

    spares: dict[tuple[int, int], Spare] = field(default_factory=dict)
    owners: dict[str, Inventory] = field(default_factory=dict)
    retry_at_s: dict[int, float] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    """By rank why the last pull came to nothing."""
    no_room: dict[str, int] = field(default_factory=dict)
    """By owner the bytes that its copies take in all, for whom there is no room here."""

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
        self.reasons.pop(event.shard.rank, None)

    def on_failed(self, event: PullFailed, *, now_s: float) -> None:
        """Take in that a pull came to nothing; the spare is empty, and the rank is tried again soon."""
        self.spares[event.shard.rank, event.spare] = Spare()
        self.retry_at_s[event.shard.rank] = now_s + RETRY_S
        self.reasons[event.shard.rank] = event.reason
        if event.no_room:
            owners = [node for node in sorted(self.owners) if event.shard.rank in self.sizes_of_ranks({node})]
            self.no_room |= {node: SPARES_PER_RANK * sum(self.sizes_of_ranks({node}).values()) for node in owners}

    def on_room(self, free: int) -> None:
        """Take in that so many bytes are free: who fits into them, with what is held for it, may be copied here again.

        All of its copies must fit, and not the next one alone: with room for some, none is ever replaced.
        """
        for node, needed in sorted(self.no_room.items()):
            ranks = self.sizes_of_ranks({node})
            held = sum(shard.bytes for _, shard in self.held() if shard.rank in ranks)
            if needed <= free + held:
                del self.no_room[node]

    def drop(self, rank: int, number: int) -> None:
        """Forget a copy that was found to be damaged."""
        self.spares[rank, number].held = None

    def plan(  # noqa: PLR0913 - all that a pull is decided by
        self,
        owners: dict[str, str],
        *,
        kept: frozenset[tuple[str, int]],
        dropped: frozenset[tuple[str, int]],
        aim: frozenset[tuple[str, int]] = frozenset(),
        attempt: int,
        attempt_uid: str,
        now_s: float,
    ) -> list[Effect]:
        """Pull a memory copy of each rank of each owner, given by node and url, one at a time for a rank.

        That is the newest one, but the ``aim`` before it; and of all ranks' the newest first.
        """
        pulls: list[Pull] = []
        expendable = _Expendable(kept=kept, dropped=dropped, aim=aim, attempt_uid=attempt_uid, now_s=now_s)
        for node in sorted(set(owners) & set(self.owners)):
            offered = _offered(self.owners[node], kept=kept, dropped=dropped, attempt=attempt, attempt_uid=attempt_uid)
            for of_rank in offered:
                aimed = [shard for shard in of_rank if shard.of_step in aim and not self._has(shard)]
                shard = max(aimed or of_rank)
                number = self._place_for(shard, expendable)
                if number is not None:
                    self.spares[shard.rank, number] = Spare(pulling=shard)
                    pulls.append(Pull(url=owners[node], shard=shard, spare=number))
        here = {state.rank for node in owners if node in self.owners for state in self.owners[node].copies}
        self.reasons = {rank: reason for rank, reason in self.reasons.items() if rank in here}
        return [*sorted(pulls, key=lambda pull: -pull.shard.step)]

    def _has(self, shard: Shard) -> bool:
        return any(held == shard for _, held in self.held())

    def _place_for(self, shard: Shard, expendable: _Expendable) -> int | None:
        """Return the spare to pull into, or None: it is here, it is coming, or nothing may be overwritten."""
        spares = {number: self.spares.get((shard.rank, number), Spare()) for number in range(SPARES_PER_RANK)}
        if expendable.now_s < self.retry_at_s.get(shard.rank, 0.0) or any(spare.pulling for spare in spares.values()):
            return None
        held = {number: spare.held for number, spare in spares.items() if spare.held is not None}
        if any(other.of_step == shard.of_step and other.digest == shard.digest for other in held.values()):
            return None
        empty = [number for number, spare in spares.items() if spare.held is None and not spare.uses]
        if empty:
            return empty[0]
        current = [other for other in held.values() if other.attempt_uid == expendable.attempt_uid]
        newest_kept = max((other for other in current if other.of_step in expendable.kept), default=None)
        over = [
            (other, number)
            for number, other in held.items()
            if not spares[number].uses and expendable.covers(other, spares[number], newest_kept, place_for=shard)
        ]
        return min(over)[1] if over else None

    def sizes_of_ranks(self, owners: set[str]) -> dict[int, int]:
        """Return the bytes that each rank of these owners has announced, or has a copy of."""
        inventories = [self.owners[node] for node in sorted(owners & set(self.owners))]
        sizes = {copy.rank: copy.bytes for one in inventories for copy in one.copies if copy.tier == "memory"}
        return sizes | {state.rank: state.state_bytes for one in inventories for state in one.ranks}

    def release(self, *, owners: frozenset[str], kept: frozenset[tuple[str, int]], attempt_uid: str) -> list[Effect]:
        """Give back the memory of copies that are neither placed here any more nor kept, nor newer than what is.

        Those of the current attempt stay until a later step is kept: its next restore may want them, whatever became
        of their owner.
        """
        if not owners <= set(self.owners):
            return []
        newest_kept = max((step for uid, step in kept if uid == attempt_uid), default=0)
        placed = {copy.rank for node in owners if node in self.owners for copy in self.owners[node].copies}
        effects: list[Effect] = []
        for rank in sorted({rank for rank, _ in self.spares} - placed):
            over = [
                number
                for (of_rank, number), spare in sorted(self.spares.items(), key=lambda item: item[0])
                if of_rank == rank
                and not spare.pulling
                and not spare.uses
                and (spare.held is None or _is_over(spare.held, kept, newest_kept, attempt_uid=attempt_uid))
            ]
            for number in over:
                del self.spares[rank, number]
            if over:
                effects.append(RemoveSpares(rank=rank, spares=tuple(over)))
        return effects


def _is_over(held: Shard, kept: frozenset[tuple[str, int]], newest_kept: int, *, attempt_uid: str) -> bool:
    """Say whether nothing can want a copy of a rank any more that others hold now."""
    return held.of_step not in kept and (held.attempt_uid != attempt_uid or held.step < newest_kept)


def _offered(
    inventory: Inventory,
    *,
    kept: frozenset[tuple[str, int]],
    dropped: frozenset[tuple[str, int]],
    attempt: int,
    attempt_uid: str,
) -> list[list[Shard]]:
    """Return for each rank the memory copies that are of this attempt or kept, and of no attempt after it."""
    offered: dict[int, list[Shard]] = {}
    for copy in inventory.copies:
        current = copy.attempt_uid == attempt_uid or (copy.attempt_uid, copy.step) in kept
        if copy.tier != "memory" or not current or copy.attempt > attempt or (copy.attempt_uid, copy.step) in dropped:
            continue
        offered.setdefault(copy.rank, []).append(shard_of_copy(copy))
    return [offered[rank] for rank in sorted(offered)]
