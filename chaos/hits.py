"""What a fault hits, and so what it may be an excuse for. Pure: names of faults and targets in, yes or no out."""

from __future__ import annotations

from toprope.chaos.verdict import Injection

_ENDS_TRAINERS = {"kill", "segfault", "terminate", "oom", "fill", "power"}
_HOLD_RANKS = {"rank", "agent", "node", "all"}
_COST_NO_SLOTS = {"flip", "tear", "ckpt", "twice", "spike"}
_SPOIL_NUMBERS = {"nan", "spike", "weight"}
_PORTS_OF_PROTECTION = ("pages.", "peers.", "coordinator.", "broker.", "nodes.")


def costs_slots(one: Injection) -> bool:
    """Say whether a fault may be why a rank has no free slot while it lasts, and shortly after it: one of a service."""
    return one.fired and one.fault not in _COST_NO_SLOTS and one.target.partition(" ")[0] not in {"rank", "agent"}


def costs_protection(one: Injection) -> bool:
    """Say whether a fault may keep steps from being protected while it lasts, and shortly after it.

    That is one of what makes and knows of copies in memory: sidecars, coordinator, broker. Neither disk nor object
    store, nor a slow rank, is a reason to lose a step that is in memory.
    """
    if not costs_slots(one):
        return False
    if one.fault == "fail":
        return one.witness.partition(":")[2].startswith(_PORTS_OF_PROTECTION)
    return one.target.partition(" ")[0] in {"sidecar", "coordinator", "broker", "services", "all"}


def ends_trainers(fault: str, target: str) -> bool:
    """Say whether a fault ends ranks, so that the world is started again."""
    return fault in _ENDS_TRAINERS and target.partition(" ")[0] in _HOLD_RANKS


def spoils_numbers(one: Injection) -> bool:
    """Say whether a fault lets steps lose what they would not have lost, until ranks go back to before it."""
    return one.fired and one.fault in _SPOIL_NUMBERS
