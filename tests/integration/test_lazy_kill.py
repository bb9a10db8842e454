"""A trainer is killed in the midst of a lazy copy: the torn slot is dropped, and the snapshot before it restored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.job_in_training import JOB
from tests.support.source import ROOT

from toprope.chaos.live.ask import get_inventory
from toprope.chaos.live.cluster import Cadences, running_cluster
from toprope.chaos.live.forking import ForkedServices, ForkServer
from toprope.chaos.live.ranks import World
from toprope.trainer_hooks.link.slot import SlotState, read_page


@pytest.mark.long
@pytest.mark.slow
def test_a_trainer_killed_in_the_midst_of_a_lazy_copy_goes_on_from_the_snapshot_before(
    tmp_path: Path, services: ForkedServices
) -> None:
    cadences = Cadences(every=1, local_every=1024, object_every=1024)
    with (
        ForkServer("tests.support.lazy_victim", path=[ROOT]) as server,
        running_cluster(tmp_path, job=JOB, cadences=cadences, launch=services) as cluster,
    ):
        out, target = tmp_path / "out", "tests.support.lazy_victim:main"
        out.mkdir()
        ranks = World(
            server=server, directory=tmp_path / "ranks", arguments=(str(out),), world=1, cluster=cluster, target=target
        )
        ranks.start()
        try:
            ranks.until((out / "midst").exists, what="a lazy copy")
            torn = int((out / "midst").read_text())
            ranks.until(
                lambda: (desired := cluster.desired()) is not None and desired.protected_step == torn - 1,
                what=f"step {torn - 1} is protected",
            )
            pages = [read_page(path) for path in cluster.nodes["a"].memory_dir.rglob("*.page")]
            assert [page.step for page in pages if page.state is SlotState.WRITING] == [torn]
            assert ranks.kill(0) == -9
            ranks.stop()
            ranks.start()
            ranks.finish()
        finally:
            ranks.stop()
        inventory = get_inventory(cluster.nodes["a"].url)
        assert inventory is not None
        assert torn not in {copy.step for copy in inventory.copies}
    digests = dict(json.loads(line) for line in (out / "digests.jsonl").read_text().splitlines())
    assert json.loads((out / "restored.json").read_text()) == [torn - 1, digests[torn - 1]]
