"""Ranks that start apart, know no rank of theirs, or belong to another run: one attempt at a time, and it is named."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
from tests.support.job_in_training import JOB, Job, arguments, ready_step
from tests.support.training import Reference

from toprope.__main__ import main as ckpt
from toprope.chaos.journal import JournalReader, read_finals
from toprope.chaos.live.cluster import Cadences, Cluster, Node, running_cluster
from toprope.chaos.live.forking import Forked, ForkedServices, ForkServer
from toprope.chaos.live.processes import LiveError, free_port, wait_until
from toprope.chaos.live.ranks import World
from toprope.chaos.oracle import compare
from toprope.coordinator.wire import MAX_INVENTORY_BYTES, Member, OpenAnswer, OpenRequest, decode, encode
from toprope.store.checkpoint.ready import read_index, read_manifest
from toprope.store.errors import UsageError
from toprope.store.log.chain import read_log
from toprope.store.objects.opening import open_store

EVERY = Cadences(every=4, local_every=4, object_every=4)
STAGGER_S = 0.4
pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(300)]


@contextmanager
def trained(cluster: Cluster, server: ForkServer, *, steps: int, world: int, delay_s: float = 0.0) -> Iterator[Job]:
    """Yield a world of ranks on nodes a and b, by turns; it isn't started yet."""
    ranks = World(
        server=server,
        directory=cluster.directory / "ranks",
        arguments=("--job", cluster.job, *arguments(steps=steps)[2:], "--step-delay", str(delay_s)),
        world=world,
        cluster=cluster,
        placement=lambda rank: "ab"[rank % 2],
    )
    try:
        yield Job(cluster, ranks, JournalReader(ranks.out), steps)
    finally:
        ranks.stop()


@pytest.fixture
def job(tmp_path: Path, fork_server: ForkServer, services: ForkedServices) -> Iterator[Job]:
    """Return four ranks on two nodes, that are not started yet."""
    with (
        running_cluster(tmp_path, job=JOB, cadences=EVERY, launch=services) as cluster,
        trained(cluster, fork_server, steps=80, world=4, delay_s=0.05) as made,
    ):
        yield made


def alone(server: ForkServer, cluster: Cluster, name: str, *, node: str, **env: str) -> Forked:
    """Start a trainer that is told nothing of its rank but what ``env`` says; it writes beside the others."""
    words = [*arguments(steps=400), "--step-delay", "0.05", "--timeout", "5", "--out", str(cluster.directory / name)]
    where = {"CKPT_SOCKET": str(cluster.nodes[node].socket), "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    return Forked(name, server, "train:main", words, log=cluster.log(name), env={**where, **env})


def says(process: Forked, text: str) -> bool:
    return process.log.exists() and text in process.log.read_text()


def begun(out: Path) -> set[int]:
    """Return the steps that ranks have begun from."""
    journal = JournalReader(out)
    journal.read()
    return {event.step for event in journal.events if event.event == "begin"}


def assert_of_one_launch(cluster: Cluster, *, world: int) -> None:
    """All shards lie under one prefix and have the ids that the coordinator gave, which the log has as well."""
    store = open_store(cluster.root)
    state = read_log(store, cluster.job)
    assert state.attempt is not None
    assert state.attempt_number == 1
    shards = tuple(store.list(f"{cluster.job}/shards/"))
    assert {key.split("/")[2] for key in shards} == {"a1"}
    for seq in state.readies:
        manifest, _ = read_manifest(store, state, seq)
        indexes = [read_index(store, manifest, shard) for shard in manifest.shards]
        assert [index.rank for index in indexes] == list(range(world))
        assert {(index.job_uid, index.attempt_uid) for index in indexes} == {(state.job_uid, state.attempt.uid)}
    assert ckpt(["verify", cluster.root, "--job", cluster.job]) == 0


@pytest.mark.fault("B66")
def test_ranks_that_start_apart_store_under_one_attempt_and_one_of_another_launch_is_kept_out(
    job: Job, tmp_path: Path, fork_server: ForkServer, reference: Reference
) -> None:
    cluster = job.cluster

    def later(rank: int) -> dict[str, str]:
        time.sleep(STAGGER_S * (rank > 0))  # each starts so much after the one before it
        return {}

    job.ranks.env = later
    job.ranks.start()
    job.train_to(8)
    stranger = alone(fork_server, cluster, "stranger", node="b", RANK="0", WORLD_SIZE="1")
    wait_until(lambda: says(stranger, "busy: "), what="it is refused", timeout_s=60)
    assert says(stranger, "rank 0 on node a")
    finish(job)
    assert stranger.status() is None, "it goes on asking, and is in no attempt"
    stranger.kill()
    wait_until(lambda: ready_step(cluster) == 80, what="the last step is READY", timeout_s=60)
    assert begun(tmp_path / "stranger") == set()
    judged(job, reference, world=4)
    assert_of_one_launch(cluster, world=4)


@pytest.mark.fault("B67")
def test_ranks_that_are_not_told_which_they_are_end_with_the_reason_and_save_nothing(
    tmp_path: Path, fork_server: ForkServer, services: ForkedServices
) -> None:
    with running_cluster(tmp_path, job=JOB, cadences=EVERY, launch=services) as cluster:
        env = {"WORLD_SIZE": "2", "MASTER_PORT": str(free_port())}
        unset = {node: alone(fork_server, cluster, f"unset-{node}", node=node, **env) for node in "ab"}
        for node, process in unset.items():
            assert status_of(process) != 0
            assert says(process, "environment variable RANK expected, but not set")
            assert begun(tmp_path / f"unset-{node}") == set()
        assert read_log(open_store(cluster.root), JOB).attempt_number == 0
        assert list(open_store(cluster.root).list(f"{JOB}/shards/")) == []


@pytest.mark.fault("B67")
def test_ranks_that_take_the_place_of_others_are_kept_out_and_never_save_beside_them(
    job: Job, tmp_path: Path, fork_server: ForkServer, reference: Reference
) -> None:
    cluster = job.cluster
    for ranks in ([0, 1, 1, 2], [0, 1, 2, 3, 3], [0, 2, 3]):
        answer = asked_for(cluster, ranks)
        assert (answer.attempt, answer.code) == (None, "refused")
        assert f"the world has ranks {ranks}; expected each of 0, 1, 2 and so on once" in answer.text
    port = str(free_port())
    job.ranks.env = lambda _: {"MASTER_PORT": port}
    job.ranks.start()
    job.train_to(8)
    lone = [alone(fork_server, cluster, f"lone-{node}", node=node) for node in "ab"]  # each takes itself for rank 0
    fifth = {"RANK": "4", "WORLD_SIZE": "4", "MASTER_PORT": port}
    assert status_of(alone(fork_server, cluster, "fifth", node="a", **fifth)) != 0
    for process in lone:
        wait_until(partial(says, process, "busy: "), what="it is refused", timeout_s=60)
    finish(job)
    for process in lone:
        assert process.status() is None, "it goes on asking"
        process.kill()
    assert job.restored() == set()
    judged(job, reference, world=4)
    assert_each_step_once(cluster, steps=80)
    assert all(begun(tmp_path / name) == set() for name in ("lone-a", "lone-b", "fifth"))


@pytest.mark.fault("B67")
def test_after_a_restart_all_ranks_restore_or_none_does(job: Job, reference: Reference) -> None:
    cluster = job.cluster
    job.ranks.start()
    job.train_to(12)
    job.ranks.stop()
    newest, begins = job.newest_step(), count_of_begins(job)

    usual = job.ranks.arguments
    job.ranks.world, job.ranks.env = 3, lambda _: {"WORLD_SIZE": "4"}  # the fourth does not come
    job.ranks.arguments = (*usual, "--timeout", "5")
    job.ranks.pids.clear()
    job.ranks.start()
    wait_until(lambda: len(job.ranks.statuses()) == 3, what="the others give up", timeout_s=60)
    assert 0 not in job.ranks.statuses().values()
    assert count_of_begins(job) == begins, "none restored"

    job.ranks.world, job.ranks.env, job.ranks.arguments = 4, lambda _: {}, usual
    job.ranks.start()
    finish(job)
    (restored,) = job.restored()
    assert 0 < restored <= newest
    assert count_of_begins(job) == begins + 4
    judged(job, reference, world=4)
    assert_each_step_once(cluster, steps=80)


def finish(job: Job) -> None:
    """Let the ranks train to the end, and read what they have noted."""
    job.ranks.finish(timeout_s=200)
    job.journal.read()


def status_of(process: Forked) -> int:
    """Return how a process has ended."""
    wait_until(lambda: process.status() is not None, what=f"{process.name} ends", timeout_s=60)
    status = process.status()
    assert status is not None
    return status


def count_of_begins(job: Job) -> int:
    """Return how often a rank has gone through a restore and begun to train."""
    job.journal.read()
    return sum(event.event == "begin" for event in job.journal.events)


def assert_each_step_once(cluster: Cluster, *, steps: int) -> None:
    """The log has each step that was due once, in order."""
    wait_until(lambda: ready_step(cluster) == steps, what="the last step is READY", timeout_s=60)
    found = [ready.step for ready in read_log(open_store(cluster.root), JOB).readies.values()]
    assert found == sorted(set(found))


def asked_for(cluster: Cluster, ranks: list[int]) -> OpenAnswer:
    """Ask the coordinator for an attempt of these ranks, as a sidecar does."""
    boot_id = cluster.nodes["a"].boot_id
    world = tuple(Member(rank=rank, node="a", boot_id=boot_id) for rank in ranks)
    request = OpenRequest(job=cluster.job, launch_id="2b" * 16, round=0, world=world, spec={}, versions={})
    where = urllib.request.Request(f"{cluster.coordinator_url}/v1/attempts", data=encode(request), method="POST")
    with urllib.request.urlopen(where, timeout=60) as answer:
        return decode(answer.read(), OpenAnswer, limit=MAX_INVENTORY_BYTES)


@pytest.mark.fault("B69")
@pytest.mark.parametrize("other", [JOB, "another"])
def test_two_runs_with_one_disk_and_one_store_never_go_on_from_each_other(
    tmp_path: Path, fork_server: ForkServer, services: ForkedServices, reference: Reference, other: str
) -> None:
    """Of two names each goes on from its own.

    Of one name the second is kept off the disks and told by whom, and where the first is dead both numbers of ranks.
    """
    same = other == JOB
    with ExitStack() as stack:
        first = stack.enter_context(running_cluster(tmp_path / "a", job=JOB, cadences=EVERY, launch=services))
        second = Cluster(directory=tmp_path / "b", job=other, cadences=EVERY, launch=services, root=first.root)
        stack.enter_context(second)
        for name, node in first.nodes.items():
            mine = second.memory / name
            second.nodes[name] = Node(name=name, memory_dir=mine, local_dir=node.local_dir)
        a = stack.enter_context(trained(first, fork_server, steps=240, world=4, delay_s=0.05))
        b = stack.enter_context(trained(second, fork_server, steps=120, world=2, delay_s=0.05))
        a.ranks.start()
        a.train_to(8)
        if same:
            assert_kept_out(second)
        else:
            bring_back(second)
            b.ranks.start()
            b.train_to(12)
        a.train_to(24)
        for job in (b, a):
            kill_all(job)
        blows = [a.newest_step(), b.newest_step()]
        if same:
            assert_told_of_the_other_number_of_ranks(b)
        bring_back(first)
        a.ranks.start()
        a.train_to(blows[0] + 1)
        if same:
            assert_kept_out(second)
        else:
            bring_back(second)
            b.ranks.start()
            finish(b)
            (restored,) = b.restored()
            assert 0 < restored <= blows[1]
            judged(b, reference, world=2)
        finish(a)
        (restored,) = a.restored()
        assert 0 < restored <= blows[0]
        judged(a, reference, world=4)
    assert ckpt(["verify", first.root, "--job", JOB]) == 0


def assert_kept_out(cluster: Cluster) -> None:
    """Each sidecar ends and names who is there already, so no rank can begin; the coordinator leads nothing."""
    log = cluster.log("coordinator")
    known = len(log.read_text()) if log.exists() else 0
    cluster.start_broker()
    cluster.start_coordinator()
    for name, node in cluster.nodes.items():
        held = f"another sidecar of job {JOB} serves {node.local_dir / JOB}: stop it first"
        with pytest.raises(LiveError, match=re.escape(held)):
            cluster.start_sidecar(name)
        assert node.sidecar is not None
        assert node.sidecar.status() == UsageError.exit_status
        node.sidecar = None
    assert "elected" not in log.read_text()[known:]


def assert_told_of_the_other_number_of_ranks(job: Job) -> None:
    """Ranks that find what others of their job's name have left are refused it, and train and save nothing."""
    cluster = job.cluster
    kept = read_log(open_store(cluster.root), cluster.job).readies
    bring_back(cluster)
    job.ranks.start()
    wait_until(lambda: len(job.ranks.statuses()) == 2, what="both are refused", timeout_s=60)
    assert 0 not in job.ranks.statuses().values()
    for rank in (0, 1):
        said = job.ranks.log(rank).read_text()
        assert "its position among 4 ranks is in the checkpoint, and here are 2" in said, said
    assert begun(job.ranks.out) == set()
    kill_all(job)
    state = read_log(open_store(cluster.root), cluster.job)
    assert kept.keys() <= state.readies.keys()
    assert {ready.attempt for ready in state.readies.values()} == {1}, "of the first run's attempt alone"


def bring_back(cluster: Cluster) -> None:
    """Start the services of a run, whose memory and disks may still be there."""
    cluster.start_broker()
    cluster.start_coordinator()
    for name in cluster.nodes:
        cluster.start_sidecar(name)


def kill_all(job: Job) -> None:
    """Kill ranks and services; what they have written stays."""
    job.ranks.stop()
    cluster = job.cluster
    for process in (*(node.sidecar for node in cluster.nodes.values()), cluster.coordinator, cluster.broker):
        if process is not None and process.status() is None:
            process.kill()


def judged(job: Job, reference: Reference, *, world: int) -> None:
    """The end is bit for bit that of a run to which nothing happened."""
    expected = reference(world=world, arguments=arguments(steps=job.steps))
    judgement = compare(read_finals(job.ranks.out), expected, world=world)
    assert judgement.differences == ()
    assert judgement.identical
