"""The store takes data and refuses the log, first for want of rights, then for want of room."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.job_in_training import JOB, Job, arguments, ready_step
from tests.support.outages import _launched
from tests.support.strict_s3 import ACCESS_KEY, Call, Rule, StrictS3, environment, strict_s3, write_credentials
from tests.support.training import Reference

from toprope.chaos.journal import JournalReader, read_finals
from toprope.chaos.live.ask import get
from toprope.chaos.live.cluster import Cadences, Cluster
from toprope.chaos.live.forking import ForkedServices, ForkServer
from toprope.chaos.live.processes import wait_until
from toprope.chaos.live.ranks import World
from toprope.chaos.oracle import compare
from toprope.store.log.chain import read_log
from toprope.store.objects.opening import open_store

STEPS = 160
WORLD = 4
EVERY = 4
MOST_S = 2.0
"""The longest that a step may take, with the delay that each has."""
pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(400)]


def of_the_log(call: Call) -> bool:
    return f"/{JOB}/log/" in f"/{call.key}"


@pytest.fixture
def strict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StrictS3]:
    write_credentials(tmp_path / "credentials", ACCESS_KEY)
    for name, value in environment(tmp_path / "credentials").items():
        monkeypatch.setenv(name, value)
    with strict_s3() as server:
        yield server


@pytest.fixture
def job(tmp_path: Path, strict: StrictS3, fork_server: ForkServer, services: ForkedServices) -> Iterator[Job]:
    """A job in training before that server."""
    launch = functools.partial(_launched, services, environment(tmp_path / "credentials"))
    cadences = Cadences(every=EVERY, local_every=EVERY, object_every=EVERY)
    with Cluster(directory=tmp_path, job=JOB, cadences=cadences, launch=launch, root=strict.root("team")) as cluster:
        cluster.start_broker()
        cluster.start_coordinator()
        for name in "ab":
            cluster.start_sidecar(name)
        ranks = World(
            server=fork_server,
            directory=tmp_path / "ranks",
            arguments=(*arguments(steps=STEPS), "--step-delay", "0.1"),
            world=WORLD,
            cluster=cluster,
            placement=lambda rank: "ab"[rank % 2],
        )
        ranks.start()
        try:
            yield Job(cluster, ranks, JournalReader(ranks.out), STEPS)
        finally:
            ranks.stop()


@pytest.mark.fault("B53")
def test_while_the_log_is_refused_no_rank_waits_and_then_each_step_is_ready_once(
    job: Job, strict: StrictS3, reference: Reference
) -> None:
    wait_until(lambda: ready_step(job.cluster) >= 2 * EVERY, what="a READY checkpoint", timeout_s=60)
    stale = refuse_the_log(job, strict)
    job.ranks.stop()
    newest = job.newest_step()
    job.ranks.start()  # its attempt can't be put into the log
    told = job.ranks.log(0)
    wait_until(lambda: "unavailable: " in told.read_text(), what="it is told", timeout_s=60)
    assert "asking again for" in told.read_text(), "and for how long it will"
    assert job.ranks.statuses() == {}
    strict.rules.clear()
    job.ranks.until(lambda: job.newest_step() > newest, what="it goes on", timeout_s=60)
    job.ranks.finish(timeout_s=200)
    job.journal.read()
    (restored,) = job.restored()
    assert stale < restored <= newest, "the newest that was whole, READY or not"
    wait_until(lambda: ready_step(job.cluster) == STEPS, what="the last step is READY", timeout_s=60)
    expected = reference(world=WORLD, arguments=arguments(steps=STEPS))
    judgement = compare(read_finals(job.ranks.out), expected, world=WORLD)
    assert judgement.identical, judgement.differences
    assert longest_step_s(job) < MOST_S
    state = read_log(open_store(job.cluster.root), JOB)
    steps = [state.readies[seq].step for seq in sorted(state.readies)]
    assert steps == sorted(set(steps)), "each step at most once, in order"


def refuse_the_log(job: Job, strict: StrictS3) -> int:
    """Let the store refuse the log from now on, and see training go on; return the step that stays READY."""
    refused = Rule(operation="PutObject", fault="403 AccessDenied", times=2, when=of_the_log)
    full = Rule(operation="PutObject", fault="507 InsufficientStorage", times=1 << 30, when=of_the_log)
    strict.rules[:] = [refused, full]
    wait_until(lambda: refused.times == 0 and full.times < 1 << 30, what="both were met", timeout_s=60)
    stale = ready_step(job.cluster)
    job.train_to(job.newest_step() + 40)
    assert ready_step(job.cluster) == stale, "it is not said to be committed"
    alarms = json.loads(get(job.cluster.coordinator_url, "/v1/status") or b"{}")["alarms"]
    assert any("READY is" in alarm for alarm in alarms), alarms
    assert newest_manifest(strict) > stale, "the data of a later step is there, whole"
    return stale


def newest_manifest(strict: StrictS3) -> int:
    """Return the newest step that the store has a manifest of."""
    names = [key.rpartition("/")[2] for key in tuple(strict.objects) if f"{JOB}/manifests/" in key]
    return max(int(name.split("-s")[1][:9]) for name in names)


def longest_step_s(job: Job) -> float:
    """Return the longest time between two steps of one process."""
    by_pid: dict[int, list[float]] = {}
    for event in job.journal.events:
        if event.event == "step":
            by_pid.setdefault(event.pid, []).append(event.monotonic_s)
    return max(b - a for times in by_pid.values() for a, b in itertools.pairwise(times))
