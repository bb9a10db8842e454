"""A store that accepts and says nothing, and a disk that sleeps: no step takes longer, memory does not grow."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import pytest
from tests.support.job_in_training import Job, assert_as_if_nothing_had_happened, assert_trained_through, ready_step
from tests.support.outages import job_with_a_bucket
from tests.support.training import Reference

from toprope.chaos.journal import intervals_s
from toprope.chaos.killpoints import FILE_VARIABLE, Armed, arm_all, disarm
from toprope.chaos.live.forking import ForkedServices, ForkServer
from toprope.sidecar.memory import used_bytes

STEPS, STEP_S, STALL_S, NAP_S = 4000, 0.05, 120.0, 30.0
CATCH_UP_S = 150.0
"""A request that began just before the store speaks again waits for its whole 60 s, and then is made anew."""
pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_store_that_hangs_and_a_disk_that_sleeps_cost_training_nothing_and_memory_nothing(
    tmp_path: Path, fork_server: ForkServer, services: ForkedServices, reference: Reference
) -> None:
    armed = tmp_path / "armed"
    with job_with_a_bucket(
        tmp_path, fork_server, services, steps=STEPS, delay_s=STEP_S, env={FILE_VARIABLE: str(armed)}
    ) as (job, way):
        job.ranks.until(lambda: ready_step(job.cluster) > 0, what="a step is READY")
        memory = 1.01 * bytes_in_memory(job)  # an image is a few bytes longer when its numbers are
        way.tell("half-open")
        arm_all(armed, [Armed(point="before:disk.write", action="delay", seconds=NAP_S, times=0)])
        began_s, first = time.monotonic(), job.newest_step() + 1
        job.train_to(first + 200)
        while time.monotonic() < began_s + STALL_S:
            assert bytes_in_memory(job) <= memory, "what waits for a tier is bounded"
            job.train_to(job.newest_step() + 20)
        stale, last = ready_step(job.cluster), job.newest_step()
        way.tell("pass")
        disarm(armed)
        job.ranks.until(lambda: ready_step(job.cluster) > stale, what="it catches up", timeout_s=CATCH_UP_S)
        job.ranks.finish(timeout_s=300.0)
        job.journal.read()
        assert_own_time(job, first, last)
        assert_trained_through(job)
        assert_as_if_nothing_had_happened(job, reference)


def bytes_in_memory(job: Job) -> int:
    return sum(used_bytes(node.memory_dir) for node in job.cluster.nodes.values())


def assert_own_time(job: Job, first: int, last: int) -> None:
    """Steps took no longer, by more than a tenth, than those of the same run when both tiers were well again."""
    events = job.journal.events
    stalled = intervals_s([event for event in events if first <= event.step <= last])
    assert len(stalled) >= 2 * 200
    assert median(stalled) <= 1.1 * median(intervals_s([event for event in events if event.step > last]))
