"""What the living nodes hold of an attempt, counted as they tell of it. Pure.

Of each rank it is known how it stands with each step that anyone has something of, and of each step how many ranks
stand alike. So a word of one node costs what its own ranks cost, and a look at the whole costs what the steps cost,
however many ranks there are.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from toprope.coordinator.placement import Domain
from toprope.coordinator.protection import Safety
from toprope.coordinator.roll import Node


class Stand(NamedTuple):
    """How a rank stands with a step.

    ``listed``: it is in some memory. ``copies``: so many it has in domains of their own beside its node's; -1: it is
    not in its node's memory, or what is there differs. ``agreed``: it is in some memory, and the same in all.
    ``lost``: it is not in its node's memory and never will be. ``gone_on``: its node's memory has a later step.
    ``passed``: a holder has a later step of this rank, and not this one; ``passing``: a holder has a later one.
    """

    listed: bool
    copies: int
    agreed: bool
    stored: bool
    lost: bool
    gone_on: bool
    passed: bool
    passing: bool


class _Said(NamedTuple):
    """What a node says of a rank: where it is, the digests of the copies in its memories by step, and other steps.

    A digest is empty where the node lists two that differ.
    """

    domain: Domain
    memory: dict[int, str]
    peer: dict[int, str]
    stored: set[int]
    skipped: set[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """A rank's stand by step, and the newest step in its node's memory and in a peer's."""

    stands: Mapping[int, Stand]
    newest_memory: int
    newest_peer: int


_NOTHING = _Rank(stands={}, newest_memory=0, newest_peer=0)


@dataclass(slots=True)
class Holdings:
    """What is held of the attempt ``attempt_uid`` of ``world`` ranks."""

    attempt_uid: str
    world: int
    _said: dict[int, dict[str, _Said]] = field(default_factory=dict)
    _ranks_of: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _ranks: dict[int, _Rank] = field(default_factory=dict)
    _steps: dict[int, dict[Stand, int]] = field(default_factory=dict)
    _newest_memory: dict[int, int] = field(default_factory=dict)
    _newest_peer: dict[int, int] = field(default_factory=dict)

    def see(self, node: Node) -> None:
        """Take in what a node says now; one that is not alive holds nothing."""
        said = self._of(node) if node.alive else {}
        for rank in {*said, *self._ranks_of.get(node.name, ())}:
            by_node = self._said.setdefault(rank, {})
            if by_node.get(node.name) != said.get(rank):
                by_node.pop(node.name, None)
                if rank in said:
                    by_node[node.name] = said[rank]
                self._recount(rank, _rank(by_node.values()))
        self._ranks_of[node.name] = tuple(said)

    def _of(self, node: Node) -> dict[int, _Said]:
        domain, of_rank = node.domain, dict[int, _Said]()
        for copy in node.inventory.copies:
            counts = copy.tier != "local" and copy.world == self.world and 0 <= copy.rank < self.world
            if not counts or copy.attempt_uid != self.attempt_uid:
                continue
            said = of_rank.get(copy.rank) or of_rank.setdefault(copy.rank, _Said(domain, {}, {}, set(), set()))
            if copy.tier == "object":
                said.stored.add(copy.step)
            else:
                held = said.memory if copy.tier == "memory" else said.peer
                held[copy.step] = copy.digest if held.get(copy.step, copy.digest) == copy.digest else ""
        for skip in node.inventory.skipped:
            if skip.attempt_uid == self.attempt_uid and 0 <= skip.rank < self.world:
                said = of_rank.get(skip.rank) or of_rank.setdefault(skip.rank, _Said(domain, {}, {}, set(), set()))
                said.skipped.add(skip.step)
        return of_rank

    def assess(self, *, copies: int, placed: int, aim: int = 0) -> Safety:
        """Return what is safe where.

        ``copies`` are wanted of each snapshot, ``placed`` the living nodes allow; ``aim`` is the step that they go for,
        to which a holder comes back.
        """
        steps = sorted(step for step, tally in self._steps.items() if any(stand.listed for stand in tally))
        count = {step: self._least(step) for step in steps}
        at_hand = [step for step in steps if self._absent(step) == 0 and all(one.agreed for one in self._steps[step])]
        guarded = max((s for s in steps if count[s] >= placed), default=0) if placed or not copies else 0
        hopeless = tuple(
            step
            for step in steps
            if self._will_never_be(step)
            or (step != aim and step > guarded and self._was_passed_over(step, placed=placed))
        )
        return Safety(
            protected_step=max((step for step in steps if count[step] >= copies), default=0),
            guarded_step=guarded,
            at_hand_step=max(at_hand, default=0),
            at_hand=frozenset(at_hand),
            common=tuple(step for step in steps if count[step] >= 0 and step not in hopeless),
            hopeless=hopeless,
        )

    # --- one step --------------------------------------------------------------------------------------------------

    def _absent(self, step: int) -> int:
        """Return how many ranks have nothing of a step."""
        return self.world - sum(self._steps[step].values())

    def _least(self, step: int) -> int:
        return -1 if self._absent(step) else min((stand.copies for stand in self._steps[step]), default=-1)

    def _stored(self, step: int) -> int:
        return sum(count for stand, count in self._steps[step].items() if stand.stored)

    def _will_never_be(self, step: int) -> bool:
        """Say whether a rank has lost it; a trainer snapshots in order, so a later one shows that none comes.

        What is in the object store while others are on their way there may become READY.
        """
        tally = self._steps[step]
        may_be_ready = self._stored(step) < self.world
        if any(stand.lost and not (stand.stored and may_be_ready) for stand in tally):
            return True
        gone_on = sum(count for newest, count in self._newest_memory.items() if newest > step)
        return gone_on > sum(count for stand, count in tally.items() if stand.gone_on)

    def _was_passed_over(self, step: int, *, placed: int) -> bool:
        """Say whether a holder that a rank still needs has gone on, and so never comes back for it."""
        tally = self._steps[step]
        if 0 < self._stored(step) < self.world:
            return False
        if any(stand.passed and stand.copies < placed for stand in tally):
            return True
        passing = sum(count for newest, count in self._newest_peer.items() if newest > step)
        return passing > sum(count for stand, count in tally.items() if stand.passing)

    # --- one rank --------------------------------------------------------------------------------------------------

    def _recount(self, rank: int, now: _Rank) -> None:
        before = self._ranks.get(rank, _NOTHING)
        if before is now:
            return
        for step in before.stands.keys() | now.stands.keys():
            old, new = before.stands.get(step), now.stands.get(step)
            if old != new:
                self._restand(step, old, new)
        _move(self._newest_memory, before.newest_memory, now.newest_memory)
        _move(self._newest_peer, before.newest_peer, now.newest_peer)
        self._ranks[rank] = now

    def _restand(self, step: int, old: Stand | None, new: Stand | None) -> None:
        tally = self._steps.setdefault(step, {})
        if old is not None:
            tally[old] -= 1
            if not tally[old]:
                del tally[old]
        if new is not None:
            tally[new] = tally.get(new, 0) + 1
        if not tally:
            del self._steps[step]


def _move(newest: dict[int, int], old: int, new: int) -> None:
    """Count a rank whose newest step was ``old`` under ``new``; 0 is none."""
    if old == new:
        return
    if old:
        newest[old] -= 1
        if not newest[old]:
            del newest[old]
    if new:
        newest[new] = newest.get(new, 0) + 1


def _rank(said: Collection[_Said]) -> _Rank:
    """Put together what all nodes say of a rank. Thousands of these are done each second: hence the plain loops."""
    places, digests, differ = dict[Domain, int](), dict[int, str](), set[int]()
    way: list[_Way] = []
    for domain, memory, peer, stored, skipped in said:
        for held in (memory, peer):
            for step, digest in held.items():
                if not digest or digests.setdefault(step, digest) != digest:
                    differ.add(step)
        place = places.setdefault(domain, len(places))
        way.append((place, tuple(memory), tuple(peer), tuple(stored), tuple(skipped)))
    return _of_way(tuple(way), frozenset(differ))


_Way: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""What a node says of a rank, whichever rank it is: the number of its domain, and the steps that ``_Said`` has."""


@functools.lru_cache(4096)
def _of_way(said: tuple[_Way, ...], differ: frozenset[int]) -> _Rank:
    """Work out how a rank stands of which this is said; of the steps in ``differ`` there are copies that differ.

    Ranks of a job stand in few ways at a time, however many there are.
    """
    steps = {step for _, *held in said for of_kind in held for step in of_kind}
    newest_memory = max((step for _, memory, *_ in said for step in memory), default=0)
    newest_peer = max((step for _, _, peer, *_ in said for step in peer), default=0)
    return _Rank(
        stands={step: _stand(step, said, step in differ, newest_memory, newest_peer) for step in sorted(steps)},
        newest_memory=newest_memory,
        newest_peer=newest_peer,
    )


def _stand(step: int, said: Sequence[_Way], differs: bool, newest_memory: int, newest_peer: int) -> Stand:  # noqa: FBT001 - a fact of the step
    own = [place for place, memory, *_ in said if step in memory]
    others = [place for place, _, peer, *_ in said if step in peer]
    listed = bool(own or others)
    agreed = listed and not differs
    is_skipped = any(step in skipped for *_, skipped in said)
    return Stand(
        listed=listed,
        copies=_apart(own, others) if own and agreed else -1,
        agreed=agreed,
        stored=any(step in stored for *_, stored, _ in said),
        lost=not own and (newest_memory > step or is_skipped),
        gone_on=newest_memory > step,
        passed=any(max(peer, default=0) > step for _, _, peer, *_ in said if step not in peer),
        passing=newest_peer > step,
    )


def _apart(own: Sequence[int], others: Sequence[int]) -> int:
    """Return how many domains other than its own a shard is copied to."""
    return max(len({place for place in others if place != mine}) for mine in own)
