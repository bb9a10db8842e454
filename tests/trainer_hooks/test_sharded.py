"""Four real ranks with DTensors: who stores which block, what comes back, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.parallel_kinds import FULLY_SHARDED, ONE_MODEL, OTHERS
from tests.support.source import ROOT
from tests.support.tiny_trainer import assert_same_tensor, open_image

from toprope.chaos.live.forking import ForkServer
from toprope.chaos.live.ranks import World
from toprope.store.checkpoint.manifest import Index
from toprope.store.checkpoint.shard import hash_image, index_of
from toprope.store.names import Key

WORLD = 4


@dataclass(frozen=True)
class Outcome:
    """What each rank found, and the directory with the images."""

    ranks: list[dict[str, Any]]
    directory: Path

    def indexes(self, kind: str) -> list[Index]:
        bodies = [(self.directory / f"{kind}-{rank}").read_bytes() for rank in range(WORLD)]
        return [index_of(hash_image(memoryview(body), name=kind), key=Key(kind)) for body in bodies]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    directory = tmp_path_factory.mktemp("sharded")
    with ForkServer("tests.support.sharded_rank", "torch._dynamo", path=[ROOT]) as server:
        ranks = World(
            server=server,
            directory=directory,
            arguments=(str(directory),),
            world=WORLD,
            target="tests.support.sharded_rank:main",
        )
        ranks.start()
        try:
            ranks.finish(timeout_s=100)
        finally:
            ranks.stop()
        yield Outcome([json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(WORLD)], directory)


@pytest.mark.fault("B16")
@pytest.mark.parametrize("kind", FULLY_SHARDED)
def test_what_all_ranks_store_is_each_tensor_whole_and_once(outcome: Outcome, kind: str) -> None:
    full = open_image(outcome.directory / f"{kind}-full")
    images = [open_image(outcome.directory / f"{kind}-{rank}") for rank in range(WORLD)]
    indexes = outcome.indexes(kind)
    wanted = set(full.extents) - {"__document__"}
    assert any(name.endswith("exp_avg_sq") for name in wanted)
    for name in wanted:
        expected = full.tensor(name)
        joined, times = torch.zeros_like(expected), torch.zeros(expected.shape, dtype=torch.int64)
        for image, index in zip(images, indexes, strict=True):
            for tensor in (one for one in index.tensors if one.name == name):
                assert tensor.global_shape == tuple(expected.shape)
                block = tuple(slice(at, at + size) for at, size in zip(tensor.offsets, tensor.shape, strict=True))
                joined[block] = image.tensor(name)
                times[block] += 1
        assert bool((times == 1).all()), name
        assert_same_tensor(joined, expected)


@pytest.mark.parametrize("kind", [*FULLY_SHARDED, *OTHERS])
def test_a_sharded_state_comes_back_and_goes_on_bit_for_bit(outcome: Outcome, kind: str) -> None:
    assert [found[kind] for found in outcome.ranks] == [{"same": True, "goes on": True}] * WORLD


@pytest.mark.fault("B29")
def test_a_model_has_the_same_spec_however_it_is_sharded(outcome: Outcome) -> None:
    expected = outcome.ranks[0]["specs"]["ddp"]
    assert expected["model"]["class"] == "Sequential"
    assert expected["model"]["params"]["0.weight"] == ["float32", [7, 6]]
    for found in outcome.ranks:
        assert found["specs"] == dict.fromkeys(ONE_MODEL, expected)


def test_replicas_share_the_work(outcome: Outcome) -> None:
    """Of a 2 by 2 mesh that shards and replicates, both replicas of a shard store some of it, none the same."""
    stored = [{one.name for one in index.tensors if one.name.startswith("model.")} for index in outcome.indexes("hsdp")]
    for first, second in ((0, 2), (1, 3)):
        assert stored[first]
        assert stored[second]
        assert not stored[first] & stored[second]
        assert stored[first] | stored[second] == {name for held in stored for name in held}


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("another mesh", r"spread S0 over ranks \[0, 1, 2, 3\] as \(4,\) in the checkpoint, R, S0 over ranks"),
        ("no mesh", "model.0.weight: a DTensor in the checkpoint, a plain tensor here"),
        ("gathered", "FSDP has [0-9]+ parameters gathered"),
        ("fsdp1", "model.0.weight: a DTensor in the checkpoint, a plain tensor here; model.0.weight: another part"),
        ("fsdp1 wrapped otherwise", r"model\.[0-9]\.(weight|bias): (shape|another part)"),
        ("no zero", "optimizer: ZeRO gave this rank other parameters than here, or only one of both is ZeRO"),
        ("zero", "optimizer: ZeRO gave this rank other parameters than here, or only one of both is ZeRO"),
    ],
)
def test_another_layout_is_refused_before_anything_is_written(outcome: Outcome, where: str, said: str) -> None:
    for found in outcome.ranks:
        text, untouched = found["elsewhere"][where]
        assert untouched
        assert re.search(said, text), text


def test_what_is_not_one_block_of_a_whole_is_refused_by_name(outcome: Outcome) -> None:
    for rank, found in enumerate(outcome.ranks):
        assert found["refused"]["partial"].startswith("extra.t: a DTensor that has placement Partial")
        assert found["refused"]["wrong"] == (
            "extra.t: a DTensor that has a local shard of shape (3,), where its placements say (2,)"
        )
        outside = f"extra.t: a DTensor that is on a mesh of ranks 0, 1, and rank {rank} is not among them"
        assert found["refused"]["half"] == (outside if rank > 1 else "")


def test_sharded_tensors_of_the_users_own_come_back(outcome: Outcome) -> None:
    assert [found["extra"] for found in outcome.ranks] == [[True] * 4] * WORLD


def test_capture_asks_no_other_rank(outcome: Outcome) -> None:
    """It was done when the process group was gone."""
    for found in outcome.ranks:
        assert set(found["alone"]) == {*FULLY_SHARDED, *OTHERS}
        assert all(found["alone"].values())
