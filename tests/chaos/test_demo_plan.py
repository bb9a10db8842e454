"""The demo's plan: where it kills."""

from __future__ import annotations

import pytest

from toprope.chaos.demo import Plan


@pytest.mark.parametrize("steps", [12, 24, 60, 200])
def test_the_kill_is_in_the_middle_and_comes_after_a_step_that_only_memory_has(steps: int) -> None:
    for seed in range(50):
        plan = Plan(steps=steps, seed=seed)
        assert steps // 3 <= plan.kill_step <= 2 * steps // 3
        newest_due = plan.kill_step - plan.kill_step % plan.every
        assert newest_due % (2 * plan.every) != 0
        assert newest_due > 0


def test_the_seed_decides_where() -> None:
    assert Plan(steps=60, seed=7).kill_step == Plan(steps=60, seed=7).kill_step
    assert len({Plan(steps=60, seed=seed).kill_step for seed in range(20)}) > 3
