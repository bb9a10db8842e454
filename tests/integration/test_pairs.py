"""Two things are away at once while a rank is killed; the final state is as if nothing had happened."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.job_in_training import (
    Job,
    assert_as_if_nothing_had_happened,
    assert_the_last_is_ready,
    job_in_training,
)
from tests.support.outages import KINDS, Outages, job_with_a_bucket, lost_steps
from tests.support.training import Reference

from toprope.chaos.live.forking import ForkedServices, ForkServer
from toprope.chaos.oracle import steps_lost_allowed

STEPS, EVERY, STEP_S = 40, 4, 0.1
AWAY_S = 5.0
PAIRS = list(itertools.combinations(KINDS, 2))
pytestmark = pytest.mark.slow


@contextmanager
def in_training(
    directory: Path, pair: tuple[str, str], server: ForkServer, services: ForkedServices
) -> Iterator[Outages]:
    """Only who takes the store away waits for a server of it to start."""
    if "store" in pair:
        with job_with_a_bucket(directory, server, services, steps=STEPS, delay_s=STEP_S) as (job, way):
            yield Outages(job=job, way_to_store=way)
    else:
        with job_in_training(directory, server, services, steps=STEPS, delay_s=STEP_S) as job:
            yield Outages(job=job)


def train_through(outages: Outages, pair: tuple[str, str], *, away_s: float) -> Job:
    """Take both away, kill a rank, let the launcher start all ranks again, and bring both back later."""
    job = outages.job
    job.train_to(STEPS // 4)
    blow = job.before_a_blow()
    for kind in pair:
        outages.begin(kind)
    assert job.ranks.kill(0) != 0  # it may have missed a dead one and ended
    job.ranks.stop()
    blow.newest_step = job.newest_step()
    if "node" in outages.away:  # a launcher has nowhere to put ranks before
        outages.end("node")
    job.ranks.start()
    time.sleep(away_s)
    for kind in ("store", "broker", "coordinator"):  # a coordinator starts where it can read the log
        if kind in outages.away:
            outages.end(kind)
    job.finish()
    lost, protected = lost_steps(job, blow)
    assert 0 <= lost <= steps_lost_allowed(newest_due_protected=protected, every=EVERY), blow
    return job


@pytest.mark.parametrize(
    "pair",
    [pytest.param(pair, marks=[] if pair == ("coordinator", "node") else pytest.mark.long) for pair in PAIRS],
    ids="-".join,
)
def test_two_things_are_away_while_a_rank_is_killed(
    pair: tuple[str, str], tmp_path: Path, fork_server: ForkServer, services: ForkedServices, reference: Reference
) -> None:
    with in_training(tmp_path, pair, fork_server, services) as outages:
        job = train_through(outages, pair, away_s=1.0 if pair == ("coordinator", "node") else AWAY_S)
        assert_as_if_nothing_had_happened(job, reference)
        assert_the_last_is_ready(job)
