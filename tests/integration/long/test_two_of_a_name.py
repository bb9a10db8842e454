"""Two sidecars of one name: the second is refused, and never throws the first off the broker."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest
from tests.sidecar.test_broker import watching
from tests.support.job_in_training import JOB

from toprope.chaos.live.ask import get
from toprope.chaos.live.cluster import Cluster, running_cluster
from toprope.chaos.live.forking import ForkedServices
from toprope.chaos.live.processes import Running, wait_until
from toprope.coordinator.wire import MAX_INVENTORY_BYTES, Presence, decode

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.fault("B137")
def test_a_second_sidecar_of_a_name_is_refused_and_never_throws_the_first_off_the_broker(
    tmp_path: Path, services: ForkedServices
) -> None:
    with running_cluster(tmp_path, job=JOB, nodes=("a",), launch=services) as cluster:
        first = cluster.nodes["a"].sidecar
        assert first is not None
        with watching(cluster.broker_port, job=JOB) as watcher:
            mine = watcher.presence(alive=True).incarnation
            second = start_twin(cluster, services)
            wait_until(lambda: second.status() is not None, what="the second one is refused", timeout_s=60)
            assert second.status() == 1
            assert "refuses this sidecar of node a" in second.log.read_text()
            assert first.status() is None
            assert first.log.read_text().count("connected") == 1, "it was never thrown off"
            told = [decode(body, Presence, limit=MAX_INVENTORY_BYTES) for topic, body in drained(watcher.heard)]
            assert not [one for one in told if one.incarnation == mine and not one.alive]
            assert first.kill().status == -9
            cluster.start_sidecar("a")
            wait_until(
                lambda: b'"a"' in (get(cluster.coordinator_url, "/v1/status") or b""), what="it is back", timeout_s=30
            )
            successor = mine
            while successor == mine:
                successor = watcher.presence(alive=True).incarnation
            desired = cluster.desired()
            assert desired is not None
            assert successor not in desired.refused, "the will of the one that was killed is not held against it"
            assert cluster.nodes["a"].sidecar is not None
            assert cluster.nodes["a"].sidecar.status() is None


def start_twin(cluster: Cluster, services: ForkedServices) -> Running:
    """Start another sidecar of node a, with a memory of its own."""
    memory, local = cluster.memory / "twin", cluster.directory / "twin"
    words = ["sidecar", "--job", cluster.job, "--node", "a", "--coordinator", cluster.coordinator_url]
    words += ["--broker", f"127.0.0.1:{cluster.broker_port}", "--memory-dir", str(memory), "--local-dir", str(local)]
    words += ["--store", cluster.root, "--socket", str(memory.with_suffix(".sock")), "--grace", "0"]
    local.mkdir()
    return services("twin", words, log=cluster.log("twin"), env={})


def drained(heard: queue.Queue[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    """Return the presences that were heard so far."""
    found = []
    while not heard.empty():
        topic, body = heard.get_nowait()
        if topic.endswith("/presence") and "/nodes/" in topic:
            found.append((topic, body))
    return found
