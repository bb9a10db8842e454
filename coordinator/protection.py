"""What is safe in memory: which step is protected, which could be had, which must be kept. Pure.

*Protected*: every rank's shard of the step is in its node's memory and, with the same digest, in the memory of a node
of another failure domain. *At hand*: every rank's shard is in the memory of some living node, own or peer's: enough to
restore now, not enough to lose one more node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from toprope.coordinator.placement import apart
from toprope.coordinator.roll import Node
from toprope.coordinator.wire import Kept, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Safety:
    """For one attempt: the newest protected step and the newest step at hand (0: none), and each rank's steps.

    ``hopeless``: steps that can't be protected any more. Some rank has it in memory and another has not and never will,
    or the holder of a rank's peer copies has gone on to a later step: it never comes back for an earlier one.
    """

    protected_step: int
    at_hand_step: int
    newest: dict[int, dict[Tier, int]]
    at_hand: frozenset[int]
    hopeless: tuple[int, ...] = ()


def assess(nodes: Sequence[Node], *, attempt_uid: str, world: int) -> Safety:
    """Return what the living ``nodes`` hold of an attempt of ``world`` ranks."""
    memory: dict[tuple[int, int], list[tuple[Node, str]]] = defaultdict(list)
    peer: dict[tuple[int, int], list[tuple[Node, str]]] = defaultdict(list)
    newest: dict[int, dict[Tier, int]] = {rank: {} for rank in range(world)}
    stored: set[tuple[int, int]] = set()
    for node in nodes:
        for copy in node.copies(attempt_uid):
            if copy.world != world or copy.rank not in newest:
                continue
            if copy.tier == "object":
                stored.add((copy.step, copy.rank))
            newest[copy.rank][copy.tier] = max(copy.step, newest[copy.rank].get(copy.tier, 0))
            if copy.tier == "memory":
                memory[copy.step, copy.rank].append((node, copy.digest))
            elif copy.tier == "peer":
                peer[copy.step, copy.rank].append((node, copy.digest))
    steps = sorted({step for step, _ in (*memory, *peer)})
    protected = [s for s in steps if all(_guarded(memory[s, r], peer[s, r]) for r in range(world))]
    at_hand = [s for s in steps if all(_agreed(memory[s, r], peer[s, r]) for r in range(world))]
    skipped = {(s.step, s.rank) for node in nodes for s in node.inventory.skipped if s.attempt_uid == attempt_uid}

    def will_never_be(step: int, rank: int) -> bool:
        # a trainer snapshots in order; a skip of which no frame came shows by a later snapshot
        gone_on = newest[rank].get("memory", 0) > step
        may_be_ready = (step, rank) in stored and any((step, other) not in stored for other in range(world))
        return not memory[step, rank] and not may_be_ready and ((step, rank) in skipped or gone_on)

    def was_passed_over(step: int, rank: int) -> bool:
        being_stored = len({(step, other) for other in range(world)} & stored) in range(1, world)
        later = newest[rank].get("peer", 0) > step > max(protected, default=0)
        return later and not peer[step, rank] and not being_stored

    return Safety(
        protected_step=max(protected, default=0),
        at_hand_step=max(at_hand, default=0),
        newest=newest,
        at_hand=frozenset(at_hand),
        hopeless=tuple(s for s in steps if any(will_never_be(s, r) or was_passed_over(s, r) for r in range(world))),
    )


def _guarded(own: list[tuple[Node, str]], peers: list[tuple[Node, str]]) -> bool:
    return _agreed(own, peers) and any(
        one is not other and apart(one.domain, other.domain) for one, _ in own for other, _ in peers
    )


def _agreed(own: list[tuple[Node, str]], peers: list[tuple[Node, str]]) -> bool:
    return len({digest for _, digest in (*own, *peers)}) == 1


def keep(
    safety: Safety, *, attempt_uid: str, source: Kept | None, before: Sequence[Kept], can_protect: bool
) -> tuple[Kept, ...]:
    """Return the steps that may not be reused: what a restart would need if it came now.

    The newest protected step. Until there is one: the attempt's ``source``, or, when nobody is there to protect
    anything, the newest step at hand. With neither, what was kept ``before``: a step is let go for a better one only.
    """
    earlier = [kept.step for kept in before if kept.attempt_uid == attempt_uid and kept.step in safety.at_hand]
    best = max((safety.protected_step, *earlier))
    if best == 0 and source is not None and can_protect:
        return (source,)
    best = best or safety.at_hand_step
    if not safety.protected_step and not can_protect:
        best = max(best, safety.at_hand_step)
    if best:
        return (Kept(attempt_uid=attempt_uid, step=best),)
    if source is not None and not any(kept.attempt_uid == attempt_uid for kept in before):
        return (source,)
    return tuple(before)
