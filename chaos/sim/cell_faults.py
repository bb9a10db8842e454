"""The faults of the fault matrix, by row and phase: which blows are struck, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from toprope.chaos.matrix import Code, Phase, Row
from toprope.chaos.sim import blows
from toprope.chaos.sim.cells import Fault
from toprope.chaos.sim.store import Fault as StoreFault

_STORE_FAULTS: tuple[StoreFault, ...] = ("request lost", "reply lost", "late", "503")
_AS_IN_TABLE: frozenset[Code] = frozenset()
_N: frozenset[Code] = frozenset({"N"})
_R: frozenset[Code] = frozenset({"R"})
_RN: frozenset[Code] = frozenset({"R", "N"})
_DR: frozenset[Code] = frozenset({"D", "R"})
_USES_STORE: tuple[Phase, ...] = ("object upload", "manifest commit", "restore", "garbage collection")
_OF_COORDINATORS: tuple[Phase, ...] = ("manifest commit", "garbage collection")


def faults(row: Row, phase: Phase) -> tuple[Fault, ...]:
    """Return the faults of a cell as far as they can be simulated; none when they can't."""
    return tuple(_at(phase, fault) for fault in _ROWS[row](phase))


def _at(phase: Phase, fault: Fault) -> Fault:
    """Set what the phase needs: a local write has no middle, and a restore must be led to."""
    if phase == "local write" and fault.moment == "middle":
        return replace(fault, moment="begins")
    if phase == "restore" and fault.before is None:
        return replace(fault, before=blows.lose_node)
    return fault


def _trainer(_: Phase) -> Iterator[Fault]:
    yield Fault(name="SIGKILL of the trainer", strike=blows.kill_trainer)


def _sidecar(phase: Phase) -> Iterator[Fault]:
    if phase == "local write":
        yield Fault(name="SIGKILL of the sidecar", strike=blows.in_the_middle_of_a_write(blows.kill_sidecar))
        return
    yield Fault(name="SIGKILL of the sidecar", strike=blows.kill_sidecar)
    if phase == "peer replication":
        yield Fault(name="SIGKILL of the owner's sidecar", strike=blows.kill_owners_sidecar)


def _node(phase: Phase) -> Iterator[Fault]:
    if phase == "local write":
        yield Fault(name="power cut", strike=blows.in_the_middle_of_a_write(blows.cut_power))
        return
    if phase == "peer replication":
        yield Fault(name="power cut of the owner", strike=blows.cut_owners_power)
        yield Fault(name="power cut of the receiver", strike=blows.cut_power, right=_DR)
        return
    if phase == "restore":
        yield Fault(name="power cut of the holder", strike=blows.cut_others_power)
        yield Fault(name="power cut of the node that restores", strike=blows.cut_power, right=_R)
        return
    yield Fault(name="power cut", strike=blows.cut_power)


def _coordinator(_: Phase) -> Iterator[Fault]:
    yield Fault(name="SIGKILL of the coordinator", strike=blows.kill_coordinators)


def _two(phase: Phase) -> Iterator[Fault]:
    # of a step that is being committed: either wins its slot; while one stands still, a newer step may overtake it
    commits = phase == "manifest commit"
    yield Fault(name="a second coordinator", strike=blows.second_coordinator, right=_RN if commits else _AS_IN_TABLE)
    yield Fault(
        name="the coordinator stopped for 90 s", strike=blows.pause_coordinators, right=_DR if commits else _AS_IN_TABLE
    )


def _partition(phase: Phase) -> Iterator[Fault]:
    if phase == "restore":
        yield Fault(name="cut from the holder", strike=blows.cut_from_the_other)
        yield Fault(name="cut off", strike=blows.cut_off, right=_R)
        yield Fault(name="broker down", strike=blows.broker_down, right=_N)
        return
    off = blows.cut_off_the_store if phase in _OF_COORDINATORS else blows.cut_off
    if phase == "peer replication":
        yield Fault(name="cut off, with a third node", strike=blows.cut_off_for_long, nodes=3)
        yield Fault(name="cut off, with no other node", strike=off, right=_R)
    else:  # deletion is postponed: it is done once the link is back
        yield Fault(name="cut off", strike=off, right=_R if phase == "garbage collection" else _AS_IN_TABLE)
    # documents go by HTTP then, and commits go on
    yield Fault(name="broker down", strike=blows.broker_down, right=_N)


def _disk_errors(phase: Phase) -> Iterator[Fault]:
    if phase == "restore":
        yield Fault(
            name="EIO", strike=blows.disk_says("io"), before=blows.lose_memory, way="here local", moment="begins"
        )
        return
    for trouble, name in (("full", "ENOSPC"), ("io", "EIO"), ("sync", "a failed sync")):
        yield Fault(name=name, strike=blows.disk_says(trouble))
    if phase == "shm copy":
        yield Fault(name="a full tmpfs", strike=blows.no_room)


def _damage(phase: Phase) -> Iterator[Fault]:
    match phase:
        case "shm copy":
            yield Fault(name="written to by another", strike=blows.another_sequence, moment="ends")
        case "hashing":
            yield Fault(name="written to by another", strike=blows.another_sequence)
        case "local write":
            yield Fault(name="a flipped bit", strike=blows.flip_local, moment="ends")
            yield Fault(name="a torn write", strike=blows.in_the_middle_of_a_write(blows.cut_power))
        case "peer replication" | "restore":
            yield Fault(name="a flipped bit", strike=blows.flip_received)
        case "object upload":
            yield Fault(name="bytes stored wrong", strike=blows.stored_wrong, moment="begins")
        case "manifest commit":
            yield Fault(name="a flipped bit in the log", strike=blows.damage_log)
        case "garbage collection":
            yield Fault(name="a damaged index", strike=blows.damage_index, moment="begins")


def _store_errors(phase: Phase) -> Iterator[Fault]:
    for kind in _STORE_FAULTS:
        if phase == "restore":
            yield Fault(
                name=kind,
                strike=blows.store_says(kind),
                before=blows.lose_machines,
                way="object object",
                moment="begins",
            )
        else:
            yield Fault(name=kind, strike=blows.store_says(kind), moment="begins" if phase in _USES_STORE else "middle")


def _slow(phase: Phase) -> Iterator[Fault]:
    match phase:
        case "local write":
            yield Fault(name="a slow disk", strike=blows.slow_disk)
        case "peer replication":
            yield Fault(name="a slow holder, with a third node", strike=blows.stop_sidecar_for_long, nodes=3)
            yield Fault(name="a slow owner, which alone has it", strike=blows.stop_owners_sidecar, right=_R)
        case "restore":
            yield Fault(name="a slow peer", strike=blows.stop_other)
        case "object upload" | "manifest commit":  # it may be that it only takes longer
            yield Fault(name="a slow store", strike=blows.slow_store, moment="begins", right=_RN)
        case "garbage collection":
            yield Fault(name="a slow rank", strike=blows.stop_trainer)
        case _:
            yield Fault(name="a slow sidecar", strike=blows.stop_sidecar)


def _memory(phase: Phase) -> Iterator[Fault]:
    if phase == "shm copy":
        yield Fault(name="a full tmpfs", strike=blows.no_room)
    elif phase == "local write":
        yield Fault(name="OOM kill of the trainer", strike=blows.kill_trainer)
    elif phase in {"hashing", "peer replication", "object upload"}:
        yield Fault(name="OOM kill of the sidecar", strike=blows.kill_sidecar)
    if phase != "restore":
        yield Fault(name="a clock that jumps", strike=blows.clock_jumps, right=_N)  # no rule goes by one


_ROWS: dict[Row, Callable[[Phase], Iterator[Fault]]] = {
    "trainer killed": _trainer,
    "sidecar killed": _sidecar,
    "node lost": _node,
    "coordinator crash": _coordinator,
    "two coordinators": _two,
    "partition": _partition,
    "disk errors": _disk_errors,
    "bit flip, torn write": _damage,
    "store errors": _store_errors,
    "slow": _slow,
    "memory, clocks": _memory,
}
