"""What is safe in memory, found by looking at everything that every node holds: what ``Holdings`` keeps count of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from toprope.coordinator.protection import Safety
from toprope.coordinator.roll import Node
from toprope.coordinator.wire import Tier

Held = tuple[Node, str]
"""Who holds a shard, with which digest."""


@dataclass(slots=True)
class View:
    """What living nodes hold of an attempt, by step and rank."""

    memory: dict[tuple[int, int], list[Held]] = field(default_factory=lambda: defaultdict(list))
    peer: dict[tuple[int, int], list[Held]] = field(default_factory=lambda: defaultdict(list))
    stored: set[tuple[int, int]] = field(default_factory=set)
    newest: dict[int, dict[Tier, int]] = field(default_factory=dict)
    reached: dict[int, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    """By rank and holder the newest peer copy."""

    def add(self, node: Node, *, attempt_uid: str, world: int) -> None:
        for copy in node.copies(attempt_uid):
            if copy.world != world or copy.rank not in self.newest:
                continue
            at = copy.step, copy.rank
            self.newest[copy.rank][copy.tier] = max(copy.step, self.newest[copy.rank].get(copy.tier, 0))
            if copy.tier == "object":
                self.stored.add(at)
            elif copy.tier == "memory":
                self.memory[at].append((node, copy.digest))
            elif copy.tier == "peer":
                self.peer[at].append((node, copy.digest))
                reached = self.reached[copy.rank]
                reached[node.name] = max(copy.step, reached.get(node.name, 0))

    def agreed(self, step: int, rank: int) -> bool:
        return len({digest for _, digest in (*self.memory[step, rank], *self.peer[step, rank])}) == 1

    def copies(self, step: int, rank: int) -> int:
        """Return how many copies in domains of their own a shard has beside its node's; -1: it is not there."""
        if not self.memory[step, rank] or not self.agreed(step, rank):
            return -1
        peers = {node.domain for node, _ in self.peer[step, rank]}
        return max(len(peers - {own.domain}) for own, _ in self.memory[step, rank])

    def holds(self, name: str, step: int, rank: int) -> bool:
        return any(node.name == name for node, _ in self.peer[step, rank])


def assess(nodes: Sequence[Node], *, attempt_uid: str, world: int, copies: int, placed: int, aim: int = 0) -> Safety:
    """Return what the living ``nodes`` hold of an attempt of ``world`` ranks.

    ``copies`` are wanted of each snapshot, ``placed`` the living nodes allow; ``aim`` is the step that they go for,
    to which a holder comes back.
    """
    ranks = range(world)
    view = View(newest={rank: {} for rank in ranks})
    for node in nodes:
        view.add(node, attempt_uid=attempt_uid, world=world)
    steps = sorted({step for step, _ in (*view.memory, *view.peer)})
    count = {step: min((view.copies(step, rank) for rank in ranks), default=-1) for step in steps}
    at_hand = [step for step in steps if all(view.agreed(step, rank) for rank in ranks)]
    guarded = max((s for s in steps if count[s] >= placed), default=0) if placed or not copies else 0
    skipped = {(s.step, s.rank) for node in nodes for s in node.inventory.skipped if s.attempt_uid == attempt_uid}

    def will_never_be(step: int, rank: int) -> bool:
        # a trainer snapshots in order; a skip of which no frame came shows by a later snapshot
        gone_on = view.newest[rank].get("memory", 0) > step
        may_be_ready = (step, rank) in view.stored and any((step, other) not in view.stored for other in ranks)
        return not view.memory[step, rank] and not may_be_ready and ((step, rank) in skipped or gone_on)

    def was_passed_over(step: int, rank: int) -> bool:
        being_stored = len({(step, other) for other in ranks} & view.stored) in range(1, world)
        if step == aim or step <= guarded or being_stored or view.copies(step, rank) >= placed:
            return False
        return any(reached > step and not view.holds(name, step, rank) for name, reached in view.reached[rank].items())

    hopeless = tuple(s for s in steps if any(will_never_be(s, r) or was_passed_over(s, r) for r in ranks))
    return Safety(
        protected_step=max((step for step in steps if count[step] >= copies), default=0),
        guarded_step=guarded,
        at_hand_step=max(at_hand, default=0),
        at_hand=frozenset(at_hand),
        common=tuple(step for step in steps if count[step] >= 0 and step not in hopeless),
        hopeless=hopeless,
    )
