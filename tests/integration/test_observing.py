"""A run with hooks ends bit-identical to one without: observing changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.training import Reference

from toprope.chaos.journal import read_finals
from toprope.chaos.live.cluster import Cadences, running_cluster
from toprope.chaos.live.forking import ForkedServices, ForkServer
from toprope.chaos.live.ranks import World
from toprope.chaos.oracle import compare

ARGUMENTS = ("--job", "watched", "--size", "tiny", "--steps", "20")


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_hooks_on_and_off_end_in_the_same_weights_optimizer_and_rng(
    world: int, tmp_path: Path, fork_server: ForkServer, services: ForkedServices, reference: Reference
) -> None:
    cadences = Cadences(every=1, local_every=2, object_every=4)
    with running_cluster(tmp_path, job="watched", nodes=("a",), cadences=cadences, launch=services) as cluster:
        ranks = World(server=fork_server, directory=tmp_path / "r", arguments=ARGUMENTS, world=world, cluster=cluster)
        ranks.start()
        ranks.finish()

        assert (
            compare(read_finals(ranks.out), reference(world=world, arguments=ARGUMENTS), world=world).differences == ()
        )
