"""A live cell for each row of the fault matrix that no other quick test shows: five faults in one training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from toprope.chaos.permit import Permit
from toprope.chaos.progress import Progress
from toprope.chaos.running import Order, run
from toprope.chaos.scenario import Fault, Loaded, Scenario, Workload
from toprope.chaos.stage import Stage

STORE_ERRORS = Fault(
    do="fail",
    target="sidecar b",
    at_step=5,
    for_s=3.0,
    how={"point": "before:objects.create", "action": "unavailable", "times": 2},
)
SLOW = Fault(
    do="fail",
    target="sidecar a",
    at_step=5,
    for_s=3.0,
    how={"point": "before:peers.receive", "action": "delay", "seconds": 1.0, "times": 1},
)
NODE_LOST = Fault(do="kill", target="node b", during="peer replication", of="sidecar a", at_step=24, for_s=0.2)
PARTITION = Fault(do="kill", target="broker", during="hashing", of="sidecar b", at_step=36, for_s=1.0)
TWO_COORDINATORS = Fault(
    do="split", target="coordinator", during="manifest commit", of="coordinator", at_step=48, for_s=5.0
)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_cells_of_five_rows_hold_in_one_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """Each is seen to happen while the process is in the phase, or is what the phase's own call meets with."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    scenario = Scenario(
        name="cells",
        about="store errors in an upload, a slow peer, a lost node, the broker down, two coordinators",
        attacks=("bit-identical", "no torn step", "verified", "READY once", "READY again", "little lost"),
        label="chaos",
        fault=(STORE_ERRORS, SLOW, NODE_LOST, PARTITION, TWO_COORDINATORS),
        workload=Workload(steps=104, step_s=0.15),
    )
    permit = Permit(flag=True, environment="chaos", label="chaos")
    loaded = Loaded(scenario=scenario, directory=tmp_path)
    order = Order(loaded=loaded, seed=1, permit=permit, directory=tmp_path / "run")
    with Stage() as stage, Progress(Console(stderr=True)) as progress:
        verdict = run(order, stage, progress)

    for one in verdict.injections:
        record_property(f"{one.fault} {one.target}", one.witness)
    broken = [(one.name, one.evidence) for one in verdict.promises if one.outcome == "broken"]
    assert verdict.good, f"{verdict.stopped}\n{broken}\n{verdict.injections}"
