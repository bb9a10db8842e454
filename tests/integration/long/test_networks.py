"""Nodes in namespaces whose links are cut, cut one way, slow or delayed: recovery, and no false commit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.netns_job import (
    EVERY,
    NetJob,
    assert_as_if_nothing_had_happened,
    assert_no_false_commit,
    begin,
    finish,
    net_job,
)
from tests.support.training import Reference

from toprope.chaos.live.detour import detour
from toprope.chaos.live.forking import ForkServer
from toprope.chaos.live.netns import NetNode, why_not

STEPS, HIT_AT = 60, 18
pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


def cut_out(node: NetNode) -> None:
    node.cut_way("out")


def cut_in(node: NetNode) -> None:
    node.cut_way("in")


@pytest.mark.parametrize("cut", [NetNode.cut, cut_out, cut_in], ids=["down", "out", "in"])
def test_a_node_that_is_cut_off_is_replaced_and_what_it_still_says_counts_for_nothing(
    cut: Callable[[NetNode], None], tmp_path: Path, fork_server: ForkServer, reference: Reference
) -> None:
    with net_job(tmp_path, fork_server, steps=STEPS, nodes="abc") as job:
        begin(job, to=HIT_AT)
        lost = job.network.nodes["b"]
        cut(lost)
        job.wait_lost()
        job.wait(lambda desired: desired.attempt is not None, what="the coordinator serves")
        newest = job.newest_step()
        job.train("ac")
        job.train_to(newest + EVERY)
        lost.heal()  # it is back, with slots and copies of an attempt that is over
        finish(job)
        assert_as_if_nothing_had_happened(job, reference)
        assert_no_false_commit(job)
        assert_went_on_from_memory(job, newest)


def assert_went_on_from_memory(job: NetJob, newest: int) -> None:
    """Little was lost of what had been trained when the ranks gave each other up."""
    begins = [event for event in job.journal.events if event.event == "begin" and event.step > 0]
    assert begins
    assert newest - min(event.step for event in begins) <= 2 * EVERY
    assert {shard["tier"] for event in begins for shard in event.restored} & {"memory", "peer"}


def test_a_slow_link_costs_time_and_nothing_else(tmp_path: Path, fork_server: ForkServer, reference: Reference) -> None:
    with net_job(tmp_path, fork_server, steps=STEPS) as job:
        begin(job, to=HIT_AT)
        job.network.nodes["b"].slow(3000)
        finish(job)
        assert job.ranks.starts == 1, "no rank was lost"
        assert_as_if_nothing_had_happened(job, reference)
        assert_no_false_commit(job)


def test_a_coordinator_that_is_far_away_is_late_and_nothing_else(
    tmp_path: Path, fork_server: ForkServer, reference: Reference
) -> None:
    with net_job(tmp_path, fork_server, steps=STEPS) as job:
        target, here = f"{job.network.address}:{job.coordinator_port}", job.network.address
        with detour(tmp_path / "proxy", target=target, host=here) as way:
            job.way_to_coordinator = f"http://{here}:{way.port}"
            way.tell("delay 0.3")
            begin(job, to=HIT_AT)
            for rank in range(2):
                assert job.ranks.kill(rank) in {-9, 1}
            newest = job.newest_step()
            job.train("ab")
            finish(job)
            assert any(text.startswith("delay") for text in way.done())
            assert_as_if_nothing_had_happened(job, reference)
            assert_no_false_commit(job)
            assert_went_on_from_memory(job, newest)
