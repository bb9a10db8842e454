"""Restarts with another number of ranks, another mesh and another way to be parallel, through real sidecars."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.parallel_kinds import JOB
from tests.support.source import ROOT

from toprope.chaos.live.cluster import Cadences, Cluster, running_cluster
from toprope.chaos.live.forking import ForkedServices, ForkServer
from toprope.chaos.live.processes import become_subreaper
from toprope.chaos.live.ranks import World


@pytest.fixture(scope="module")
def warm() -> Iterator[ForkServer]:
    become_subreaper()
    with ForkServer(
        "tests.support.resharding_rank", "torch._dynamo", "toprope.trainer_hooks.restore.resharding", path=[ROOT]
    ) as server:
        yield server


def run(layout: str, world: int, directory: Path, warm: ForkServer, cluster: Cluster) -> None:
    ranks = World(
        server=warm,
        directory=directory / f"{layout}-on-{world}",
        arguments=(str(directory), layout),
        world=world,
        cluster=cluster,
        placement=lambda rank: "ab"[rank * 2 // world],
        target="tests.support.resharding_rank:train",
    )
    ranks.start()
    try:
        ranks.finish(timeout_s=100)
    finally:
        ranks.stop()


def found(directory: Path, step: int, world: int) -> list[dict[str, Any]]:
    return [json.loads((directory / f"found-{step}-rank-{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.slow
def test_a_job_goes_on_with_other_ranks_in_other_layouts_and_nothing_but_its_place_changes(
    tmp_path: Path, warm: ForkServer, services: ForkedServices
) -> None:
    """Each launch compares the whole of its state with what the launch before it ended with, and trains on."""
    launches = [("fsdp2", 2), ("fsdp2", 2), ("fsdp2", 1), ("ddp", 2)]
    cadences = Cadences(every=2, local_every=2, object_every=2)
    with running_cluster(tmp_path, job=JOB, cadences=cadences, launch=services) as cluster:
        for number, (layout, world) in enumerate(launches):
            run(layout, world, tmp_path, warm, cluster)
            assert [(one["step"], one["wrong"]) for one in found(tmp_path, 2 * number, world)] == [
                (2 * number, "")
            ] * world
    again, alone, all_of_it = (found(tmp_path, step, world) for step, world in ((2, 2), (4, 1), (6, 2)))
    assert [[rank for rank, _ in one["sources"]] for one in again] == [[0], [1]], "in the same layout: its own shard"
    assert [rank for rank, _ in alone[0]["sources"]] == [0, 1]
    assert [[rank for rank, _ in one["sources"]] for one in all_of_it] == [[0], [0]]
