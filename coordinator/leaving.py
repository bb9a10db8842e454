"""Where ranks end that are about to be ended: a step to come, the same for all. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from toprope.coordinator.roll import Node


def extra_step(nodes: Sequence[Node], *, attempt_uid: str, before: int) -> int:
    """Return the step that all ranks of an attempt save and end at (0: none); ``before``: which it was so far.

    The first that was chosen stays, for ranks may have heard of it, unless a rank that has gone past it asks for
    another one: then the latest that any asks for, and those that wait at the first go on to it. What an earlier
    coordinator chose is what the nodes were told.
    """
    states = [state for node in nodes for state in node.inventory.ranks if state.attempt_uid == attempt_uid]
    before = max((before, *(state.extra_step for state in states)))
    asks = [state.ask for state in states if state.ask is not None]
    if before and all(ask.after < before for ask in asks):
        return before
    return max((ask.step for ask in asks), default=before)
