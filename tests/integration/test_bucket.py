"""A job whose object store is a bucket on a real S3 server loses every node at once and goes on from the bucket."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.training import Reference

from toprope.chaos.journal import JournalReader, read_finals
from toprope.chaos.live.cluster import Cadences, Cluster
from toprope.chaos.live.forking import ForkedServices, ForkServer
from toprope.chaos.live.processes import wait_until
from toprope.chaos.live.ranks import World
from toprope.chaos.live.s3_server import running_s3
from toprope.chaos.oracle import compare

JOB = "bucket"
STEPS = 30
ARGUMENTS = ("--job", JOB, "--size", "tiny", "--steps", str(STEPS))


@pytest.mark.slow
def test_a_job_that_lost_all_memory_and_disks_goes_on_from_the_bucket(
    tmp_path: Path, fork_server: ForkServer, services: ForkedServices, reference: Reference
) -> None:
    with running_s3(tmp_path / "s3") as server:
        server.make_bucket("checkpoints")
        cluster = Cluster(
            directory=tmp_path,
            job=JOB,
            cadences=Cadences(every=2, local_every=4, object_every=4),
            launch=services,
            root=server.root("checkpoints", "team"),
        )
        with cluster:
            cluster.start_broker()
            cluster.start_coordinator(env=server.environment)
            for node in "ab":
                cluster.start_sidecar(node, env=server.environment)
            ranks = World(
                server=fork_server,
                directory=tmp_path / "ranks",
                arguments=(*ARGUMENTS, "--step-delay", "0.1"),
                world=2,
                cluster=cluster,
                placement=lambda rank: "ab"[rank],
            )
            ranks.start()
            try:
                wait_until(lambda: ready_step(cluster) > 0, what="a READY checkpoint", timeout_s=30)
                for rank, node in enumerate("ab"):
                    ranks.kill(rank)
                    cluster.kill_node(node)
                ranks.stop()
                for node in "ab":
                    cluster.start_sidecar(node, env=server.environment)
                ranks.start()
                ranks.finish()
            finally:
                ranks.stop()
    journal = JournalReader(ranks.out)
    journal.read()
    sources = {shard["tier"] for event in journal.events if event.step for shard in event.restored}
    assert sources == {"object"}
    judgement = compare(read_finals(ranks.out), reference(world=2, arguments=ARGUMENTS), world=2)
    assert judgement.differences == ()
    assert judgement.identical


def ready_step(cluster: Cluster) -> int:
    desired = cluster.desired()
    return 0 if desired is None else desired.ready_step
