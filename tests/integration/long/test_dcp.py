"""Several ranks that save and load with torch.distributed.checkpoint, through real sidecars, beside the stock files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.dcp_rank import JOB
from tests.support.source import ROOT
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from toprope.__main__ import main as ckpt
from toprope.chaos.live.cluster import Cadences, Cluster, running_cluster
from toprope.chaos.live.forking import ForkedServices, ForkServer
from toprope.chaos.live.processes import become_subreaper
from toprope.chaos.live.ranks import World
from toprope.trainer_hooks.torchrun import settings

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


@pytest.fixture(scope="module")
def warm() -> Iterator[ForkServer]:
    become_subreaper()
    with ForkServer("tests.support.dcp_rank", "torch._dynamo", path=[ROOT]) as server:
        yield server


def run(doing: str, layout: str, world: int, out: Path, warm: ForkServer, cluster: Cluster) -> list[dict[str, Any]]:
    """Run one launch to its end and return what each rank found."""
    ranks = World(
        server=warm,
        directory=out / f"{doing}-{layout}-{world}",
        arguments=(str(out), doing, layout),
        world=world,
        cluster=cluster,
        placement=lambda rank: "ab"[rank * 2 // world],
        target="tests.support.dcp_rank:main",
        env=lambda _: settings.ENVIRONMENT,
    )
    ranks.start()
    try:
        ranks.finish(timeout_s=400)
    finally:
        ranks.stop()
    return [json.loads((out / f"{doing}-{layout}-{world}-{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("saved", ["fsdp2", "hsdp", "ddp"])
def test_what_one_layout_saved_every_other_loads_as_from_the_stock_files(
    tmp_path: Path, warm: ForkServer, services: ForkedServices, saved: str
) -> None:
    """The cadence of the tiers would take step 64 only; what is saved by call goes to each of them all the same."""
    world = 4 if saved == "hsdp" else 2
    cadences = Cadences(every=64, local_every=64, object_every=64)
    with running_cluster(tmp_path, job=JOB, cadences=cadences, launch=services) as cluster:
        for found in run("save", saved, world, tmp_path, warm, cluster):
            assert found["new"]
            assert "odd: a tests.support.dcp_rank.Odd can't be kept exactly" in found["refused"], "all ranks learn it"
        for layout, ranks in (("fsdp2", 3), ("ddp", 1), ("hsdp", 4)):
            for found in run("load", layout, ranks, tmp_path, warm, cluster):
                assert (found["step"], found["wrong"]) == (4, [])
                assert found["progress"] == [{"step": 4, "note": ["a", None, 0.5]}] * 2
                assert found["compared"] > 20
        root = str(cluster.store)
    assert ckpt(["verify", root, "--job", JOB]) == 0
    assert ckpt(["export", root, str(tmp_path / "exported"), "--job", JOB, "--to", "dcp", "--step", "4"]) == 0
    whole = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.BatchNorm1d(7), nn.Linear(7, 3, bias=False)).state_dict()
    states = []
    for directory in ("exported", "stock"):
        state: dict[str, Any] = {
            "model": {name: torch.zeros_like(tensor) for name, tensor in whole.items()},
            "progress": {"step": 0},
        }
        load(state, storage_reader=FileSystemReader(tmp_path / directory), no_dist=True)
        states.append(state)
    assert states[0]["progress"] == states[1]["progress"] == {"step": 4}
    for name in whole:
        assert torch.equal(states[0]["model"][name], states[1]["model"][name]), name
