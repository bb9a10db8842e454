"""Jobs whose memory lies on one node: what a killed one leaves is used again, and another one's is not touched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.support.footprint import used_bytes

from toprope.chaos.live.cluster import Cadences, Cluster, running_cluster
from toprope.chaos.live.forking import Forked, ForkedServices, ForkServer
from toprope.chaos.live.processes import Running, wait_ready, wait_until
from toprope.store.log.chain import read_log
from toprope.store.look.verify import verify_checkpoint
from toprope.store.objects.directory import DirectoryStore
from toprope.trainer_hooks.link.slot import SlotState, read_page

EVERY = 4
STARTS = 20
ENDS = 10
pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass(slots=True)
class Life:
    """A job whose one sidecar and trainer live on a node that it shares with others."""

    cluster: Cluster
    server: ForkServer
    services: ForkedServices
    memory: Path
    """The --memory-dir of all jobs of the node."""
    words: tuple[str, ...] = ()
    """What else the trainer is told."""
    sidecar: Running | None = None
    trainer: Forked | None = None
    lives: int = 0

    @property
    def mine(self) -> Path:
        """What of the memory is this job's."""
        return self.memory / self.cluster.job

    def start(self) -> None:
        """Start both, and wait for the first snapshots."""
        self.lives += 1
        job, ready = self.cluster.job, self.cluster.directory / f"ready-{self.lives}"
        socket, local = self.memory / f"{job}.sock", self.cluster.directory / "local"
        local.mkdir(exist_ok=True)
        words = ["sidecar", "--job", job, "--node", "a", "--coordinator", self.cluster.coordinator_url]
        words += ["--memory-dir", str(self.memory), "--local-dir", str(local), "--store", self.cluster.root]
        words += ["--socket", str(socket), "--ready-file", str(ready), "--grace", "0"]
        self.sidecar = self.services(f"sidecar of {job}", words, log=self._log("sidecar"), env={})
        wait_ready(self.sidecar, ready)
        arguments = ["--job", job, "--out", str(self._out()), "--steps", "100000", *self.words]
        log, env = self._log("trainer"), {"CKPT_SOCKET": str(socket)}
        target = "tests.support.counting_trainer:main"
        self.trainer = Forked(f"trainer of {job}", self.server, target, arguments, log=log, env=env)
        self.train_on(3)

    def train_on(self, snapshots: int) -> None:
        """Wait for some more snapshots."""
        assert self.trainer is not None
        wanted = self.counts()["snapshots"] + snapshots
        wait_until(
            lambda: self.counts()["snapshots"] >= wanted, what="snapshots", timeout_s=60, alive=self._processes()
        )

    def counts(self) -> dict[str, Any]:
        """What the trainer told of its newest step."""
        path = self._out() / "counts.jsonl"
        lines = path.read_bytes().rpartition(b"\n")[0].splitlines() if path.exists() else []
        return json.loads(lines[-1]) if lines else {"step": 0, "snapshots": 0, "skipped": {}}

    def kill(self) -> None:
        """Kill the whole group."""
        for process in self._processes():
            assert process.kill().status == -9

    def stop(self) -> None:
        """Kill the trainer, and ask the sidecar to end."""
        assert self.trainer is not None
        assert self.sidecar is not None
        self.trainer.kill()
        assert self.sidecar.stop() == 0

    def is_alive(self) -> bool:
        """Say whether both run."""
        return all(process.status() is None for process in self._processes())

    def end(self) -> None:
        """Kill what still runs."""
        for process in self._processes():
            if process.status() is None:
                process.kill()

    def ready_steps(self) -> list[int]:
        """The steps that became READY; the newest are read in full and verified."""
        store = DirectoryStore(self.cluster.store)
        state = read_log(store, self.cluster.job)
        assert [damage for seq in state.live[-3:] for damage in verify_checkpoint(store, state, seq).damages] == []
        return sorted(one.step for one in state.readies.values())

    def _processes(self) -> list[Running]:
        return [process for process in (self.trainer, self.sidecar) if process is not None]

    def _out(self) -> Path:
        return self.cluster.directory / f"trainer-{self.lives}"

    def _log(self, name: str) -> Path:
        return self.cluster.directory / f"{name}-{self.lives}.log"


@contextmanager
def two_jobs(
    directory: Path, memory: Path, server: ForkServer, services: ForkedServices
) -> Iterator[tuple[Life, Life]]:
    """Yield a job to be hit, which takes a snapshot of 8 MiB at each step, and one that saves beside it."""
    often = Cadences(every=1, local_every=4, object_every=4)
    seldom = Cadences(every=EVERY, local_every=EVERY, object_every=EVERY)
    with (
        running_cluster(directory / "hit", job="hit", nodes=(), cadences=often, launch=services) as first,
        running_cluster(directory / "beside", job="beside", nodes=(), cadences=seldom, launch=services) as second,
    ):
        hit = Life(first, server, services, memory, ("--ballast-mib", "8", "--step-delay", "0.01"))
        beside = Life(second, server, services, memory, ("--step-delay", "0.2"))
        try:
            beside.start()
            yield hit, beside
        finally:
            hit.end()
            beside.end()


def assert_each_due_step_is_ready(job: Life, *, above: int) -> None:
    """Wait for one that was taken after a step; none between the first and it may be missing, nor a process be gone."""
    wait_until(lambda: job.ready_steps()[-1] > above, what="a READY after all that", timeout_s=60)
    steps = job.ready_steps()
    assert steps == list(range(steps[0], steps[-1] + 1, EVERY))
    assert steps[0] <= 4 * EVERY
    assert job.is_alive()


def files_of(directory: Path) -> dict[str, int]:
    """Return the slot files of a job with their inodes."""
    return {path.name: path.stat().st_ino for path in directory.rglob("slot-*")}


def is_amid_a_snapshot(directory: Path) -> bool:
    """Say whether a slot was being written to, or not hashed yet, when all who could were killed."""
    states = {read_page(path).state for path in directory.rglob("slot-*.page")}
    return bool(states & {SlotState.WRITING, SlotState.SEALED})


@pytest.mark.fault("B91")
def test_groups_that_are_killed_leave_nothing_that_fills_memory_or_blocks_a_start(
    tmp_path: Path, memory_dir: Path, fork_server: ForkServer, services: ForkedServices
) -> None:
    foreign = [memory_dir / "foreign", memory_dir / "gone" / "slots" / "rank-0" / "slot-0.data"]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(path.name.encode() * 1000)
    with two_jobs(tmp_path, memory_dir, fork_server, services) as (hit, beside):
        theirs = files_of(beside.mine)
        hit.start()
        at_first, amid = used_bytes(hit.mine), 0
        assert at_first > 3 * (8 << 20)
        for _ in range(STARTS):
            hit.kill()
            amid += is_amid_a_snapshot(hit.mine)
            hit.start()
        assert amid > 0, "no kill came during a snapshot"
        wait_until(lambda: used_bytes(hit.mine) <= at_first, what="no more memory than at first", timeout_s=30)
        assert [path.read_bytes() for path in foreign] == [path.name.encode() * 1000 for path in foreign]
        assert files_of(beside.mine) == theirs
        assert_each_due_step_is_ready(beside, above=beside.counts()["step"])


@pytest.mark.fault("B96")
def test_a_job_that_is_started_stopped_and_killed_costs_the_job_beside_it_no_save(
    tmp_path: Path, memory_dir: Path, fork_server: ForkServer, services: ForkedServices
) -> None:
    with two_jobs(tmp_path, memory_dir, fork_server, services) as (hit, beside):
        theirs = files_of(beside.mine)
        for number in range(ENDS):
            hit.start()
            if number % 2:
                hit.stop()
            else:
                hit.kill()
        assert files_of(beside.mine) == theirs
        assert {path.name for path in memory_dir.iterdir() if path.is_dir()} == {"hit", "beside"}, "by the job's name"
        assert_each_due_step_is_ready(beside, above=beside.counts()["step"])
        uids = {read_page(path).attempt_uid for path in beside.mine.rglob("slot-*.page")} - {""}
        assert uids.isdisjoint(read_page(path).attempt_uid for path in hit.mine.rglob("slot-*.page"))
