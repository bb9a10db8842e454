"""Restart storms under torchrun: nodes are lost, replaced, left out, taken in again, and one fails again and again.

Each world goes on from one step that is not far back, with the bytes of that step; and what comes out in the end is
what one process comes to that trains as these worlds did, uninterrupted.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.support.elastic_rank import replay
from tests.support.source import ROOT

from toprope.chaos.live.cluster import Cadences, Cluster, running_cluster
from toprope.chaos.live.forking import ForkedServices
from toprope.chaos.live.processes import Process, become_subreaper, kill_tree, tail, wait_until
from toprope.chaos.live.training import start_rendezvous

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(900)]
JOB, EVERY, STEPS = "storms", 5, 200
PATIENCE_S = 240.0
"""The machine may be busy: torch alone takes seconds to import in each process."""
OFTEN = Cadences(every=EVERY, local_every=2 * EVERY, object_every=2 * EVERY)


@dataclass(slots=True)
class Storm:
    """Agents that come and go, a rank each, on nodes with a sidecar."""

    cluster: Cluster
    directory: Path
    port: int
    size: str
    words: tuple[str, ...] = ()
    """What else ``ckpt launch`` is told."""
    steps: int = STEPS
    agents: dict[str, Process] = field(default_factory=dict)

    def start(self, node: str) -> None:
        """Start the agent of a node whose sidecar runs."""
        torchrun = ["torchrun", f"--nnodes={self.size}", "--nproc-per-node=1", "--max-restarts=5"]
        torchrun += [f"--rdzv-id={JOB}", "--rdzv-conf=keep_alive_max_attempt=10"]  # a busy machine is silent for long
        torchrun += [f"--log-dir={self.directory / 'torchrun'}"]
        script = [str(ROOT / "tests/support/elastic_rank.py"), str(self.directory), JOB, str(self.steps)]
        launch = ["launch", "--rendezvous", f"127.0.0.1:{self.port}", *self.words, "--", *torchrun, *script]
        env = {"CKPT_SOCKET": str(self.cluster.nodes[node].socket), "OMP_NUM_THREADS": "1", "NODE": node}
        command = [sys.executable, "-m", "toprope", *launch]
        self.agents[node] = Process(f"agent {node}", command, log=self.log(node), env=env)
        self.cluster.nodes[node].agent = self.agents[node]

    def log(self, node: str) -> Path:
        return self.cluster.log(f"agent-{node}")

    def new_node(self, node: str) -> None:
        """A machine that has nothing."""
        self.cluster.start_sidecar(node)
        self.start(node)

    def lose(self, node: str) -> None:
        """Kill a machine for good: its agent, rank and sidecar, its memory and its disk."""
        self.cluster.kill_node(node)
        del self.agents[node]

    def lines(self) -> list[dict[str, Any]]:
        journal = self.directory / "journal"
        text = journal.read_text() if journal.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def newest(self) -> int:
        return max((line["step"] for line in self.lines() if line["event"] == "step"), default=0)

    def trains(self, world: int, *, to: int) -> None:
        """Wait until a world of so many ranks has come to a step."""

        def done() -> bool:
            steps = [line for line in self.lines() if line["event"] == "step"]
            return bool(steps) and steps[-1]["world"] == world and steps[-1]["step"] >= to

        try:
            wait_until(done, what=f"{world} ranks have come to step {to}", timeout_s=PATIENCE_S)
        except Exception as error:
            error.add_note("".join(tail(agent) for agent in self.agents.values()))
            error.add_note("\n".join(map(str, self.lines()[-20:])))
            raise

    def ranks(self) -> dict[str, int]:
        """Return the process id of the rank of each node in the world that began last."""
        begins = [line for line in self.lines() if line["event"] == "begin"]
        return {line["node"]: line["pid"] for line in begins[-begins[-1]["world"] :]}

    def ends(self, node: str) -> None:
        """Wait until an agent ends well."""
        try:
            assert self.agents[node].wait(PATIENCE_S) == 0
        except BaseException as error:
            error.add_note(tail(self.agents[node]))
            raise


@contextmanager
def storm(
    directory: Path, services: ForkedServices, *, size: str, words: tuple[str, ...] = (), steps: int = STEPS
) -> Iterator[Storm]:
    """Yield a job of two nodes, a and b, in training."""
    become_subreaper()
    with running_cluster(directory, job=JOB, cadences=OFTEN, launch=services) as cluster:
        store, port = start_rendezvous(cluster)
        job = Storm(cluster, directory, port, size, words, steps)
        try:
            for node in "ab":
                job.start(node)
            job.trains(2, to=2 * EVERY)
            yield job
        finally:
            for process in job.agents.values():
                if process.status() is None:
                    kill_tree(process)
            store.stop()


@dataclass(frozen=True, slots=True)
class Restart:
    """A world that began: how many ranks, from what step and tiers, and the newest step that there had been."""

    world: int
    step: int
    newest: int
    tiers: frozenset[str]


@dataclass(slots=True)
class Told:
    """What the journal tells: the worlds that began, and what each step that counts was trained on."""

    restarts: list[Restart] = field(default_factory=list)
    worlds: list[int] = field(default_factory=list)
    samples: list[list[list[int]]] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)


def told(lines: list[dict[str, Any]]) -> Told:
    """Go through a journal; all ranks of a world agree, and what they restored is what was there after that step."""
    found, newest = Told(), 0
    waiting: list[dict[str, Any]] = []
    for line in lines:
        if waiting and waiting[0]["event"] != line["event"]:
            waiting = []  # a world that was hit before all of it could say so
        waiting.append(line)
        if len(waiting) < line["world"]:
            continue
        ranks, waiting = sorted(waiting, key=lambda one: one["rank"]), []
        assert [one["rank"] for one in ranks] == list(range(line["world"])), ranks
        (step,) = {one["step"] for one in ranks}
        (digest,) = {one["digest"] for one in ranks}
        if line["event"] == "begin":
            assert step == 0 or digest == found.digests[step - 1], f"step {step} was restored with other bytes"
            tiers = frozenset(tier for one in ranks for tier in one["tiers"])
            found.restarts.append(Restart(line["world"], step, newest, tiers))
            for kept in (found.worlds, found.samples, found.digests):
                del kept[step:]
        else:
            assert step == len(found.digests) + 1, f"step {step} comes after {len(found.digests)}"
            found.worlds.append(line["world"])
            found.samples.append([one["samples"] for one in ranks])
            found.digests.append(digest)
        newest = max(newest, step)
    return found


def assert_as_if_uninterrupted(found: Told, *, steps: int = STEPS) -> None:
    """The samples of each step and the bytes after the last are those of one process that was never interrupted."""
    assert len(found.worlds) == steps
    samples, digest = replay(found.worlds)
    assert found.samples == samples, "each sample once, in its order"
    assert found.digests[-1] == digest


def assert_little_was_lost(found: Told, *, intervals: int) -> None:
    for restart in found.restarts[1:]:
        assert 0 <= restart.newest - restart.step <= intervals * EVERY, found.restarts


def test_a_node_that_dies_for_good_is_replaced_by_another_which_has_nothing(
    tmp_path: Path, services: ForkedServices, record_property: Callable[[str, object], None]
) -> None:
    with storm(tmp_path, services, size="2") as job:
        for number, (dead, fresh, step) in enumerate((("b", "c", 60), ("a", "d", 120))):
            job.trains(2, to=step)
            newest, began_s = job.newest(), time.monotonic()
            job.lose(dead)
            job.new_node(fresh)
            job.trains(2, to=newest + 1)
            record_property(f"replacement {number + 1} trains beyond the newest step after, s", took(began_s))
        for node in "cd":
            job.ends(node)
        found = told(job.lines())
    assert [restart.world for restart in found.restarts] == [2, 2, 2]
    assert_little_was_lost(found, intervals=2)
    for restart in found.restarts[1:]:
        assert restart.tiers, "something was restored"
        assert restart.tiers <= {"memory", "peer"}, "what the dead had comes from the other's memory"
    assert_as_if_uninterrupted(found)


def test_a_job_goes_on_with_fewer_nodes_from_memory_and_takes_another_in_when_it_comes(
    tmp_path: Path, services: ForkedServices, record_property: Callable[[str, object], None]
) -> None:
    with storm(tmp_path, services, size="1:2") as job:
        job.trains(2, to=60)
        newest, began_s = job.newest(), time.monotonic()
        job.lose("b")
        job.trains(1, to=newest + 1)
        record_property("one node less trains beyond the newest step after, s", took(began_s))
        job.trains(1, to=100)
        began_s = time.monotonic()
        job.new_node("c")
        job.trains(2, to=101)
        record_property("one node more trains after, s", took(began_s))
        for node in "ac":
            job.ends(node)
        found = told(job.lines())
    assert [restart.world for restart in found.restarts] == [2, 1, 2]
    assert_little_was_lost(found, intervals=2)
    assert found.restarts[1].tiers, "something was restored"
    assert found.restarts[1].tiers <= {"memory", "peer"}, "both shards, put together from the one memory that is left"
    assert_as_if_uninterrupted(found)


def test_a_node_that_fails_again_and_again_leaves_loudly_and_the_others_go_on_without_it(
    tmp_path: Path, services: ForkedServices, record_property: Callable[[str, object], None]
) -> None:
    with storm(tmp_path, services, size="1:2", words=("--leave-after", "3")) as job:
        for _ in range(3):
            job.trains(2, to=job.newest() + EVERY + 1)
            os.kill(job.ranks()["b"], signal.SIGKILL)
        assert job.agents["b"].wait(PATIENCE_S) == 1
        newest, began_s = job.newest(), time.monotonic()
        job.trains(1, to=newest + 1)
        record_property("the other node trains beyond the newest step after the end of the bad one, s", took(began_s))
        job.ends("a")
        found = told(job.lines())
        logs = {node: job.log(node).read_text() for node in "ab"}
    assert [restart.world for restart in found.restarts] == [2, 2, 2, 1]
    assert logs["b"].count("ended by SIGKILL") == 3
    assert "ckpt launch: ranks of this node were the first to fail 3 times within an hour: it leaves" in logs["b"]
    assert "ranks of this node were the first to fail" not in logs["a"], "its own failed only since the other's did"
    assert "leaves: its ranks fail again and again" in logs["a"]
    assert_little_was_lost(found, intervals=2)
    assert_as_if_uninterrupted(found)


@pytest.mark.fault("B107")
def test_an_agent_that_is_stopped_comes_back_and_is_killed_costs_an_interval_each_time(
    tmp_path: Path, services: ForkedServices, record_property: Callable[[str, object], None]
) -> None:
    steps = 2 * STEPS  # b, which imports torch twice, is to come in time
    with storm(tmp_path, services, size="1:2", steps=steps) as job:
        job.trains(2, to=20)
        os.kill(job.agents["b"].pid, signal.SIGTERM)
        assert job.agents["b"].wait(60.0) != 0
        time.sleep(10.0)
        job.start("b")
        job.trains(2, to=job.newest() + 20)
        newest, began_s = job.newest(), time.monotonic()
        kill_tree(job.agents["b"])
        job.trains(1, to=newest + 1)
        record_property("the other node trains beyond the newest step after, s", took(began_s))
        job.ends("a")
        services_live = [
            node.sidecar is not None and node.sidecar.status() is None for node in job.cluster.nodes.values()
        ]
        assert services_live == [True, True], "sidecars outlive the agents"
        assert job.cluster.coordinator is not None
        assert job.cluster.coordinator.status() is None
        found = told(job.lines())
    assert found.restarts[0].world == 2
    assert found.restarts[-1].world == 1
    assert 2 in [restart.world for restart in found.restarts[1:]]
    assert_little_was_lost(found, intervals=1)
    assert_as_if_uninterrupted(found, steps=steps)


def took(began_s: float) -> str:
    return f"{time.monotonic() - began_s:.1f}"
