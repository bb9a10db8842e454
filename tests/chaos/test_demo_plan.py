"""The demo's plan: where it kills."""

from __future__ import annotations

import pytest

from toprope.chaos.demo import Plan, first_words


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


def test_an_error_that_a_rank_noticed_fits_in_one_line_and_says_what_happened() -> None:
    said = "RuntimeError: \n[/__w/pytorch/pair.cc:553] Connection closed by peer [127.0.0.1]:4711. " + "x" * 90
    assert first_words(said).startswith("RuntimeError: Connection closed by peer [127.0.0.1]")
    assert len(first_words(said)) <= 54
