"""What of the coordinator's document each node needs. Pure.

The whole names every rank, every holder and every object to be read back: with thousands of nodes it has megabytes,
and to tell all of it to each would cost the square of their number. An extract is a Desired like any other.
"""

from __future__ import annotations

from collections import defaultdict

import msgspec

from toprope.coordinator.wire import Desired, Member, Placement, ReadBackTask


class Extracts:
    """The extracts of one document: the ranks of a node, its holders and whom it holds for, its tasks."""

    def __init__(self, whole: Desired) -> None:
        self.whole = whole
        self._members: dict[str, list[Member]] = defaultdict(list)
        self._placement: dict[str, list[Placement]] = defaultdict(list)
        self._read_backs: dict[str, list[ReadBackTask]] = defaultdict(list)
        for member in whole.attempt.world if whole.attempt is not None else ():
            self._members[member.node].append(member)
        by_owner: dict[str, list[Placement]] = defaultdict(list)
        for place in whole.placement:
            by_owner[place.owner].append(place)
        for owner, of_owner in by_owner.items():
            for node in sorted({owner, *(place.holder for place in of_owner)}):
                self._placement[node] += of_owner
        for task in whole.read_backs:
            self._read_backs[task.node].append(task)

    def of(self, node: str) -> Desired:
        """Return what a node needs; one that has no part in the job needs what is said to all."""
        attempt = self.whole.attempt
        if attempt is not None:
            attempt = msgspec.structs.replace(attempt, world=tuple(self._members.get(node, ())))
        return msgspec.structs.replace(
            self.whole,
            attempt=attempt,
            placement=tuple(self._placement.get(node, ())),
            read_backs=tuple(self._read_backs.get(node, ())),
        )


def is_news(extract: Desired, told: Desired) -> bool:
    """Say whether a node to which ``told`` was told is to be told an extract."""
    return msgspec.structs.replace(extract, version=told.version) != told
