"""Ten thousand steps and hundreds of snapshots: nothing is lost count of, and nothing grows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.footprint import Footprint, footprint, used_bytes

from toprope.chaos.journal import read_finals
from toprope.chaos.live.cluster import Cadences, Cluster, running_cluster
from toprope.chaos.live.forking import Forked, ForkedServices, ForkServer
from toprope.chaos.live.processes import wait_until
from toprope.chaos.oracle import compare

JOB = "long"
EVERY = 2
EARLY, LATE, STEPS = 1_000, 10_000, 10_300
"""The steps at which the trainer is looked at, and the last, which leaves time to look."""
MIB = 1 << 20
POOL_THREADS = (os.cpu_count() or 1) + 4
"""What a thread pool may still start when for the first time all of it has work at once."""
pytestmark = [pytest.mark.long, pytest.mark.slow]


@dataclass(frozen=True, slots=True)
class Run:
    """A trainer at work; ``out`` is where it tells how far it is."""

    trainer: Forked
    out: Path

    def counts(self) -> dict[str, Any]:
        """What it told of its newest step."""
        path = self.out / "counts.jsonl"
        lines: list[bytes] = []
        if path.exists():
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - 4096))
                lines = file.read().rpartition(b"\n")[0].splitlines()
        return msgspec.json.decode(lines[-1]) if lines else {"step": 0, "snapshots": 0, "skipped": {}}

    def until(self, done: Callable[[dict[str, Any]], bool], *, what: str, timeout_s: float = 120.0) -> None:
        wait_until(lambda: done(self.counts()), what=what, timeout_s=timeout_s, alive=[self.trainer])

    def finish(self, *, timeout_s: float = 120.0) -> None:
        wait_until(lambda: self.trainer.status() is not None, what="the end of training", timeout_s=timeout_s)
        assert self.trainer.status() == 0, self.trainer.log.read_text()[-2000:]


def start(server: ForkServer, cluster: Cluster, *words: str) -> Run:
    out = cluster.directory / "trainer"
    env = {"CKPT_SOCKET": str(cluster.nodes["a"].socket)}
    log = cluster.log("trainer")
    arguments = ["--job", JOB, "--out", str(out), *words]
    return Run(Forked("trainer", server, "tests.support.counting_trainer:main", arguments, log=log, env=env), out)


def assert_as_without_hooks(run: Run, server: ForkServer, *, steps: int) -> None:
    out = run.out.parent / "reference"
    words = ["--job", JOB, "--out", str(out), "--steps", str(steps), "--no-hooks"]
    log = run.out.parent / "reference.log"
    reference = Forked("reference", server, "tests.support.counting_trainer:main", words, log=log, env={})
    Run(reference, out).finish(timeout_s=300)
    judgement = compare(read_finals(run.out), read_finals(out), world=1)
    assert judgement.differences == ()
    assert judgement.identical


def assert_each_due_step_is_accounted_for(counts: dict[str, Any]) -> None:
    assert counts["step"] == STEPS
    assert counts["snapshots"] + sum(counts["skipped"].values()) == STEPS // EVERY


def assert_no_growth(early: Footprint, late: Footprint, *, allowed_bytes: int) -> None:
    assert late.own_bytes - early.own_bytes < allowed_bytes, f"{early} > {late}"
    assert late.files <= early.files, f"{early} > {late}"
    assert late.threads <= early.threads + POOL_THREADS, f"{early} > {late}"


def connected_footprint(run: Run) -> Footprint:
    """What the trainer takes while it has a connection, which is two files."""
    before = run.counts()["snapshots"]
    run.until(lambda counts: counts["snapshots"] > before, what="a snapshot in a slot of the new sidecar")
    return footprint(run.trainer.pid)


@pytest.mark.timeout(600)
def test_a_sidecar_that_dies_every_second_costs_steps_and_nothing_else(
    tmp_path: Path,
    fork_server: ForkServer,
    services: ForkedServices,
    record_property: Callable[[str, object], None],
) -> None:
    cadences = Cadences(every=EVERY, local_every=2 * EVERY, object_every=4 * EVERY)
    deaths = 0
    early: Footprint | None = None
    with running_cluster(tmp_path, job=JOB, cadences=cadences, launch=services) as cluster:
        run = start(fork_server, cluster, "--steps", str(STEPS), "--step-delay", "0.012")
        run.until(lambda counts: counts["snapshots"] > 3, what="a few snapshots")
        while run.trainer.status() is None and run.counts()["step"] < LATE:
            sidecar = cluster.nodes["a"].sidecar
            assert sidecar is not None
            assert sidecar.kill().status == -9
            deaths += 1
            time.sleep(0.2)
            cluster.start_sidecar("a")
            if early is None and run.counts()["step"] >= EARLY:
                early = connected_footprint(run)
            else:
                time.sleep(1.0)
        late = connected_footprint(run)
        run.finish()
        counts = run.counts()
        memory = used_bytes(cluster.nodes["a"].memory_dir)

    assert early is not None
    assert_each_due_step_is_accounted_for(counts)
    assert counts["snapshots"] > deaths
    assert_no_growth(early, late, allowed_bytes=2 * MIB)
    assert_as_without_hooks(run, fork_server, steps=STEPS)
    record_property("deaths of the sidecar", deaths)
    record_property("snapshots, skipped", f"{counts['snapshots']}, {counts['skipped']}")
    record_property("trainer, early and late", f"{told(early)}; {told(late)}")
    record_property("memory of the node at the end", f"{memory / MIB:.1f} MiB")


@pytest.mark.timeout(600)
def test_a_sidecar_that_stays_dead_costs_steps_and_nothing_else(
    tmp_path: Path,
    fork_server: ForkServer,
    services: ForkedServices,
    record_property: Callable[[str, object], None],
) -> None:
    cadences = Cadences(every=EVERY, local_every=2 * EVERY, object_every=4 * EVERY)
    with running_cluster(tmp_path, job=JOB, cadences=cadences, launch=services) as cluster:
        run = start(fork_server, cluster, "--steps", str(STEPS), "--step-delay", "0.005")
        run.until(lambda counts: counts["snapshots"] > 3, what="a few snapshots")
        sidecar = cluster.nodes["a"].sidecar
        assert sidecar is not None
        assert sidecar.kill().status == -9
        run.until(lambda counts: counts["step"] >= EARLY, what=f"step {EARLY}")
        early = footprint(run.trainer.pid)
        run.until(lambda counts: counts["step"] >= LATE, what=f"step {LATE}", timeout_s=300)
        late = footprint(run.trainer.pid)
        run.finish()
        counts = run.counts()

    assert_each_due_step_is_accounted_for(counts)
    assert counts["skipped"]["no sidecar"] > STEPS // EVERY // 2
    assert_no_growth(early, late, allowed_bytes=2 * MIB)
    assert_as_without_hooks(run, fork_server, steps=STEPS)
    record_property("snapshots, skipped", f"{counts['snapshots']}, {counts['skipped']}")
    record_property("trainer, early and late", f"{told(early)}; {told(late)}")


@pytest.mark.fault("B97")
@pytest.mark.timeout(600)
def test_300_snapshots_leave_nothing_behind(
    tmp_path: Path,
    fork_server: ForkServer,
    services: ForkedServices,
    record_property: Callable[[str, object], None],
) -> None:
    state_mib, snapshots, early_at = 16, 300, 60
    cadences = Cadences(every=1, local_every=4, object_every=16)
    with running_cluster(tmp_path, job=JOB, cadences=cadences, launch=services) as cluster:
        words = ("--ballast-mib", str(state_mib), "--snapshots", str(snapshots + 150), "--step-delay", "0.05")
        run = start(fork_server, cluster, "--steps", "1", *words)

        def look() -> dict[str, Footprint]:
            assert cluster.coordinator is not None
            services_of = {f"sidecar {name}": node.sidecar for name, node in cluster.nodes.items()}
            found = {name: service.pid for name, service in services_of.items() if service is not None}
            found |= {"coordinator": cluster.coordinator.pid, "trainer": run.trainer.pid}
            return {name: footprint(pid) for name, pid in found.items()}

        run.until(lambda counts: counts["snapshots"] >= early_at, what=f"{early_at} snapshots", timeout_s=300)
        early, early_memory = look(), used_bytes(cluster.memory)
        run.until(lambda counts: counts["snapshots"] >= snapshots, what=f"{snapshots} snapshots", timeout_s=300)
        late, late_memory = look(), used_bytes(cluster.memory)
        run.finish()

    for name in early:
        record_property(f"{name}, early and late", f"{told(early[name])}; {told(late[name])}")
    record_property("memory of both nodes, early and late", f"{early_memory / MIB:.1f}, {late_memory / MIB:.1f} MiB")
    for name in early:
        assert_no_growth(early[name], late[name], allowed_bytes=state_mib * MIB // 2)
    assert late_memory <= early_memory


def told(print_: Footprint) -> str:
    return f"{print_.own_bytes / MIB:.1f} MiB, {print_.files} files, {print_.threads} threads"
