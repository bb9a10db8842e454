"""A coordinator that stands by takes the place of one that is killed or frozen; nobody who trains notices."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from tests.support.job_in_training import (
    EVERY,
    Job,
    assert_as_if_nothing_had_happened,
    assert_the_last_is_ready,
    assert_trained_through,
    job_in_training,
)
from tests.support.training import Reference

from toprope.chaos.live.ask import get
from toprope.chaos.live.forking import ForkedServices, ForkServer
from toprope.chaos.live.processes import wait_until
from toprope.store.log.chain import read_log
from toprope.store.objects.opening import open_store

STEPS = 300
TAKEOVER_S = 15.0
FROZEN_S = 90.0
pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(300)]


def role(url: str) -> str:
    """Return the role of the coordinator at a url, empty while it does not answer."""
    return str(json.loads(get(url, "/healthz") or b"{}").get("role", ""))


def assert_taken_over(job: Job) -> None:
    """The one that stood by leads in time, and what is saved after that becomes READY."""
    cluster = job.cluster
    wait_until(lambda: role(cluster.standby_url) == "leader", what="it leads", timeout_s=TAKEOVER_S)
    at = job.newest_step()
    wait_until(lambda: ready_after(job, at), what="a later step is READY", timeout_s=30)


def ready_after(job: Job, step: int) -> bool:
    desired = job.cluster.desired()
    return desired is not None and desired.ready_step > step


def test_a_killed_leader_is_replaced_in_time_without_a_broker(
    tmp_path: Path, fork_server: ForkServer, services: ForkedServices, reference: Reference
) -> None:
    with job_in_training(tmp_path, fork_server, services, steps=STEPS, delay_s=0.1, standby=True) as job:
        job.train_to(3 * EVERY)
        assert job.cluster.broker is not None
        assert job.cluster.coordinator is not None
        job.cluster.broker.kill()
        assert job.cluster.coordinator.kill().status == -9
        assert_taken_over(job)
        job.cluster.start_coordinator()
        assert role(job.cluster.coordinator_url) == "follower"
        job.finish()

        assert_as_if_nothing_had_happened(job, reference)
        assert_trained_through(job)


def test_a_leader_that_was_frozen_for_long_wakes_fenced_and_does_no_harm(
    tmp_path: Path, fork_server: ForkServer, services: ForkedServices, reference: Reference
) -> None:
    with job_in_training(tmp_path, fork_server, services, steps=STEPS, delay_s=0.1, standby=True) as job:
        job.train_to(3 * EVERY)
        frozen = job.cluster.coordinator
        assert frozen is not None
        os.kill(frozen.pid, signal.SIGSTOP)
        frozen_s = time.monotonic()
        try:
            assert_taken_over(job)
            job.ranks.kill(1)
            job.ranks.stop()
            job.ranks.start()
            job.finish()
            assert_the_last_is_ready(job)
            time.sleep(max(0.0, FROZEN_S - (time.monotonic() - frozen_s)))
        finally:
            os.kill(frozen.pid, signal.SIGCONT)
        wait_until(lambda: role(job.cluster.coordinator_url) == "follower", what="it stands by", timeout_s=TAKEOVER_S)
        assert role(job.cluster.standby_url) == "leader"

        assert_as_if_nothing_had_happened(job, reference)
        assert_the_last_is_ready(job)
    state = read_log(open_store(str(job.cluster.store)), job.cluster.job)
    assert (state.term, state.attempt_number) == (2, 2)
