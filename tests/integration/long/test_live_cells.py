"""Cells of the fault matrix on real processes: who is to die dies while another process is held in the phase."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.support.trials import Try, told

from toprope.chaos.matrix import LIVE_ROWS, PHASES, Phase, Row
from toprope.chaos.phases import NAMES_STEP
from toprope.chaos.planned import HELD_S_MAX
from toprope.chaos.scenario import Bounds, Fault, Loaded, Scenario, Topology, Workload

HOLDER: dict[Phase, str] = {
    "shm copy": "rank 1",
    "hashing": "sidecar b",
    "local write": "sidecar b",
    "peer replication": "sidecar a",
    "object upload": "sidecar b",
    "manifest commit": "coordinator",
    "restore": "sidecar a",
    "garbage collection": "coordinator",
}
"""Who is held in the phase, by what it does with the snapshot of rank 1 on node b; rank 0 asks for the attempt."""
VICTIM: dict[Row, str] = {
    "trainer killed": "rank 1",
    "sidecar killed": "sidecar b",
    "node lost": "node b",
    "coordinator crash": "coordinator",
    "two coordinators": "coordinator",
    "partition": "broker",
}
UPLOAD = "before:objects.create"
CALLS: dict[Phase, tuple[str, str]] = {
    "local write": ("sidecar b", "before:disk.rename"),
    "peer replication": ("sidecar a", "before:peers.receive"),
    "object upload": ("sidecar b", UPLOAD),
    "manifest commit": ("coordinator", "before:store.create_record"),
    "restore": ("coordinator", "before:store.create_facts"),
    "garbage collection": ("coordinator", "before:store.collect_garbage"),
}
"""The phases that are one call of a port, which is made to wait, or to fail, in the phase itself."""
OF_THE_STORE: frozenset[Phase] = frozenset({"object upload", "manifest commit", "restore", "garbage collection"})
STEP, EVERY = 16, 8
"""Each snapshot goes to all tiers, so that whoever is held late is held in one that does."""


def blow_of(row: Row, phase: Phase) -> Fault:
    """The fault of a cell, which comes while the holder is in the phase, or is what the phase's own call meets with."""
    at_step = STEP if phase in NAMES_STEP else STEP + EVERY - 1  # it is held from an interval before that on
    held = Fault(do="kill", during=phase, of=HOLDER[phase], at_step=at_step, for_s=2.0)
    match row:
        case "two coordinators":
            return replace(held, do="split", target=VICTIM[row], for_s=8.0)
        case "store errors" if phase in OF_THE_STORE:
            return failing(phase, {"action": "unavailable", "times": 2})
        case "store errors":
            return replace(held, do="fail", target="sidecar a", how={"point": UPLOAD, "action": "throttled"})
        case "slow" if phase in CALLS:
            return failing(phase, {"action": "delay", "seconds": 1.5, "times": 2})
        case "slow":
            return replace(held, do="slow", target="rank 1" if phase == "shm copy" else "sidecar b", how={"share": 0.3})
        case _:
            return replace(held, target=VICTIM[row])


def failing(phase: Phase, how: dict[str, str | int | float]) -> Fault:
    target, point = CALLS[phase]
    return Fault(do="fail", target=target, at_step=STEP - 1, for_s=8.0, how={"point": point, **how})


def scenario_of(row: Row, phase: Phase) -> Scenario:
    """The scenario of a cell; a restart leads to a restore first, and what stands still in a copy holds up its step."""
    first = (Fault(do="kill", target="rank 0", at_step=STEP),) if phase == "restore" else ()
    retained = ("--retain", "last=1") if phase == "garbage collection" else ()
    hits = bool(first) or row in {"trainer killed", "node lost"}
    return Scenario(
        name="cell",
        about=f"{row} during {phase}",
        attacks=("no torn step" if hits else "training goes on", "verified", "READY once"),
        label="chaos",
        fault=(*first, blow_of(row, phase)),
        topology=Topology(coordinator=retained, every=EVERY, local_every=EVERY, object_every=EVERY),
        workload=Workload(steps=88 if row == "two coordinators" else 56, step_s=0.2),
        bounds=Bounds(stall_s=HELD_S_MAX + 1.0) if HOLDER[phase].startswith("rank") else Bounds(),
    )


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("row", LIVE_ROWS)
def test_a_cell_holds_on_real_processes(
    row: Row, phase: Phase, attempt: Try, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The fault is seen to happen while the process is held in the phase: between its entry and its exit."""
    verdict = attempt(Loaded(scenario=scenario_of(row, phase), directory=tmp_path))

    assert verdict.good, told(verdict)
    record_property(f"{row}, {phase}", verdict.injections[-1].witness)
