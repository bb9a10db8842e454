"""Each thing that can die is killed in the middle of training; the final state is as if nothing had happened."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.support.job_in_training import (
    EVERY,
    WORLD,
    assert_as_if_nothing_had_happened,
    assert_no_more_lost_than_allowed,
    assert_trained_through,
    job_in_training,
)
from tests.support.training import Reference

from toprope.chaos.live.forking import ForkedServices, ForkServer

STEPS = 40
SEEDS = (1, 2, 3)


def kill_step(seed: int) -> int:
    return random.Random(seed).randint(STEPS // 4, STEPS // 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_killed_rank_goes_on_from_its_nodes_memory(
    seed: int, tmp_path: Path, fork_server: ForkServer, services: ForkedServices, reference: Reference
) -> None:
    with job_in_training(tmp_path, fork_server, services, steps=STEPS) as job:
        job.train_to(kill_step(seed))
        blow = job.before_a_blow()
        assert job.ranks.kill(seed % WORLD) == -9
        job.ranks.stop()
        blow.newest_step = job.newest_step()
        job.ranks.start()
        job.finish()

        assert_as_if_nothing_had_happened(job, reference)
        assert_no_more_lost_than_allowed(job, blow)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_killed_node_goes_on_from_its_peers_memory(
    seed: int, tmp_path: Path, fork_server: ForkServer, services: ForkedServices, reference: Reference
) -> None:
    with job_in_training(tmp_path, fork_server, services, steps=STEPS, delay_s=0.1) as job:
        job.train_to(kill_step(seed))
        blow = job.before_a_blow()
        assert job.ranks.kill(1) == -9
        killed = job.cluster.kill_node("b")
        assert [one.status for one in killed] == [-9]
        job.ranks.stop()
        blow.newest_step = job.newest_step()
        job.cluster.start_sidecar("b")
        job.ranks.start()
        job.finish()

        assert_as_if_nothing_had_happened(job, reference)
        assert_no_more_lost_than_allowed(job, blow)
        begins = [event for event in job.journal.events if event.event == "begin" and event.step > 0]
        sources = {
            (event.rank, shard["rank"], shard["tier"], shard["node"]) for event in begins for shard in event.restored
        }
        assert (1, 1, "peer", "a") in sources


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_killed_sidecar_never_stops_training(
    seed: int, tmp_path: Path, fork_server: ForkServer, services: ForkedServices, reference: Reference
) -> None:
    with job_in_training(tmp_path, fork_server, services, steps=STEPS, delay_s=0.1) as job:
        job.train_to(kill_step(seed))
        name = "ab"[seed % 2]
        sidecar = job.cluster.nodes[name].sidecar
        assert sidecar is not None
        assert sidecar.kill().status == -9
        job.train_to(kill_step(seed) + 2 * EVERY)
        job.cluster.start_sidecar(name)
        job.finish()

        assert_as_if_nothing_had_happened(job, reference)
        assert_trained_through(job)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_killed_coordinator_never_stops_training(
    seed: int, tmp_path: Path, fork_server: ForkServer, services: ForkedServices, reference: Reference
) -> None:
    with job_in_training(tmp_path, fork_server, services, steps=STEPS, delay_s=0.1) as job:
        job.train_to(kill_step(seed))
        assert job.cluster.coordinator is not None
        assert job.cluster.coordinator.kill().status == -9
        job.train_to(kill_step(seed) + 2 * EVERY)
        job.cluster.start_coordinator()
        job.finish()

        assert_as_if_nothing_had_happened(job, reference)
        assert_trained_through(job)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_killed_broker_never_stops_training(
    seed: int, tmp_path: Path, fork_server: ForkServer, services: ForkedServices, reference: Reference
) -> None:
    with job_in_training(tmp_path, fork_server, services, steps=STEPS, delay_s=0.1) as job:
        job.train_to(kill_step(seed))
        assert job.cluster.broker is not None
        assert job.cluster.broker.kill().status == -9
        job.train_to(kill_step(seed) + 2 * EVERY)
        job.cluster.start_broker()
        job.finish()

        assert_as_if_nothing_had_happened(job, reference)
        assert_trained_through(job)
