"""Cells of the fault matrix on real processes: who is to die dies while another process is held in the phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from toprope.chaos.matrix import LIVE_ROWS, PHASES, Phase, Row
from toprope.chaos.permit import Permit
from toprope.chaos.progress import Progress
from toprope.chaos.running import Order, run
from toprope.chaos.scenario import Fault, Loaded, Scenario, Topology, Workload
from toprope.chaos.stage import Stage

HOLDER: dict[Phase, str] = {
    "shm copy": "rank 1",
    "hashing": "sidecar b",
    "local write": "sidecar b",
    "peer replication": "sidecar a",
    "object upload": "sidecar b",
    "manifest commit": "coordinator",
    "restore": "sidecar b",
    "garbage collection": "coordinator",
}
"""Who is held in the phase, by what it does with the snapshot of rank 1, which sits on node b."""
VICTIM: dict[Row, str] = {
    "trainer killed": "rank 1",
    "sidecar killed": "sidecar b",
    "node lost": "node b",
    "coordinator crash": "coordinator",
    "two coordinators": "coordinator",
    "partition": "broker",
}
STEP = 16


def scenario_of(row: Row, phase: Phase) -> Scenario:
    """The scenario of a cell: a fault that comes while the holder is in the phase, which a restart leads to first."""
    blow = Fault(
        do="split" if row == "two coordinators" else "kill",
        target=VICTIM[row],
        during=phase,
        of=HOLDER[phase],
        at_step=STEP,
        for_s=8.0 if row == "two coordinators" else 2.0,
    )
    first = (Fault(do="kill", target="rank 0", at_step=STEP),) if phase == "restore" else ()
    retained = ("--retain", "last=1") if phase == "garbage collection" else ()
    return Scenario(
        name="cell",
        about=f"{row} during {phase}",
        attacks=("no torn step" if first or row in {"trainer killed", "node lost"} else "training goes on", "verified"),
        label="chaos",
        fault=(*first, blow),
        topology=Topology(coordinator=retained),
        workload=Workload(steps=48, step_s=0.4),
    )


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as stage:
        yield stage


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("row", LIVE_ROWS)
def test_a_cell_holds_on_real_processes(
    row: Row,
    phase: Phase,
    stage: Stage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    """The process is held in the phase until the blow has come, so that this lies between its entry and its exit."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    scenario = scenario_of(row, phase)
    permit = Permit(flag=True, environment="chaos", label="chaos")
    order = Order(
        loaded=Loaded(scenario=scenario, directory=tmp_path), seed=1, permit=permit, directory=tmp_path / "run"
    )
    with Progress(Console(stderr=True)) as progress:
        verdict = run(order, stage, progress)

    broken = [(one.name, one.evidence) for one in verdict.promises if one.outcome == "broken"]
    assert verdict.good, f"{verdict.stopped}\n{broken}\n{verdict.injections}"
    record_property(f"{row}, {phase}", verdict.injections[-1].witness)
