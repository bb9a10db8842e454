"""A broker that freezes, and messages that are muddled on their way: nobody waits, and nothing is torn."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from tests.support.job_in_training import (
    JOB,
    Job,
    arguments,
    assert_as_if_nothing_had_happened,
    assert_trained_through,
    job_in_training,
    ready_step,
)
from tests.support.training import Reference

from toprope.chaos.journal import JournalReader, intervals_s, read_finals
from toprope.chaos.live.cluster import Cadences, Cluster
from toprope.chaos.live.detour import Detour, detour
from toprope.chaos.live.forking import ForkedServices, ForkServer
from toprope.chaos.live.processes import wait_until
from toprope.chaos.live.ranks import World
from toprope.chaos.oracle import compare, torn_restores
from toprope.store.checkpoint.ready import read_manifest
from toprope.store.log.chain import read_log
from toprope.store.objects.directory import DirectoryStore

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(400)]
FROZEN_S = 30.0
MOST_S = 3.0
"""The longest that a step may take on a busy machine, with the tenth of a second that it waits: far less than that."""


@pytest.mark.fault("B136")
def test_a_broker_that_freezes_and_then_dies_and_forgets_holds_up_nobody(
    tmp_path: Path, fork_server: ForkServer, services: ForkedServices, reference: Reference
) -> None:
    steps = 400
    with job_in_training(tmp_path, fork_server, services, steps=steps, delay_s=0.1) as job:
        job.train_to(20)
        broker = job.cluster.broker
        assert broker is not None
        os.kill(broker.pid, signal.SIGSTOP)
        began_s = time.monotonic()
        job.train_to(40)
        time.sleep(max(0.0, began_s + FROZEN_S - time.monotonic()))
        frozen_ready = ready_step(job.cluster)
        assert broker.kill().status == -9
        job.cluster.start_broker()
        job.ranks.finish(timeout_s=300.0)
        job.journal.read()
        assert_as_if_nothing_had_happened(job, reference)
        assert_trained_through(job)
        assert frozen_ready >= 40, "documents go by HTTP while the broker stands still"
        assert_ready_once(job.cluster)
        assert max(intervals_s(job.journal.events)) < MOST_S, "no call of the hook waited for the broker"


def assert_ready_once(cluster: Cluster) -> list[int]:
    """No step of an attempt is READY twice; return the steps."""
    records = [msgspec.json.decode(path.read_bytes()) for path in sorted((cluster.store / JOB / "log").glob("*.json"))]
    steps = [(record["attempt"], record["step"]) for record in records if record["kind"] == "READY"]
    assert len(set(steps)) == len(steps)
    return [step for _, step in steps]


MUDDLED_STEPS, MUDDLED_STEP_S, COMMITS = 300, 0.8, 50
"""Long enough for so many commits: each takes up to 3 s where messages are lost and the machine is busy."""


@contextmanager
def muddled_job(directory: Path, server: ForkServer, services: ForkedServices) -> Iterator[tuple[Job, Detour]]:
    """Four ranks on two nodes, whose messages to and from the broker are repeated, swapped and lost."""
    each = Cadences(every=1, local_every=1, object_every=1)
    cluster = Cluster(directory=directory, job=JOB, cadences=each, launch=services)
    with cluster, detour(directory / "proxy", target=str(cluster.broker_port)) as way:
        cluster.broker_detour = way.port
        cluster.start_broker()
        cluster.start_coordinator()
        for name in "ab":
            cluster.start_sidecar(name)
        way.tell("muddle 7")
        ranks = World(
            server=server,
            directory=directory / "ranks",
            arguments=(*arguments(steps=MUDDLED_STEPS), "--step-delay", str(MUDDLED_STEP_S)),
            world=4,
            cluster=cluster,
            placement=lambda rank: "ab"[rank % 2],
        )
        ranks.start()
        try:
            yield Job(cluster, ranks, JournalReader(ranks.out), MUDDLED_STEPS), way
        finally:
            ranks.stop()


@pytest.mark.fault("B139")
@pytest.mark.timeout(700)
def test_messages_that_are_repeated_swapped_and_lost_change_nothing(
    tmp_path: Path,
    fork_server: ForkServer,
    services: ForkedServices,
    reference: Reference,
    record_property: Callable[[str, object], None],
) -> None:
    with muddled_job(tmp_path, fork_server, services) as (job, way):
        job.ranks.finish(timeout_s=500.0)
        wait_until(lambda: ready_step(job.cluster) == MUDDLED_STEPS, what="the last step is READY", timeout_s=60)
        steps = assert_ready_once(job.cluster)
        store = DirectoryStore(job.cluster.store)
        state = read_log(store, JOB)
        for seq in state.live:
            ranks = [shard.rank for shard in read_manifest(store, state, seq)[0].shards]
            assert sorted(ranks) == [0, 1, 2, 3], "each READY has four ranks"
        muddled = [text for text in way.done() if text.startswith("muddled")]
    record_property(f"commits of {MUDDLED_STEPS} steps", len(steps))
    assert len(steps) >= COMMITS, "those that a busy machine leaves out are superseded by later ones"
    assert any(" 0 lost" not in text for text in muddled)
    assert any(" 0 swapped" not in text for text in muddled)
    job.journal.read()
    assert torn_restores(job.journal.events) == ()
    assert compare(
        read_finals(job.ranks.out), reference(world=4, arguments=arguments(steps=MUDDLED_STEPS)), world=4
    ).identical
