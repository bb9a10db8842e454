"""Whether what the ranks here announced fits, and what to set if it does not; what is wrong with each tier. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from toprope.coordinator.wire import TROUBLES_MAX, Desired
from toprope.sidecar.peer_book import SPARES_PER_RANK, PeerBook
from toprope.sidecar.slot_book import SLOTS_PER_RANK, SlotBook
from toprope.sidecar.tier_book import LOCAL_STEPS_KEPT, TierBook
from toprope.store.sizes import size_text

_TEXT_CHARS_MAX = 500


def memory_advice(own: Mapping[int, int], held: Mapping[int, int], *, copies: int, room: int) -> str:
    """Return what the memory of a node is needed for, and the nearest setting with which it fits into ``room`` bytes.

    ``own`` and ``held`` are the bytes of the state of each rank that is served here, or held for other nodes, who have
    so many ``copies`` each.
    """
    slots, spares = SLOTS_PER_RANK * sum(own.values()), SPARES_PER_RANK * sum(held.values())
    text = f"{SLOTS_PER_RANK} slots for each rank here take {size_text(slots)}"
    if spares:
        text += f", {SPARES_PER_RANK} for each rank that is held for other nodes {size_text(spares)}"
    text += f", and there are {size_text(room)}"
    for fewer in reversed(range(copies if spares else 0)):
        needed = slots + spares * fewer // copies
        if needed <= room:
            return f"{text}: ckpt coordinator --copies {fewer} needs {size_text(needed)}, which fits"
    fits = room // (SLOTS_PER_RANK * max(1, len(own)))
    return f"{text}: without copies states of up to {size_text(fits)} a rank fit; shard over more nodes, or add memory"


def disk_trouble(own: Mapping[int, int], *, room: int) -> str:
    """Return what is wrong with a disk that has room for so many bytes of local copies; empty if nothing is."""
    needed = (LOCAL_STEPS_KEPT + 1) * sum(own.values())
    if needed <= room:
        return ""
    return (
        f"{LOCAL_STEPS_KEPT + 1} local copies of each rank here take {size_text(needed)}, and its disk has room for "
        f"{size_text(room)}: give a --local-dir on a larger one"
    )


def copies_of(desired: Desired | None) -> int:
    """Return how many holders an owner has."""
    owners = [place.owner for place in desired.placement] if desired is not None else []
    return max((owners.count(owner) for owner in set(owners)), default=0)


def troubles(slots: SlotBook, tiers: TierBook, peers: PeerBook) -> tuple[str, ...]:
    """Return what costs this node a tier now; what heals is not in it any more."""
    return tuple(text[:_TEXT_CHARS_MAX] for text in _troubles(slots, tiers, peers))[:TROUBLES_MAX]


def _troubles(slots: SlotBook, tiers: TierBook, peers: PeerBook) -> Iterator[str]:
    for rank, reason in sorted(slots.refusals.items()):
        yield f"rank {rank} has no slots: {reason}"
    for rank, reason in sorted(peers.reasons.items()):
        yield f"rank {rank} is not copied here: {reason}"
    yield from tiers.troubles()
    for (tier, rank), shard in sorted(tiers.flying.items()):
        record = slots.find(shard.attempt_uid, shard.step, rank)
        if record is None or tier not in record.uses:
            yield f"the {tier} tier hangs with step {shard.step} of rank {rank}"
    if tiers.disk_room is not None and (text := disk_trouble(slots.wanted_bytes, room=tiers.disk_room)):
        yield text
