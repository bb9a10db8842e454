"""Four ranks of which some can't save a step, or which start apart: nobody waits for ever, what is whole is kept."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from toprope.chaos.live.ask import get
from toprope.chaos.live.cluster import Cadences, Cluster, running_cluster
from toprope.chaos.live.forking import ForkedServices, ForkServer
from toprope.chaos.live.processes import wait_until
from toprope.chaos.live.ranks import World
from toprope.store.log.chain import read_log
from toprope.store.objects.directory import DirectoryStore

JOB = "uneven"
WORLD, STEPS = 4, 10
MOST_S = 2.0
"""The longest that an end_step may take: far less than any timeout of a collective."""
EACH = Cadences(every=1, local_every=1, object_every=1)
pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(900)]


@contextmanager
def uneven(
    cluster: Cluster, server: ForkServer, env: Mapping[int, Mapping[str, str]], *, steps: int, delay_s: float
) -> Iterator[World]:
    """Yield a world that isn't started yet; ``env`` is what ranks find in their environments."""
    world = World(
        server=server,
        directory=cluster.directory / "ranks",
        arguments=("--job", JOB, "--steps", str(steps), "--step-delay", str(delay_s)),
        world=WORLD,
        cluster=cluster,
        placement=lambda rank: "ab"[rank % 2],
        target="tests.support.uneven_rank:main",
        env=lambda rank: env.get(rank, {}),
    )
    try:
        yield world
    finally:
        world.stop()


def lines_of(world: World, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (world.out / f"rank-{rank}.jsonl").read_text().splitlines()]


def ready_steps(cluster: Cluster) -> list[int]:
    state = read_log(DirectoryStore(cluster.store), JOB)
    return sorted(ready.step for ready in state.readies.values())


def assert_nobody_waited(world: World, *, of: int) -> None:
    """No call of the hook waits for another rank, and none calls a collective, but for the first one of all."""
    for rank in range(WORLD):
        steps = [line for line in lines_of(world, rank) if "step" in line]
        assert len(steps) == of
        assert max(line["took_s"] for line in steps) < MOST_S
        assert sum(line["collectives"] for line in steps[1:]) == 0


@pytest.mark.fault("B104")
def test_a_rank_that_can_not_keep_a_value_costs_that_step_and_no_rank_waits(
    tmp_path: Path, fork_server: ForkServer, services: ForkedServices
) -> None:
    with (
        running_cluster(tmp_path, job=JOB, cadences=EACH, launch=services) as cluster,
        uneven(cluster, fork_server, {3: {"ODD_STEPS": "5"}}, steps=STEPS, delay_s=1.0) as world,
    ):
        world.start()
        world.finish(timeout_s=120.0)
        wait_until(lambda: STEPS in ready_steps(cluster), what="the last step is READY", timeout_s=60)
        assert 5 not in ready_steps(cluster)
        assert set(range(6, STEPS + 1)) <= set(ready_steps(cluster))
        assert_nobody_waited(world, of=STEPS)
        skipped = [lines_of(world, rank)[-1]["skipped"].get("unsupported value", 0) for rank in range(WORLD)]
        assert skipped == [0, 0, 0, 1]
        assert "extra.odd" in world.log(3).read_text(), "the value is named"


@pytest.mark.fault("B103")
def test_steps_that_only_some_ranks_save_are_given_up_and_who_has_not_is_listed(
    tmp_path: Path, fork_server: ForkServer, services: ForkedServices
) -> None:
    """There is no call to leave out but ``end_step``, which each rank makes: one that does not save has a bad value."""
    odd = {rank: {"ODD_STEPS": "5,6" if rank == 3 else "5"} for rank in range(1, WORLD)}
    with (
        running_cluster(tmp_path, job=JOB, cadences=EACH, launch=services) as cluster,
        uneven(cluster, fork_server, odd, steps=STEPS, delay_s=1.0) as world,
    ):
        world.start()
        wait_until(lambda: "step 6 was not saved by rank 3" in told(cluster), what="it is told", timeout_s=60)
        assert "step 5 was not saved by ranks 1, 2, 3: unsupported value" in told(cluster)
        world.finish(timeout_s=120.0)
        wait_until(lambda: STEPS in ready_steps(cluster), what="the last step is READY", timeout_s=60)
        assert {5, 6}.isdisjoint(ready_steps(cluster))
        assert 7 in ready_steps(cluster)
        assert_nobody_waited(world, of=STEPS)


def test_ranks_that_leave_out_a_call_are_told_at_their_next_one_and_nobody_waits_for_them(
    tmp_path: Path, fork_server: ForkServer, services: ForkedServices
) -> None:
    env = {rank: {"LEFT_OUT": "5"} for rank in range(1, WORLD)}
    with (
        running_cluster(tmp_path, job=JOB, cadences=EACH, launch=services) as cluster,
        uneven(cluster, fork_server, env, steps=STEPS, delay_s=1.0) as world,
    ):
        world.start()
        wait_until(lambda: len(world.statuses()) == WORLD, what="all have ended", timeout_s=60)
        assert 0 not in world.statuses().values()
        for rank in range(1, WORLD):
            assert "expected end_step(5)" in world.log(rank).read_text()
        env.clear()
        world.restart()
        world.finish(timeout_s=120.0)
        for rank in range(WORLD):
            assert [line["restored"] for line in lines_of(world, rank) if "restored" in line] == [0, 4]
        wait_until(lambda: STEPS in ready_steps(cluster), what="the last step is READY", timeout_s=60)
        assert 7 in ready_steps(cluster)


def told(cluster: Cluster) -> str:
    return (get(cluster.coordinator_url, "/v1/status") or b"").decode()


@pytest.mark.fault("B105")
def test_ranks_that_start_apart_before_their_sidecars_take_two_snapshots_at_once_and_all_come_to_the_end(
    tmp_path: Path, fork_server: ForkServer, services: ForkedServices
) -> None:
    chance = random.Random(105)
    steps = 20
    for number in range(50):
        with Cluster(directory=tmp_path / str(number), job=JOB, cadences=EACH, launch=services) as cluster:
            for name in "ab":  # so that ranks know where to look, and nothing is there
                cluster.nodes[name] = cluster._new_node(name)
            late = {rank: {"LATE_S": f"{chance.uniform(0.0, 0.3):.3f}"} for rank in range(WORLD)}
            with uneven(cluster, fork_server, late, steps=steps, delay_s=0.05) as world:
                world.start()
                cluster.start_broker()
                cluster.start_coordinator()
                for name in "ab":
                    cluster.start_sidecar(name)
                world.finish(timeout_s=60.0)
                assert {lines_of(world, rank)[0]["restored"] for rank in range(WORLD)} == {0}
                assert_nobody_waited(world, of=steps)
                for rank in range(WORLD):
                    taken = [line["snapshots"] for line in lines_of(world, rank)[1:]]
                    first = next((at for at, count in enumerate(taken) if count), steps)
                    assert taken[first : first + 2] == [1, 2], f"try {number}, rank {rank}: {taken}"
