"""Each thing that can die is killed in the middle of training; the final state is as if nothing had happened."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.training import Reference

from toprope.chaos.journal import JournalReader, read_finals
from toprope.chaos.live.cluster import Cadences, Cluster, running_cluster
from toprope.chaos.live.forking import ForkedServices, ForkServer
from toprope.chaos.live.processes import LiveError, wait_until
from toprope.chaos.live.ranks import World
from toprope.chaos.oracle import compare, steps_lost_allowed, torn_restores

EVERY = 4
STEPS = 40
WORLD = 2
ARGUMENTS = ("--job", "kills", "--size", "tiny", "--steps", str(STEPS))
SEEDS = (1, 2, 3)


def kill_step(seed: int) -> int:
    return random.Random(seed).randint(STEPS // 4, STEPS // 2)


@dataclass(slots=True)
class Blow:
    """What was protected just before a kill, and the newest step that any rank had ended when all were dead."""

    protected_step: int
    newest_step: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """A job in training on two nodes, a rank on each."""

    cluster: Cluster
    ranks: World
    journal: JournalReader

    def train_to(self, step: int) -> None:
        self.ranks.until(lambda: self.newest_step() >= step, what=f"step {step}")

    def finish(self) -> None:
        self.ranks.finish()
        self.journal.read()

    def restored(self) -> set[int]:
        """The steps that ranks have gone on from, 0 left out."""
        return {event.step for event in self.journal.events if event.event == "begin"} - {0}

    def before_a_blow(self) -> Blow:
        """Note what the coordinator says to be safe."""
        desired = self.cluster.desired()
        assert desired is not None
        return Blow(protected_step=desired.protected_step)

    def newest_step(self) -> int:
        """The newest step that a rank has ended."""
        self.journal.read()
        return self.journal.newest_step()


@contextmanager
def job_in_training(
    directory: Path, server: ForkServer, services: ForkedServices, *, delay_s: float = 0.0
) -> Iterator[Job]:
    cadences = Cadences(every=EVERY, local_every=EVERY, object_every=2 * EVERY)
    with running_cluster(directory, job="kills", cadences=cadences, launch=services) as cluster:
        arguments = (*ARGUMENTS, "--step-delay", str(delay_s))
        ranks = World(
            server=server,
            directory=directory / "ranks",
            arguments=arguments,
            world=WORLD,
            cluster=cluster,
            placement=lambda rank: "ab"[rank],
        )
        ranks.start()
        try:
            yield Job(cluster, ranks, JournalReader(ranks.out))
        finally:
            ranks.stop()


def assert_as_if_nothing_had_happened(job: Job, reference: Reference) -> None:
    judgement = compare(read_finals(job.ranks.out), reference(world=WORLD, arguments=ARGUMENTS), world=WORLD)
    assert judgement.differences == ()
    assert judgement.identical
    assert torn_restores(job.journal.events) == ()


def assert_no_more_lost_than_allowed(job: Job, blow: Blow) -> None:
    """One interval if the newest due step was protected at the kill, else two."""
    (restored,) = job.restored()
    newest_due = blow.newest_step - blow.newest_step % EVERY
    allowed = steps_lost_allowed(newest_due_protected=blow.protected_step >= newest_due, every=EVERY)
    assert 0 <= blow.newest_step - restored <= allowed, f"{blow}, restored step {restored}"


def assert_trained_through(job: Job) -> None:
    """No rank was started twice, and what was saved after the kill became READY."""
    assert job.ranks.starts == 1
    assert {event.pid for event in job.journal.events} == set(job.ranks.pids.values())
    last_object_step = STEPS - STEPS % (2 * EVERY)
    try:
        wait_until(lambda: ready_step(job.cluster) == last_object_step, what="the last one is READY", timeout_s=20)
    except LiveError as error:
        raise AssertionError(f"step {last_object_step} is not READY\n{job.cluster.describe()}") from error


def ready_step(cluster: Cluster) -> int:
    desired = cluster.desired()
    return 0 if desired is None else desired.ready_step


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_killed_rank_goes_on_from_its_nodes_memory(
    seed: int, tmp_path: Path, fork_server: ForkServer, services: ForkedServices, reference: Reference
) -> None:
    with job_in_training(tmp_path, fork_server, services) as job:
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
    with job_in_training(tmp_path, fork_server, services, delay_s=0.1) as job:
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
    with job_in_training(tmp_path, fork_server, services, delay_s=0.1) as job:
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
    with job_in_training(tmp_path, fork_server, services, delay_s=0.1) as job:
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
    with job_in_training(tmp_path, fork_server, services, delay_s=0.1) as job:
        job.train_to(kill_step(seed))
        assert job.cluster.broker is not None
        assert job.cluster.broker.kill().status == -9
        job.train_to(kill_step(seed) + 2 * EVERY)
        job.cluster.start_broker()
        job.finish()

        assert_as_if_nothing_had_happened(job, reference)
        assert_trained_through(job)
