"""Five minutes of training in which something is killed every 15 seconds."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.blows import KINDS, Trouble
from tests.support.job_in_training import (
    Job,
    assert_as_if_nothing_had_happened,
    assert_the_last_is_ready,
    job_in_training,
)
from tests.support.training import Reference

from toprope.chaos.live.forking import ForkedServices, ForkServer
from toprope.chaos.live.processes import LiveError, wait_until

STEPS = 2700
STEP_S = 0.1
BETWEEN_S = 15.0
SEED = 301


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_training_under_constant_blows_ends_as_if_nothing_had_happened(
    tmp_path: Path,
    fork_server: ForkServer,
    services: ForkedServices,
    reference: Reference,
    record_property: Callable[[str, object], None],
) -> None:
    chance = random.Random(SEED)
    struck: Counter[str] = Counter()
    began_s = time.monotonic()
    with job_in_training(tmp_path, fork_server, services, steps=STEPS, delay_s=STEP_S) as job:
        job.train_to(20)
        next_s = time.monotonic()
        while job.newest_step() < STEPS - 100:
            trouble = Trouble(job, chance)
            kind = chance.choice(KINDS)
            trouble.strike(kind)
            struck[kind] += 1
            again = "world" in trouble.dead
            trouble.heal(within_s=3.0)
            healed_step = job.newest_step()
            assert_protection_comes_back(job, above=healed_step, what=f"blow {struck.total()}, {kind}")
            if again:
                trouble.assert_little_lost()
            next_s = max(next_s + BETWEEN_S, time.monotonic())
            job.ranks.until(lambda: time.monotonic() >= next_s or job.newest_step() > STEPS - 100, what="the next blow")  # noqa: B023 - called at once
        job.ranks.finish(timeout_s=120)
        job.journal.read()
        took_s = time.monotonic() - began_s

        record_property("killed", ", ".join(f"{kind} {count}" for kind, count in sorted(struck.items())))
        record_property("seconds of training", round(took_s))
        assert struck.total() >= 15
        assert_as_if_nothing_had_happened(job, reference)
        assert_the_last_is_ready(job)


def assert_protection_comes_back(job: Job, *, above: int, what: str) -> None:
    """After a blow a later step is protected again before the next blow falls."""

    def is_back() -> bool:
        desired = job.cluster.desired()
        return desired is not None and desired.protected_step > above

    try:
        wait_until(is_back, what="a later step is protected", timeout_s=60)
    except LiveError as error:
        statuses = job.ranks.statuses()
        raise AssertionError(f"after {what} (step {above}), ranks {statuses}\n{job.cluster.describe()}") from error
