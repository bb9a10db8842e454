"""What is safe in memory: which step is protected, which could be had, which must be kept. Pure.

*Protected*: every rank's shard of the step is in its node's memory and, with the same digest, in the memory of as many
other nodes as copies are wanted, all in failure domains of their own. *Guarded*: the same with as many copies as the
living nodes allow, when these are fewer. *At hand*: every rank's shard is in the memory of some living node, own or
peer's: enough to restore now, not enough to lose one more node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from toprope.coordinator.wire import Kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Safety:
    """For one attempt: its newest protected, guarded and at-hand step (0: none), and which can be had.

    ``common``: the steps that every rank has in its own node's memory, and that can still be protected.
    ``hopeless``: steps that can't be protected any more. Some rank has it in memory and another has not and never will,
    or a holder of a rank's peer copies has gone on to a later step: it never comes back for an earlier one.
    """

    protected_step: int
    guarded_step: int
    at_hand_step: int
    at_hand: frozenset[int]
    common: tuple[int, ...] = ()
    hopeless: tuple[int, ...] = ()


def keep(
    safety: Safety, *, attempt_uid: str, source: Kept | None, before: Sequence[Kept], can_protect: bool
) -> tuple[Kept, ...]:
    """Return the steps that may not be reused: what a restart would need if it came now.

    The newest guarded step. Until there is one: the attempt's ``source``, or, when nobody is there to protect
    anything, the newest step at hand. With neither, what was kept ``before``: a step is let go for a better one only.
    """
    earlier = [kept.step for kept in before if kept.attempt_uid == attempt_uid and kept.step in safety.at_hand]
    best = max((safety.guarded_step, *earlier))
    if best == 0 and source is not None and can_protect:
        return (source,)
    best = best or safety.at_hand_step
    if not safety.guarded_step and not can_protect:
        best = max(best, safety.at_hand_step)
    if best:
        return (Kept(attempt_uid=attempt_uid, step=best),)
    if source is not None and not any(kept.attempt_uid == attempt_uid for kept in before):
        return (source,)
    return tuple(before)
