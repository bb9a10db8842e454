"""A store that fails for a minute: training goes on and people are told, or with ``strict`` it ends with the cause."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.outages import _launched
from tests.support.strict_s3 import ACCESS_KEY, Operation, Rule, StrictS3, environment, strict_s3, write_credentials

from toprope.chaos.live.ask import get
from toprope.chaos.live.cluster import Cadences, Cluster
from toprope.chaos.live.forking import ForkedServices, ForkServer
from toprope.chaos.live.processes import wait_until
from toprope.chaos.live.ranks import World
from toprope.store.log.chain import read_log
from toprope.store.objects.opening import open_store

JOB = "failing"
OUTAGE_S = 60.0
MOST_S = 2.0
pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(400)]


@contextmanager
def failing(
    directory: Path, server: ForkServer, services: ForkedServices, *, steps: int, strict: bool
) -> Iterator[tuple[Cluster, World, StrictS3]]:
    """Yield a job in training before a store that a test can let fail."""
    write_credentials(directory / "credentials", ACCESS_KEY)
    secrets = environment(directory / "credentials")
    each = Cadences(every=4, local_every=4, object_every=4)
    launch = functools.partial(_launched, services, secrets)
    with (
        strict_s3() as store,
        Cluster(directory=directory, job=JOB, cadences=each, launch=launch, root=store.root("team")) as cluster,
    ):
        cluster.start_broker()
        cluster.start_coordinator()
        for name in "ab":
            cluster.start_sidecar(name)
        world = World(
            server=server,
            directory=directory / "ranks",
            arguments=("--job", JOB, "--steps", str(steps), "--step-delay", "0.5"),
            world=2,
            cluster=cluster,
            placement=lambda rank: "ab"[rank],
            target="tests.support.uneven_rank:main",
            env=lambda _: {"STRICT": "1"} if strict else {},
        )
        world.start()
        try:
            yield cluster, world, store
        finally:
            world.stop()


def status(cluster: Cluster) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(get(cluster.coordinator_url, "/v1/status") or b'{"alarms": [], "ready_step": 0}')
    return found


def break_down(store: StrictS3) -> None:
    """Let all writes fail from now on."""
    writes: tuple[Operation, ...] = ("PutObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload")
    store.rules[:] = [Rule(operation=one, fault="500 InternalError", times=1 << 30) for one in writes]


@pytest.mark.fault("B101")
def test_training_goes_through_a_store_that_fails_for_a_minute_and_people_are_told(
    tmp_path: Path,
    fork_server: ForkServer,
    services: ForkedServices,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_read(tmp_path, monkeypatch)
    with failing(tmp_path, fork_server, services, steps=160, strict=False) as (cluster, world, store):
        world.until(lambda: status(cluster)["ready_step"] >= 4, what="a step is READY")
        break_down(store)
        began_s, before = time.monotonic(), status(cluster)["ready_step"]
        wait_until(
            lambda: any("READY is" in one for one in status(cluster)["alarms"]), what="alarm", timeout_s=OUTAGE_S
        )
        alarms = " ".join(status(cluster)["alarms"])
        assert "the object tier fails" in alarms
        time.sleep(max(0.0, began_s + OUTAGE_S - time.monotonic()))
        assert status(cluster)["ready_step"] <= before + 4
        assert world.statuses() == {}, "training goes on"
        store.rules.clear()
        world.until(lambda: status(cluster)["ready_step"] > before + 20, what="it catches up", timeout_s=90)
        world.finish(timeout_s=120)
        for rank in range(2):
            steps = [json.loads(line) for line in (world.out / f"rank-{rank}.jsonl").read_text().splitlines()][1:]
            assert max(one["took_s"] for one in steps) < MOST_S
        wait_until(lambda: status(cluster)["ready_step"] == 160, what="the last step is READY", timeout_s=60)
        state = read_log(open_store(cluster.root), JOB)
        assert [one.step for _, one in sorted(state.readies.items())] == sorted(
            {r.step for r in state.readies.values()}
        )


@pytest.mark.fault("B101")
def test_with_strict_a_store_that_fails_ends_training_with_its_cause(
    tmp_path: Path, fork_server: ForkServer, services: ForkedServices
) -> None:
    with failing(tmp_path, fork_server, services, steps=160, strict=True) as (cluster, world, store):
        world.until(lambda: status(cluster)["ready_step"] >= 4, what="a step is READY")
        break_down(store)
        wait_until(lambda: len(world.statuses()) == 2, what="both ranks end", timeout_s=OUTAGE_S)
        assert 0 not in world.statuses().values()
        said = world.log(0).read_text() + world.log(1).read_text()
        assert "HookError: what is saved is not as safe as it should be: the object tier fails" in said
        assert "InternalError" in said


def let_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process read the store as the services do."""
    for name, value in environment(directory / "credentials").items():
        monkeypatch.setenv(name, value)
