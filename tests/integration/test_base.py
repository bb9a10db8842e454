"""A new job on real services that starts from a checkpoint of another one, or from an import of its weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.job_in_training import WORLD, arguments, ready_step

from toprope.__main__ import main
from toprope.chaos.journal import Final, JournalReader, read_finals
from toprope.chaos.live.cluster import Cadences, Cluster
from toprope.chaos.live.forking import ForkedServices, ForkServer
from toprope.chaos.live.processes import wait_until
from toprope.chaos.live.ranks import World
from toprope.store.log.chain import read_log
from toprope.store.objects.directory import DirectoryStore

STEPS, EVERY = 12, 4


@contextmanager
def cluster_of(job: str, directory: Path, root: Path, services: ForkedServices, *words: str) -> Iterator[Cluster]:
    cluster = Cluster(
        directory=directory,
        job=job,
        cadences=Cadences(every=EVERY, local_every=EVERY, object_every=EVERY),
        launch=services,
        root=str(root),
        coordinator_words=words,
    )
    with cluster:
        cluster.start_broker()
        cluster.start_coordinator()
        for name in ("a", "b"):
            cluster.start_sidecar(name)
        yield cluster


def train(job: str, cluster: Cluster, directory: Path, server: ForkServer) -> tuple[tuple[Final, ...], set[int]]:
    """Train to the last step; return what each rank ended with, and the steps that they began after."""
    ranks = World(
        server=server,
        directory=directory,
        arguments=(*arguments(steps=STEPS)[2:], "--job", job),
        world=WORLD,
        cluster=cluster,
        placement=lambda rank: "ab"[rank],
    )
    ranks.start()
    try:
        ranks.finish()
    finally:
        ranks.stop()
    journal = JournalReader(ranks.out)
    journal.read()
    begun = {event.step for event in journal.events if event.event == "begin"}
    wait_until(lambda: ready_step(cluster) == STEPS, what="the last step is READY", timeout_s=30)
    return read_finals(ranks.out), begun


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [False, True], ids=["in the same store", "in another store"])
def test_a_job_goes_on_bit_for_bit_where_another_one_was(
    tmp_path: Path, fork_server: ForkServer, services: ForkedServices, *, elsewhere: bool
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    ours = tmp_path / "ours" if elsewhere else root
    base = f"{root}/old@{EVERY}" if elsewhere else f"old@{EVERY}"
    with cluster_of("old", tmp_path / "old", root, services) as cluster:
        expected, begun = train("old", cluster, tmp_path / "old-ranks", fork_server)
        assert begun == {0}
    theirs = read_log(DirectoryStore(root), "old")
    with cluster_of("new", tmp_path / "new", ours, services, "--base", base) as cluster:
        found, begun = train("new", cluster, tmp_path / "new-ranks", fork_server)
    assert begun == {EVERY}
    assert [final.digests for final in found] == [final.digests for final in expected]
    store = DirectoryStore(ours)
    old, new = read_log(store, "old"), read_log(store, "new")
    assert new.base is not None
    assert (new.base.job, new.base.step) == ("old", EVERY)
    assert old.pins == {new.base.seq}
    assert new.base.manifest_sha256 in {ready.manifest_sha256 for ready in theirs.readies.values()}
    assert not elsewhere or read_log(DirectoryStore(root), "old") == theirs, "nothing is written there"
    assert main(["verify", f"{ours}/new@{STEPS}"]) == 0
