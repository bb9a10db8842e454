"""Wall clocks that are hours off and jump: no node is given up for that, and what is deleted is what the log says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import pytest
from tests.support.job_in_training import JOB, Job, arguments, assert_as_if_nothing_had_happened, ready_step
from tests.support.training import Reference

from toprope.__main__ import main as ckpt
from toprope.chaos.journal import JournalReader
from toprope.chaos.live.ask import get
from toprope.chaos.live.cluster import Cadences, Cluster, spawn
from toprope.chaos.live.forking import ForkServer
from toprope.chaos.live.processes import Running, wait_until
from toprope.chaos.live.ranks import World
from toprope.coordinator.overview import Overview
from toprope.store.log.chain import read_log
from toprope.store.objects.opening import open_store

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(300)]
STEPS = 160
CLOCK = """
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long off(void) {
    const char *skew = getenv("CLOCK_SKEW_S");
    struct timespec since;
    if (skew == NULL) return 0;
    if (strcmp(skew, "jumping") != 0) return atol(skew);
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &since);
    return 3600 * (since.tv_sec * 7 % 5 - 2);
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    int answer = syscall(SYS_clock_gettime, clock, at);
    if (answer == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += off();
    return answer;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at != NULL) *at = now.tv_sec;
    return now.tv_sec;
}
"""


def off_by(clock: Mapping[str, str], name: str, words: Sequence[str], *, log: Path, env: Mapping[str, str]) -> Running:
    """Start ``ckpt`` with a wall clock of its own."""
    return spawn(name, words, log=log, env={**env, **clock})


def overview(cluster: Cluster) -> Overview | None:
    body = get(cluster.coordinator_url, "/v1/status")
    return None if body is None else msgspec.json.decode(body, type=Overview)


@pytest.mark.fault("B72")
@pytest.mark.parametrize("skew", ["7200", "-7200", "jumping"])
def test_a_wall_clock_that_is_off_costs_no_node_and_deletes_nothing_but_what_is_condemned(
    tmp_path: Path, fork_server: ForkServer, reference: Reference, skew: str
) -> None:
    """Coordinator and nodes have it; the store, whose files have the right times, and the trainers don't."""
    clock = {"LD_PRELOAD": str(compiled(tmp_path)), "CLOCK_SKEW_S": skew}
    if skew != "jumping":
        words = [sys.executable, "-c", "import time; print(time.time())"]
        told = subprocess.run(words, env=os.environ | clock, capture_output=True, text=True, check=True).stdout
        assert abs(float(told) - (tmp_path / "clock.so").stat().st_mtime - int(skew)) < 60
    cadences = Cadences(every=4, local_every=4, object_every=4)
    with Cluster(directory=tmp_path, job=JOB, cadences=cadences, launch=partial(off_by, clock)) as cluster:
        cluster.coordinator_words = ("--retain", "last=2")
        cluster.start_broker()
        cluster.start_coordinator()
        for name in "ab":
            cluster.start_sidecar(name)
        ranks = World(
            server=fork_server,
            directory=tmp_path / "ranks",
            arguments=(*arguments(steps=STEPS), "--step-delay", "0.1"),
            world=2,
            cluster=cluster,
            placement=lambda rank: "ab"[rank],
        )
        job = Job(cluster, ranks, JournalReader(ranks.out), STEPS)
        ranks.start()
        try:
            ranks.until(partial(seen_alive_to_the_end, job), what="the end", timeout_s=120)
        finally:
            ranks.stop()
        assert_as_if_nothing_had_happened(job, reference)
        wait_until(lambda: ready_step(cluster) == STEPS, what="the last step is READY", timeout_s=60)
        wait_until(lambda: kept(cluster) == 2, what="old ones go", timeout_s=60)
        log = cluster.log("coordinator").read_text()
    assert ranks.starts == 1
    assert "does not answer" not in log
    state = read_log(open_store(cluster.root), JOB)
    assert [state.readies[seq].step for seq in state.live][-1] == STEPS
    assert ckpt(["verify", cluster.root, "--job", JOB]) == 0


def compiled(directory: Path) -> Path:
    """Return a library that, loaded first, gives a process a wall clock that is off."""
    (directory / "clock.c").write_text(CLOCK)
    library = directory / "clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, directory / "clock.c"], check=True)
    return library


def seen_alive_to_the_end(job: Job) -> bool:
    """Look at the nodes once; each is there. Say whether training is over."""
    seen = overview(job.cluster)
    assert seen is not None
    assert [(node.node, node.alive) for node in seen.nodes] == [("a", True), ("b", True)]
    return len(job.ranks.statuses()) == job.ranks.world


def kept(cluster: Cluster) -> int:
    """Return of how many steps there are shards in the store."""
    return len(list((cluster.store / JOB / "shards" / "a1").iterdir()))
