"""Trainers that get SIGTERM end at a step that all ranks save, and the next launch goes on from exactly there."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.support.training import Reference

from toprope.chaos.journal import JournalReader, read_finals
from toprope.chaos.live.cluster import Cadences, running_cluster
from toprope.chaos.live.forking import ForkedServices, ForkServer
from toprope.chaos.live.processes import wait_until
from toprope.chaos.live.ranks import World
from toprope.chaos.oracle import compare, torn_restores

STEPS = 60
SELDOM = Cadences(every=64, local_every=64, object_every=64)
"""No step of this job is due."""
ENDS_AS_BY_SIGTERM = 128 + signal.SIGTERM


@pytest.mark.slow
@pytest.mark.parametrize("told", [(1,), pytest.param((0, 1), marks=pytest.mark.long)])
def test_trainers_end_at_one_step_and_go_on_from_it(
    told: tuple[int, ...], tmp_path: Path, fork_server: ForkServer, services: ForkedServices, reference: Reference
) -> None:
    arguments = ("--job", "leaves", "--size", "tiny", "--steps", str(STEPS))
    with running_cluster(tmp_path, job="leaves", cadences=SELDOM, launch=services) as cluster:
        ranks = World(
            server=fork_server,
            directory=tmp_path / "ranks",
            arguments=(*arguments, "--step-delay", "0.1", "--on-sigterm"),
            world=2,
            cluster=cluster,
            placement=lambda rank: "ab"[rank],
        )
        journal = JournalReader(ranks.out)

        def newest() -> int:
            journal.read()
            return journal.newest_step()

        ranks.start()
        try:
            ranks.until(lambda: newest() >= 5, what="step 5")
            for rank in told:
                os.kill(ranks.pids[rank], signal.SIGTERM)
            wait_until(lambda: len(ranks.statuses()) == 2, what="the end of both ranks", timeout_s=60)
            assert set(ranks.statuses().values()) == {ENDS_AS_BY_SIGTERM}, ranks.log(0).read_text()
            last = newest() + 1  # which its trainer does not come to note
            assert 5 < last < STEPS
            for rank in range(2):
                assert f"ends after step {last}, which is saved: " in ranks.log(rank).read_text()
            ranks.start()
            ranks.finish()
        finally:
            ranks.stop()
        journal.read()
        assert {event.step for event in journal.events if event.event == "begin"} == {0, last}
        assert torn_restores(journal.events) == ()
        judgement = compare(read_finals(ranks.out), reference(world=2, arguments=arguments), world=2)
        assert judgement.identical, judgement.differences
