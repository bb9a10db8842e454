"""Every way to be parallel: a killed rank, and all go on bit for bit as if nothing had happened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.parallel_kinds import GATE, JOB, WORLDS
from tests.support.source import ROOT

from toprope.chaos.journal import Final, JournalReader, read_finals
from toprope.chaos.live.cluster import Cadences, Cluster, running_cluster
from toprope.chaos.live.forking import ForkedServices, ForkServer
from toprope.chaos.live.processes import become_subreaper, wait_until
from toprope.chaos.live.ranks import World
from toprope.chaos.oracle import compare, torn_restores
from toprope.store.log.chain import read_log
from toprope.store.look.verify import verify_checkpoint
from toprope.store.objects.directory import DirectoryStore

STEPS = 9
EVERY = 2


@pytest.fixture(scope="module")
def warm() -> Iterator[ForkServer]:
    become_subreaper()
    with ForkServer("tests.support.parallel_rank", "torch._dynamo", path=[ROOT]) as server:
        yield server


def world_of(
    kind: str, directory: Path, warm: ForkServer, cluster: Cluster | None = None, ranks: int | None = None
) -> World:
    hooks = "--no-hooks" if cluster is None else "--hooks"
    count = ranks or WORLDS[kind]
    return World(
        server=warm,
        directory=directory,
        arguments=(kind, str(STEPS), hooks),
        world=count,
        cluster=cluster,
        placement=lambda rank: "ab"[rank * 2 // count],
        target="tests.support.parallel_rank:main",
    )


def uninterrupted(kind: str, directory: Path, warm: ForkServer) -> tuple[Final, ...]:
    ranks = world_of(kind, directory, warm)
    ranks.start()
    try:
        ranks.finish()
    finally:
        ranks.stop()
    return read_finals(ranks.out)


@pytest.mark.slow
def test_a_killed_rank_that_shards_in_two_ways_goes_on_bit_for_bit(
    tmp_path: Path, warm: ForkServer, services: ForkedServices
) -> None:
    """The one kind that needs most of the code; all of them are in ``make test-long``."""
    kill_and_resume("fsdp2xtp", tmp_path, warm, services)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("kind", WORLDS)
def test_a_killed_rank_goes_on_bit_for_bit(
    kind: str, tmp_path: Path, warm: ForkServer, services: ForkedServices
) -> None:
    kill_and_resume(kind, tmp_path, warm, services)


def kill_and_resume(kind: str, tmp_path: Path, warm: ForkServer, services: ForkedServices) -> None:
    """Kill a rank at the gate, start all again, and compare what they end with to a run that nothing happened to."""
    expected = uninterrupted(kind, tmp_path / "reference", warm)
    cadences = Cadences(every=EVERY, local_every=EVERY, object_every=2 * EVERY)
    with running_cluster(tmp_path, job=JOB, cadences=cadences, launch=services) as cluster:
        ranks = world_of(kind, tmp_path / "ranks", warm, cluster)
        journal = JournalReader(ranks.out)
        ranks.start()
        try:
            ranks.until(lambda: protected_step(cluster) == GATE, what=f"step {GATE} is protected")
            assert ranks.kill(ranks.world - 1) == -9
            ranks.restart()
            (ranks.out / "go").touch()
            ranks.finish()
        finally:
            ranks.stop()
        assert_the_last_is_in_the_store(cluster, world=ranks.world)
    journal.read()
    assert {event.step for event in journal.events if event.event == "begin"} == {0, GATE}
    judgement = compare(read_finals(ranks.out), expected, world=ranks.world)
    assert judgement.differences == ()
    assert judgement.identical
    assert torn_restores(journal.events) == ()


@pytest.mark.long
@pytest.mark.slow
def test_what_belongs_to_a_rank_is_refused_on_another_number_of_them_and_the_right_number_goes_on(
    tmp_path: Path, warm: ForkServer, services: ForkedServices
) -> None:
    cadences = Cadences(every=EVERY, local_every=EVERY, object_every=EVERY)
    with running_cluster(tmp_path, job=JOB, cadences=cadences, launch=services) as cluster:
        ranks = world_of("expert", tmp_path / "ranks", warm, cluster)
        ranks.start()
        try:
            ranks.until(lambda: protected_step(cluster) == GATE, what=f"step {GATE} is protected")
        finally:
            ranks.stop()
        for count in (1, 3):
            others = world_of("expert", tmp_path / f"{count}-ranks", warm, cluster, ranks=count)
            others.start()
            try:
                wait_until(lambda others=others: len(others.statuses()) == others.world, what="they end", timeout_s=60)  # type: ignore[misc]
            finally:
                others.stop()
            assert set(others.statuses().values()) == {64}
            for rank in range(count):  # one that is slow is told what another one found
                said = others.log(rank).read_text()
                assert "model.expert.weight: plain tensors on ranks 0 and 1 of the checkpoint that differ" in said
                assert "saved by 2 ranks, no mesh; this is rank " in said
                assert f" of {count}" in said
                assert "'ckpt export'" in said
        (ranks.out / "go").touch()
        ranks.start()
        try:
            ranks.finish()
        finally:
            ranks.stop()
        journal = JournalReader(ranks.out)
        journal.read()
        assert {event.step for event in journal.events if event.event == "begin"} == {0, GATE}


def assert_the_last_is_in_the_store(cluster: Cluster, *, world: int) -> None:
    """The last checkpoint becomes READY, and is what its manifest and indexes say."""
    last = STEPS - STEPS % (2 * EVERY)
    wait_until(lambda: ready_step(cluster) == last, what=f"step {last} is READY", timeout_s=30)
    store = DirectoryStore(cluster.store)
    state = read_log(store, JOB)
    report = verify_checkpoint(store, state, state.live[-1])
    assert (report.step, report.world, report.damages) == (last, world, ())


def ready_step(cluster: Cluster) -> int:
    desired = cluster.desired()
    return 0 if desired is None else desired.ready_step


def protected_step(cluster: Cluster) -> int:
    desired = cluster.desired()
    return 0 if desired is None else desired.protected_step
