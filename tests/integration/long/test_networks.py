"""Nodes in namespaces whose links are down or lossy: recovery, and no false commit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.netns_job import EVERY, NetJob, arguments, net_job, warm_for_namespaces
from tests.support.training import Reference

from toprope.chaos.journal import read_finals
from toprope.chaos.live.forking import ForkServer
from toprope.chaos.live.netns import why_not
from toprope.chaos.live.processes import become_subreaper
from toprope.chaos.oracle import compare, torn_restores
from toprope.store.log.chain import read_log
from toprope.store.look.verify import verify_checkpoint, verify_facts
from toprope.store.objects.directory import DirectoryStore

STEPS, HIT_AT = 60, 18
pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


@pytest.fixture(scope="module")
def in_namespaces() -> Iterator[ForkServer]:
    become_subreaper()
    with warm_for_namespaces() as server:
        yield server


def begin(job: NetJob, nodes: str = "ab") -> None:
    for node in job.network.nodes.values():
        job.start_sidecar(node)
    job.train(nodes)
    job.train_to(HIT_AT)
    job.wait(lambda desired: desired.protected_step >= EVERY, what="a step is protected")


def assert_as_if_nothing_had_happened(job: NetJob, reference: Reference) -> None:
    job.journal.read()
    assert torn_restores(job.journal.events) == ()
    judgement = compare(read_finals(job.ranks.out), reference(world=2, arguments=arguments(steps=STEPS)), world=2)
    assert judgement.differences == ()
    assert judgement.identical


def assert_no_false_commit(job: NetJob) -> None:
    """Each READY has all that it names; nothing of an attempt came after the next had opened."""
    store = DirectoryStore(job.directory / "store")
    state = read_log(store, "networks")  # it replays the log by the rules, and fails where one is broken
    assert state.live
    assert [damage for seq in state.live for damage in verify_checkpoint(store, state, seq).damages] == []
    assert verify_facts(store, state) == ()


def test_a_node_whose_link_is_down_is_replaced_and_what_it_still_says_counts_for_nothing(
    tmp_path: Path, in_namespaces: ForkServer, reference: Reference
) -> None:
    with net_job(tmp_path, in_namespaces, steps=STEPS, nodes="abc") as job:
        begin(job)
        lost = job.network.nodes["b"]
        lost.cut()
        job.wait_lost()
        job.wait(lambda desired: desired.attempt is not None, what="the coordinator serves")
        newest = job.newest_step()
        job.train("ac")
        job.train_to(newest + EVERY)
        lost.heal()  # it is back, with slots and copies of an attempt that is over
        job.ranks.finish(timeout_s=240.0)
        job.wait(lambda desired: desired.ready_step == STEPS - STEPS % EVERY, what="the last step is READY")
        assert_as_if_nothing_had_happened(job, reference)
        assert_no_false_commit(job)
        begins = [event for event in job.journal.events if event.event == "begin" and event.step > 0]
        assert {event.step for event in begins} != set()
        assert newest - min(event.step for event in begins) <= 2 * EVERY
        sources = {shard["tier"] for event in begins for shard in event.restored}
        assert sources & {"memory", "peer"}, "it went on from memory"


def test_a_lossy_link_costs_time_and_nothing_else(
    tmp_path: Path, in_namespaces: ForkServer, reference: Reference
) -> None:
    with net_job(tmp_path, in_namespaces, steps=STEPS) as job:
        begin(job)
        job.network.nodes["b"].lose(10)
        job.ranks.finish(timeout_s=300.0)
        job.wait(lambda desired: desired.ready_step == STEPS - STEPS % EVERY, what="the last step is READY")
        assert job.ranks.starts == 1, "no rank was lost"
        assert_as_if_nothing_had_happened(job, reference)
        assert_no_false_commit(job)
