"""The demo itself, a little shorter: torchrun, two nodes, one killed."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from tests.support.training import Reference

from toprope.chaos import demo
from toprope.chaos.journal import Final
from toprope.chaos.progress import Progress


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_torchrun_job_that_loses_a_node_ends_bit_identical(tmp_path: Path, reference: Reference) -> None:
    plan = demo.Plan(steps=24, seed=2, size="tiny")

    def uninterrupted(*_: object) -> tuple[Final, ...]:  # from warm processes: torchrun's take long to start
        return reference(world=demo.WORLD, arguments=demo.trained(plan))

    report = demo.run(plan, tmp_path, Progress(Console(file=io.StringIO())), reference=uninterrupted)

    assert report.bit_identical == "yes", report.differences
    assert report.broken == ()
    assert {process.status for process in report.killed} == {-9}
    assert len(report.killed) >= 4  # agent, two ranks, sidecar
    assert report.boot_id_old != report.boot_id_new
    assert {source.tier for source in report.sources if source.node == source.lived_on == report.node} == {"peer"}
    kinds = {(row.rank, row.kind) for row in report.digests if len(row.run) == 64 and row.run == row.reference}
    assert kinds >= {(rank, kind) for rank in range(demo.WORLD) for kind in ("weights", "optimizer", "rng")}
