"""The object store is away while ranks die: they go on from memory, and the log has it all afterwards."""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.support.job_in_training import (
    EVERY,
    Job,
    assert_as_if_nothing_had_happened,
    assert_the_last_is_ready,
)
from tests.support.outages import Outages, job_with_a_bucket
from tests.support.training import Reference

from toprope.chaos.live.detour import detour
from toprope.chaos.live.forking import ForkedServices, ForkServer
from toprope.chaos.live.processes import Process, wait_until
from toprope.chaos.live.s3_server import running_s3
from toprope.store.log.chain import read_log
from toprope.store.objects.opening import open_store

STEPS, STEP_S = 48, 0.1
pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(400)]


def status(job: Job) -> dict[str, object]:
    with urllib.request.urlopen(f"{job.cluster.coordinator_url}/v1/status", timeout=5) as answer:
        view: dict[str, object] = json.load(answer)
    return view


def begun(job: Job) -> int:
    """Return the step that the ranks which run now began at, or -1."""
    pids = set(job.ranks.pids.values())
    job.journal.read()
    steps = {event.step for event in job.journal.events if event.event == "begin" and event.pid in pids}
    return max(steps, default=-1)


def kill_and_start_again(job: Job) -> int:
    """Kill a rank, let the launcher start all again, and wait until they train; return the step that they began at."""
    assert job.ranks.kill(0) != 0
    job.ranks.stop()
    job.ranks.start()
    job.ranks.until(lambda: begun(job) >= 0, what="they begin again", timeout_s=120)
    return begun(job)


def test_ranks_that_die_twice_while_the_store_is_away_go_on_from_memory_each_time(
    tmp_path: Path,
    fork_server: ForkServer,
    services: ForkedServices,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ("--on-log-outage", "proceed")
    with job_with_a_bucket(tmp_path, fork_server, services, steps=STEPS, delay_s=STEP_S, coordinator_words=words) as (
        job,
        way,
    ):
        outages = Outages(job=job, way_to_store=way)
        job.train_to(STEPS // 4)
        newest = job.newest_step()
        outages.begin("store")
        first = kill_and_start_again(job)
        assert first >= newest - 2 * EVERY
        view = status(job)
        assert view["attempt"]["provisional"] is True  # type: ignore[index] # JSON
        assert any("opened without the log" in str(alarm) for alarm in view["alarms"])  # type: ignore[attr-defined]
        job.train_to(first + 3 * EVERY)
        second = kill_and_start_again(job)
        assert second > first
        job.train_to(second + EVERY)
        outages.end("store")
        job.finish()
        assert_as_if_nothing_had_happened(job, reference)
        assert_the_last_is_ready(job)
        assert status(job)["attempt"]["provisional"] is False  # type: ignore[index] # JSON
        for name, value in dict(job.cluster.launch.args[1]).items():  # type: ignore[attr-defined] # a partial
            monkeypatch.setenv(name, value)
        state = read_log(open_store(job.cluster.root), job.cluster.job)
    assert [one.from_step for one in state.attempts] == [0, first, second]
    assert [one.held is not None for one in state.attempts[1:]] == [True, True]
    assert isinstance(state.attempts[1].decided_at, int)
    assert state.attempts[1].decided_at == state.attempts[2].decided_at


def test_a_coordinator_whose_store_is_away_when_it_starts_waits_for_it_and_says_so(tmp_path: Path) -> None:
    with running_s3(tmp_path / "s3") as s3:
        s3.make_bucket("checkpoints")
        with detour(tmp_path / "proxy", target=str(urlsplit(s3.endpoint).port)) as way:
            way.tell("cut")
            endpoint, ready = f"http://127.0.0.1:{way.port}", tmp_path / "ready"
            words = [sys.executable, "-m", "toprope", "coordinator", "--job", "waits", "--ready-file", str(ready)]
            root = s3.root("checkpoints", "team", endpoint=endpoint)
            log = tmp_path / "coordinator.log"
            coordinator = Process("coordinator", [*words, "--store", root], log=log, env=s3.environment)
            try:
                said = "waits for the object store, and serves nobody before"
                wait_until(lambda: said in log.read_text(), what=said, timeout_s=60, alive=[coordinator])
                assert not ready.exists()
                way.tell("pass")
                wait_until(ready.exists, what="it serves", timeout_s=60, alive=[coordinator])
            finally:
                coordinator.stop()


def test_a_coordinator_whose_store_refuses_it_ends_and_says_why(tmp_path: Path) -> None:
    with running_s3(tmp_path / "s3") as s3:
        s3.make_bucket("checkpoints")
        keys = s3.credentials.read_text().splitlines()
        wrong = tmp_path / "wrong"
        wrong.write_text("\n".join(f"{line}x" if "secret" in line else line for line in keys))
        env, log = {**s3.environment, "AWS_SHARED_CREDENTIALS_FILE": str(wrong)}, tmp_path / "coordinator.log"
        words = [sys.executable, "-m", "toprope", "coordinator", "--job", "ends", "--store", s3.root("checkpoints")]
        coordinator = Process("coordinator", words, log=log, env=env)
        try:
            assert coordinator.wait(60) == 4, log.read_text()
        finally:
            coordinator.stop()
        assert "refuses access" in log.read_text()
