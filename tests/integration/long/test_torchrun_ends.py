"""Ends under torchrun: a job that is done is started again, and one whose machine is to go is told so."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.support.training import Reference

from toprope.chaos.journal import JournalReader, read_finals
from toprope.chaos.live.cluster import Cadences, Cluster, running_cluster
from toprope.chaos.live.forking import ForkedServices
from toprope.chaos.live.processes import Process, wait_until
from toprope.chaos.live.training import Training, example_script, start_agent, start_rendezvous
from toprope.chaos.oracle import compare

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(600)]
RANKS = 2


@contextlib.contextmanager
def agent(cluster: Cluster, out: Path, *words: str, ranks: int, restarts: int) -> Iterator[Process]:
    """Run torchrun on node a, with all ranks of the world."""
    rendezvous, port = start_rendezvous(cluster)
    training = Training(script=example_script(), arguments=(*words, "--out", str(out)), nodes=1, ranks=ranks)
    started = start_agent(cluster, cluster.nodes["a"], training, rendezvous_port=port, restarts=restarts)
    try:
        yield started
    finally:
        if started.status() is None:
            started.stop()
        rendezvous.stop()


@pytest.mark.fault("B48")
def test_a_job_that_is_done_ends_well_when_it_is_started_again(tmp_path: Path, services: ForkedServices) -> None:
    words = ("--job", "done", "--size", "tiny", "--steps", "100")
    often = Cadences(every=4, local_every=4, object_every=4)
    with running_cluster(tmp_path, job="done", cadences=often, launch=services, nodes=("a",)) as cluster:
        out = tmp_path / "run"
        with agent(cluster, out, *words, ranks=1, restarts=3) as first:
            assert first.wait(240) == 0
        wait_until(lambda: ready_step(cluster) == 100, what="step 100 is READY", timeout_s=120)
        log = records(cluster)
        finals = read_finals(out)
        with agent(cluster, out, *words, ranks=1, restarts=3) as second:
            assert second.wait(240) == 0
        new = [kind for name, kind in records(cluster).items() if name not in log]
        journal = JournalReader(out)
        journal.read()
    assert [kind for kind in new if kind != "ATTEMPT"] == [], "nothing was saved"
    assert new == ["ATTEMPT"]
    begins = [event.step for event in journal.events if event.event == "begin"]
    assert begins == [0, 100], "started twice, and never again"
    assert read_finals(out) == finals


def test_torchrun_that_is_told_to_end_lets_its_ranks_save_one_step(
    tmp_path: Path, services: ForkedServices, reference: Reference
) -> None:
    arguments = ("--job", "goes", "--size", "tiny", "--steps", "60")
    words = (*arguments, "--step-delay", "0.1", "--on-sigterm")
    seldom = Cadences(every=64, local_every=64, object_every=64)
    with running_cluster(tmp_path, job="goes", cadences=seldom, launch=services, nodes=("a",)) as cluster:
        out = tmp_path / "run"
        journal = JournalReader(out)

        def newest() -> int:
            journal.read()
            return journal.newest_step()

        with agent(cluster, out, *words, ranks=RANKS, restarts=0) as told:
            wait_until(lambda: newest() >= 5, what="step 5", timeout_s=240, alive=[told])
            os.kill(told.pid, signal.SIGTERM)
            assert told.wait(90) != 0
        journal.read()
        failed = {event.rank: event.error for event in journal.events if event.event == "failed"}
        last = newest() + 1
        text = f"PreemptedError: ends after step {last}, which is saved: ready"
        assert failed == dict.fromkeys(range(RANKS), text), "one node has no peer: the store it was"
        with agent(cluster, out, *words, ranks=RANKS, restarts=0) as again:
            assert again.wait(240) == 0
        journal.read()
    assert {event.step for event in journal.events if event.event == "begin"} == {0, last}
    judgement = compare(read_finals(out), reference(world=RANKS, arguments=arguments), world=RANKS)
    assert judgement.identical, judgement.differences


def ready_step(cluster: Cluster) -> int:
    desired = cluster.desired()
    return 0 if desired is None else desired.ready_step


def records(cluster: Cluster) -> dict[str, str]:
    """Return the records of the job's log, by name, each with its kind."""
    found = {}
    for path in sorted((cluster.store / cluster.job / "log").glob("*.json")):
        found[path.name] = str(msgspec.json.decode(path.read_bytes())["kind"])
    return found
