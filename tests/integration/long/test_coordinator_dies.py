"""The coordinator dies before, in and after a commit and in its own recovery, and comes back after five seconds."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.support.job_in_training import (
    Job,
    assert_as_if_nothing_had_happened,
    job_in_training,
    ready_step,
)
from tests.support.training import Reference

from toprope.chaos.killpoints import FILE_VARIABLE, LOG_VARIABLE, arm, disarm
from toprope.chaos.live.cluster import Cadences
from toprope.chaos.live.forking import ForkedServices, ForkServer
from toprope.chaos.live.processes import LiveError, wait_until
from toprope.store.log.chain import read_log
from toprope.store.objects.opening import open_store

STEPS = 600
INTERVAL = 20
AWAY_S = 5.0
pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.fault("B111")
def test_a_coordinator_that_dies_wherever_it_is_costs_at_most_the_step_in_flight(
    tmp_path: Path, fork_server: ForkServer, services: ForkedServices, reference: Reference
) -> None:
    cadences = Cadences(every=5, local_every=10, object_every=INTERVAL)
    kill_file = tmp_path / "coordinator.kill"
    env = {FILE_VARIABLE: str(kill_file), LOG_VARIABLE: str(tmp_path / "coordinator.points")}
    with job_in_training(tmp_path, fork_server, services, steps=STEPS, delay_s=0.2, cadences=cadences) as job:
        assert job.cluster.coordinator is not None
        job.cluster.coordinator.kill()
        job.cluster.start_coordinator(env=env)
        for point in ("before:store.read_indexes", "before:store.create_manifest", "after:store.create_manifest"):
            arm(kill_file, point)
            wait_for_its_death(job)
            assert_training_goes_on(job)
            disarm(kill_file)
            job.cluster.start_coordinator(env=env)
            assert_rebuilt(job)

        job.cluster.coordinator.kill()
        for point in ("after:store.newest_snap", "before:store.create_record", "after:store.create_record"):
            arm(kill_file, point)  # while it recovers
            with pytest.raises(LiveError, match="ended with status -9"):
                job.cluster.start_coordinator(env=env)
            assert_training_goes_on(job)
        disarm(kill_file)
        job.cluster.start_coordinator(env=env)
        assert_rebuilt(job)

        job.ranks.finish(timeout_s=300)
        assert_as_if_nothing_had_happened(job, reference)
        assert job.ranks.starts == 1
    state = read_log(open_store(str(job.cluster.store)), job.cluster.job)
    steps = [ready.step for ready in state.readies.values()]
    assert steps == sorted(set(steps)), "each step at most once, in order"
    assert state.attempt_number == 1


def wait_for_its_death(job: Job) -> None:
    victim = job.cluster.coordinator
    assert victim is not None
    wait_until(lambda: victim.status() is not None, what="it dies there", timeout_s=60)
    assert victim.status() == -9


def assert_training_goes_on(job: Job) -> None:
    before = job.newest_step()
    time.sleep(AWAY_S)
    assert job.newest_step() > before


def assert_rebuilt(job: Job) -> None:
    """Nodes and holders are known again, and the next step that is due becomes READY before the one after it is due."""
    at = job.newest_step()
    due = at - at % INTERVAL + INTERVAL
    wait_until(lambda: ready_step(job.cluster) >= due, what=f"step {due} is READY", timeout_s=60)
    assert job.newest_step() < due + INTERVAL
    desired = job.cluster.desired()
    assert desired is not None
    assert {(place.owner, place.holder) for place in desired.placement} == {("a", "b"), ("b", "a")}
