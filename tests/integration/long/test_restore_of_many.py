"""Eight ranks of a node that restore at once: each takes its own shard, and the store is read once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.job_in_training import ready_step

from toprope.chaos.live.cluster import Cadences, Cluster, running_cluster
from toprope.chaos.live.forking import ForkedServices, ForkServer
from toprope.chaos.live.ranks import World

RANKS, SHARD_MIB = 8, 128
MIB = 1 << 20
pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(400)]


def read_by_sidecar(cluster: Cluster) -> int:
    """Return how many bytes the sidecar has read by system calls."""
    sidecar = cluster.nodes["a"].sidecar
    assert sidecar is not None
    lines = Path(f"/proc/{sidecar.pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar:"))


@pytest.mark.fault("B98")
def test_ranks_that_restore_at_once_each_hold_their_own_shard_and_read_the_store_once(
    tmp_path: Path,
    fork_server: ForkServer,
    services: ForkedServices,
    record_property: Callable[[str, object], None],
) -> None:
    """All is measured beyond what a process with torch has before it restores.

    The 100 MiB that a rank may have beside 1.5 times its shard are for the restore: torch alone is more than that.
    """
    once = Cadences(every=2, local_every=2, object_every=2)
    with running_cluster(tmp_path, job="many", nodes=("a",), cadences=once, launch=services) as cluster:
        world = World(
            server=fork_server,
            directory=tmp_path / "ranks",
            arguments=("--job", "many", "--mib", str(SHARD_MIB)),
            world=RANKS,
            cluster=cluster,
            target="tests.support.large_rank:main",
        )
        try:
            world.start()
            world.until(lambda: ready_step(cluster) > 0, what="a step is READY", timeout_s=150)
            world.stop()
            cluster.kill_node("a")  # so that it has to come from the store
            cluster.start_sidecar("a")
            before = read_by_sidecar(cluster)
            world.start()
            world.finish(timeout_s=150)
            by_sidecar = read_by_sidecar(cluster) - before
        finally:
            world.stop()
        found = [json.loads((world.out / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
    assert {one["step"] for one in found} != {0}
    assert len({one["step"] for one in found}) == 1
    assert all(one["right"] for one in found), "each has its own bytes"
    state = RANKS * SHARD_MIB * MIB
    peak, read = max(one["peak"] for one in found), by_sidecar + sum(one["read"] for one in found)
    record_property("peak of a rank beyond what it had before, MiB", round(peak / MIB))
    record_property("bytes read in all, of the state", f"{read / state:.2f}")
    assert peak <= 1.5 * SHARD_MIB * MIB + 100 * MIB
    assert state <= read <= 1.2 * state, "once, and all of it"
