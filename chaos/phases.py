"""The phases between a step and READY, each as the point at which a process is in it."""

from __future__ import annotations

from toprope.chaos.killpoints import Armed
from toprope.store.errors import UsageError

PHASES = {
    "shm copy": ("rank", "before:slot.write"),
    "hashing": ("sidecar", "before:pages.write"),
    "local write": ("sidecar", "before:disk.rename"),
    "peer replication": ("sidecar", "before:peers.receive"),
    "object upload": ("sidecar", "before:objects.create"),
    "manifest commit": ("coordinator", "before:store.create_record"),
    "restore": ("sidecar", "before:coordinator.open_attempt"),
    "garbage collection": ("coordinator", "before:store.collect_garbage"),
}
"""Which kind of process passes which point. A restore is in hand from the asking for an attempt on."""

NAMES_STEP = {"object upload": "/s{step:09d}/", "local write": "-s{step}-", "peer replication": "/{step}/"}
"""How the calls of a phase name a step, where they do."""


def hold(phase: str, of: str, *, step: int | None, serial: int) -> Armed:
    """Return what holds a process in a phase, of one step if the calls of that phase name it.

    Raises:
        UsageError: there is no such phase, or another kind of process is in it.
    """
    if phase not in PHASES:
        raise UsageError(f"during {phase!r}: no phase is called so; there are: {', '.join(PHASES)}")
    kind, point = PHASES[phase]
    if of.partition(" ")[0] != kind:
        raise UsageError(f"during {phase!r}, of {of!r}: it is a {kind} that is in this phase")
    match = NAMES_STEP.get(phase, "").format(step=step) if step is not None else ""
    return Armed(point=point, action="hold", match=match, serial=serial)
