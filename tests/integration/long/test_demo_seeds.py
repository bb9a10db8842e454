"""The demo as ``make demo`` runs it, under torchrun, at other seeds: other weights, other data, another kill."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from toprope.chaos import demo
from toprope.chaos.progress import Progress


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [11, 12, 13])
def test_the_demo_ends_bit_identical_at_other_seeds(
    seed: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    plan = demo.Plan(steps=60, seed=seed)

    report = demo.run(plan, tmp_path, Progress(Console(file=io.StringIO())))

    record_property(f"seed {seed}", f"killed at step {plan.kill_step}")
    assert report.bit_identical == "yes", report.differences
    assert report.broken == ()
    assert {process.status for process in report.killed} == {-9}
