"""What a sidecar that is told to end has still to see to: it serves until that is done, or its grace is over. Pure."""

from __future__ import annotations

from toprope.coordinator.wire import Desired
from toprope.sidecar.conversation import Conversation
from toprope.sidecar.slot_book import SlotBook
from toprope.sidecar.tier_book import TierBook
from toprope.sidecar.values import Shard


def left_to_do(
    node: str, desired: Desired | None, *, slots: SlotBook, tiers: TierBook, conversation: Conversation
) -> str:
    """Say why this node would lose something if its memory went now; empty when all is as safe as it can become.

    A trainer that is connected may yet seal its last snapshot. Copies held for other nodes don't count: their owners
    have them, too.
    """
    if conversation.trainers:
        return f"{len(conversation.trainers)} trainers are connected"
    if slots.is_hashing():
        return "a snapshot is being hashed"
    if desired is None or desired.attempt is None:
        return ""
    attempt_uid = desired.attempt.uid
    unstored = {*tiers.flying.values(), *tiers.awaited(slots.hashed(), desired.cadence, attempt_uid=attempt_uid)}
    if unstored:
        return f"{_named(max(unstored))} is on its way to a slower tier"
    mine = [shard for _, shard in slots.hashed() if shard.attempt_uid == attempt_uid]
    newest = max(mine, key=lambda shard: shard.step, default=None)
    has_holder = any(placement.owner == node for placement in desired.placement)
    dropped = {(kept.attempt_uid, kept.step) for kept in desired.dropped}
    if newest is None or not has_holder or newest.step <= desired.protected_step or newest.of_step in dropped:
        return ""
    return f"{_named(newest)} is not protected"


def _named(shard: Shard) -> str:
    return f"step {shard.step} of rank {shard.rank}"
