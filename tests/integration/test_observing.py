"""A run with hooks ends bit-identical to one without: observing changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.training import Reference

from toprope.chaos.journal import read_finals
from toprope.chaos.live.ask import get_inventory
from toprope.chaos.live.cluster import Cadences, Cluster, running_cluster
from toprope.chaos.live.forking import ForkedServices, ForkServer
from toprope.chaos.live.processes import wait_until
from toprope.chaos.live.ranks import World
from toprope.chaos.oracle import compare

ARGUMENTS = ("--job", "watched", "--size", "tiny", "--steps", "20")
SLOWLY = ("--step-delay", "0.1")
"""So that there are slots before training is over."""


def saved_steps(cluster: Cluster) -> set[int]:
    inventory = get_inventory(cluster.nodes["a"].url)
    return set() if inventory is None else {copy.step for copy in inventory.copies if copy.tier == "memory"}


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_hooks_on_and_off_end_in_the_same_weights_optimizer_and_rng(
    world: int, tmp_path: Path, fork_server: ForkServer, services: ForkedServices, reference: Reference
) -> None:
    cadences = Cadences(every=1, local_every=2, object_every=4)
    with running_cluster(tmp_path, job="watched", nodes=("a",), cadences=cadences, launch=services) as cluster:
        arguments = (*ARGUMENTS, *SLOWLY)
        ranks = World(server=fork_server, directory=tmp_path / "r", arguments=arguments, world=world, cluster=cluster)
        ranks.start()
        ranks.finish()

        judgement = compare(read_finals(ranks.out), reference(world=world, arguments=ARGUMENTS), world=world)
        assert judgement.differences == ()
        assert judgement.identical
        wait_until(lambda: saved_steps(cluster), what="the hooks had something to do", timeout_s=20)
