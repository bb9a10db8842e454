"""A node whose memory has no room for another's copies: it takes none, and a third node holds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from toprope.chaos.live.ask import get_inventory
from toprope.chaos.live.cluster import Cadences, Cluster
from toprope.chaos.live.forking import Forked, ForkedServices, ForkServer
from toprope.chaos.live.processes import wait_until
from toprope.sidecar.memory import used_bytes

MIB = 1 << 20
STATE_MIB, ROOM_MIB = 500, 100
pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(300)]


def holders(cluster: Cluster) -> list[str]:
    desired = cluster.desired()
    return [] if desired is None else [place.holder for place in desired.placement if place.owner == "a"]


def protected(cluster: Cluster) -> int:
    desired = cluster.desired()
    return 0 if desired is None else desired.protected_step


@pytest.mark.fault("B132")
def test_a_peer_that_is_full_takes_no_byte_and_another_one_holds_the_copies(
    tmp_path: Path, fork_server: ForkServer, services: ForkedServices
) -> None:
    often = Cadences(every=2, local_every=512, object_every=512)
    with Cluster(directory=tmp_path, job="full", cadences=often, launch=services) as cluster:
        cluster.sidecar_words["b"] = (f"--memory={ROOM_MIB * MIB}",)
        cluster.start_broker()
        cluster.start_coordinator()
        for name in "ab":
            cluster.start_sidecar(name)
        arguments = ["--job", "full", "--out", str(tmp_path / "out"), "--steps", "100000"]
        arguments += ["--ballast-mib", str(STATE_MIB), "--step-delay", "0.2"]
        trainer = Forked(
            "trainer",
            fork_server,
            "tests.support.counting_trainer:main",
            arguments,
            log=tmp_path / "trainer.log",
            env={"CKPT_SOCKET": str(cluster.nodes["a"].socket)},
        )
        try:
            full = cluster.nodes["b"]
            wait_until(lambda: told_full(full.url) == ("a",), what="b says that it is full", timeout_s=60)
            wait_until(lambda: holders(cluster) == [], what="b is not asked to hold any more", timeout_s=20)
            assert "its copies don't fit into the memory of b" in cluster.log("coordinator").read_text()
            cluster.start_sidecar("c")
            wait_until(lambda: holders(cluster) == ["c"], what="c holds instead", timeout_s=20)
            wait_until(lambda: protected(cluster) > 0, what="a step is protected", timeout_s=60)
            assert used_bytes(full.memory_dir) == 0
            said = cluster.log("sidecar-b").read_text()
            assert said.count("bytes of memory needed") <= 2, "it does not try again and again"
            assert f"--memory {ROOM_MIB * MIB} leaves" in said
            by_owner = cluster.log("sidecar-a").read_text()
            assert "peer-failed" not in by_owner, "a refusal is no broken connection"
            assert "Traceback" not in by_owner
            assert trainer.status() is None
        finally:
            trainer.kill()


def told_full(url: str) -> tuple[str, ...]:
    inventory = get_inventory(url)
    return () if inventory is None else inventory.no_room_for
