"""States saved in one layout and restored into another: the planning of it, and every kind into every other."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from itertools import islice, pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.fitted_states import Files, fitted, linear, saved
from tests.support.source import ROOT
from tests.support.tiny_trainer import METADATA, raw, snapshot_file
from torch import nn

from toprope.chaos.live.forking import ForkServer
from toprope.chaos.live.processes import become_subreaper
from toprope.chaos.live.ranks import World
from toprope.store.digest import digest
from toprope.trainer_hooks.capture.names import joined, names_of, union
from toprope.trainer_hooks.capture.state import Parts
from toprope.trainer_hooks.elastic import ElasticSampler
from toprope.trainer_hooks.errors import WorldMismatchError
from toprope.trainer_hooks.image.shard import Image
from toprope.trainer_hooks.link import wire
from toprope.trainer_hooks.link.source import SourceError, StagedImage, StagedSource
from toprope.trainer_hooks.restore.apply import apply
from toprope.trainer_hooks.restore.blocks import Block, gap_in, run_of
from toprope.trainer_hooks.restore.fitting import fit
from toprope.trainer_hooks.restore.reader import ShardReader, Stored, Target, Whole
from toprope.trainer_hooks.restore.relaxing import Allowed

# Blocks


@given(st.lists(st.integers(0, 4), max_size=4), st.data())
def test_a_run_of_a_flattened_tensor_is_its_elements_in_order(shape: list[int], data: st.DataObject) -> None:
    count = prod(shape)
    begin = data.draw(st.integers(0, count))
    end = data.draw(st.integers(begin, count + 3))
    whole = torch.arange(count).reshape(shape)
    taken: list[int] = []
    for block in run_of(shape, begin, end):
        assert block.begin == len(taken)
        box = tuple(slice(at, at + size) for at, size in zip(block.offsets, block.sizes, strict=True))
        taken += whole[box].reshape(-1).tolist()
    assert taken == list(range(begin, min(end, count)))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_pieces_of_any_cut_are_joined_in_any_other(shape: list[int], data: st.DataObject) -> None:
    """Saved in runs, as FSDP1 does, and wanted in runs that begin elsewhere."""
    count = prod(shape)
    whole = torch.arange(count, dtype=torch.int32)
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, count), max_size=4))), count]
    saved = {str(n): whole[a:b] for n, (a, b) in enumerate(pairwise(cuts))}
    stored = tuple(Stored(0, str(n), run_of(shape, a, b)) for n, (a, b) in enumerate(pairwise(cuts)))
    reader = ShardReader({"w": Whole(torch.int32, tuple(shape), stored)}, lambda _, name: saved[name])
    begin = data.draw(st.integers(0, count))
    end = data.draw(st.integers(begin, count))
    target = Target(tuple(shape), run_of(shape, begin, end), torch.zeros(end - begin, dtype=torch.int32))
    reader.plan("w", target)
    assert torch.equal(reader.fill("w", target), whole[begin:end])


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ([Block((0,), (2,)), Block((2,), (2,))], None),
        ([Block((0,), (2,))], "the shards hold 2 of the 4 elements at [0]"),
        ([Block((0,), (3,)), Block((2,), (1,))], "shards hold the same elements twice at [0]"),
    ],
)
def test_what_is_not_there_exactly_once_is_noticed(parts: list[Block], problem: str | None) -> None:
    assert gap_in(Block((0,), (4,)), parts) == problem


def test_a_tensor_of_which_a_piece_is_missing_is_not_planned() -> None:
    stored = (Stored(0, "a", run_of((4,), 0, 2)), Stored(1, "a", run_of((4,), 3, 4)))
    reader = ShardReader({"w": Whole(torch.int32, (4,), stored)}, lambda *_: torch.zeros(2))
    target = Target((4,), run_of((4,), 0, 4), torch.zeros(4, dtype=torch.int32))
    with pytest.raises(ValueError, match="the shards hold 3 of the 4 elements"):
        reader.plan("w", target)


def test_of_a_staged_shard_nothing_is_read_that_was_not_asked_for(tmp_path: Path) -> None:
    path = snapshot_file(tmp_path / "shard", {"a": torch.ones(2), "b": torch.ones(2)})
    image = StagedImage(path, path.stat().st_size, frozenset({"a"}))
    assert bool((image.tensor("a") == 1).all())
    with pytest.raises(AssertionError, match="b was not asked for"):
        image.tensor("b")


def test_a_shard_of_another_step_or_rank_is_the_fault_of_the_source(tmp_path: Path) -> None:
    path = snapshot_file(tmp_path / "shard", {"a": torch.ones(2)})

    def asked(from_step: int, rank: int) -> StagedSource:
        attempt = wire.Attempt(
            job_uid=METADATA["job_uid"],
            number=2,
            uid="u",
            launch_id="l",
            round=0,
            source="held",
            source_world=2,
            from_step=from_step,
            schedule=wire.Schedule(from_step=from_step, every=1),
        )
        size = path.stat().st_size
        shard = wire.StagedShard(rank=rank, path=str(path), bytes=size, digest="", tier="memory", node="a")
        return StagedSource(attempt=attempt, ask=lambda *_: (shard,))

    assert asked(3, 0).whole(0).extents["a"].shape == (2,)
    for from_step, rank in ((4, 0), (3, 1)):
        with pytest.raises(SourceError, match="staged as"):
            asked(from_step, rank).whole(rank)
    with pytest.raises(SourceError, match="no shard of rank 1"):
        asked(3, 0).heads([1])


# Documents of several ranks, saved in one process


@pytest.mark.fault("B144")
@pytest.mark.parametrize("world", [1, 2])
def test_blocks_that_nothing_describes_are_refused_and_not_joined_in_some_order(tmp_path: Path, world: int) -> None:
    """Each of four ranks has two gate rows above two up rows: to stack the ranks' rows would interleave them."""
    source = saved(tmp_path, [{"model": linear(float(rank), rows=4)} for rank in range(4)])
    for rows in (4, 16 // world):
        live = linear(9.0, rows=rows)
        with pytest.raises(WorldMismatchError, match=r"model\.weight: .*saved by 4 ranks, no mesh.*'ckpt export'"):
            fitted(source, world=world, model=live)
        assert bool((live.weight == 9).all()), "nothing was written"


class HeadsWithDigests(Files):
    """Shards in an object store: digests come with their headers, and whatever is fetched beyond them is counted."""

    def __init__(self, files: Files) -> None:
        super().__init__(files.paths)
        self.fetched = 0
        for path, image in zip(self.paths, super().heads(range(self.world)).values(), strict=True):
            digests = {name: digest(raw(image.tensor(name))) for name in image.extents}
            path.with_suffix(wire.DIGESTS).write_text(json.dumps(digests))

    def heads(self, ranks: Iterable[int]) -> Mapping[int, Image]:
        return {rank: self._image(rank, frozenset()) for rank in ranks}

    def with_tensors(self, names: Mapping[int, set[str]]) -> Mapping[int, Image]:
        self.fetched += sum(map(len, names.values()))
        return {rank: self._image(rank, frozenset(names[rank])) for rank in names}

    def _image(self, rank: int, there: frozenset[str]) -> Image:
        return StagedImage(self.paths[rank], self.paths[rank].stat().st_size, there)


@pytest.mark.fault("B145")
def test_what_has_no_place_is_refused_before_a_tensor_is_fetched_with_both_layouts_and_a_way_out(
    tmp_path: Path,
) -> None:
    source = HeadsWithDigests(saved(tmp_path, [{"model": linear(float(rank))} for rank in range(4)]))
    live = linear(9.0)
    for rank in range(6):
        with pytest.raises(WorldMismatchError) as refused:
            fitted(source, rank=rank, world=6, model=live)
        text = str(refused.value)
        assert "model.weight: plain tensors on ranks 0 and 1 of the checkpoint that differ" in text
        assert f"was saved by 4 ranks, no mesh; this is rank {rank} of 6" in text
        assert "'ckpt export' writes its tensors whole" in text
    assert source.fetched == 0
    assert bool((live.weight == 9).all()), "nothing was written"


def test_of_what_all_ranks_have_the_same_one_is_fetched_if_digests_say_so(tmp_path: Path) -> None:
    source = HeadsWithDigests(saved(tmp_path, [{"model": linear(3.0)}] * 4))
    live = linear(9.0)
    apply(fitted(source, model=live).loaded)
    assert bool((live.weight == 3).all())
    assert source.fetched == 1


def test_what_is_the_same_on_all_ranks_has_a_place_on_any_number_of_them(tmp_path: Path) -> None:
    source = saved(tmp_path, [{"model": linear(3.0), "extra": {"best": 0.5, "t": torch.ones(2)}}] * 3)
    live = linear(9.0)
    extra: dict[str, Any] = {"best": 9.0, "t": torch.zeros(2)}
    found = fitted(source, model=live, extra=extra)
    apply(found.loaded)
    assert bool((live.weight == 3).all())
    assert extra["best"] == 0.5
    assert torch.equal(extra["t"], torch.ones(2))
    assert "rng" in found.loaded.left


@pytest.mark.parametrize(
    ("extras", "said"),
    [
        ([{"best": 1}, {"best": 2}], "extra.best: 1 on rank 0 and 2 on rank 1 of the checkpoint"),
        (
            [{"t": torch.ones(2)}, {"t": torch.zeros(2)}],
            "extra.t: plain tensors on ranks 0 and 1 of the checkpoint that",
        ),
        ([{"t": torch.ones(2)}, {"t": torch.ones(3)}], "extra.t: stored in different ways"),
    ],
)
def test_what_differs_between_ranks_is_refused_by_name(tmp_path: Path, extras: list[dict[str, Any]], said: str) -> None:
    source = saved(tmp_path, [{"model": linear(3.0), "extra": extra} for extra in extras])
    live = linear(9.0)
    with pytest.raises(WorldMismatchError, match=said):
        fitted(source, model=live, extra={})
    assert bool((live.weight == 9).all()), "nothing was written"


def test_buffers_that_differ_are_those_of_the_first_rank_and_that_is_said(tmp_path: Path) -> None:
    models = [nn.BatchNorm1d(2), nn.BatchNorm1d(2)]
    for value, model in enumerate(models, start=1):
        nn.init.constant_(model.running_mean, value)  # type: ignore[arg-type]
    source, live = saved(tmp_path, [{"model": model} for model in models]), nn.BatchNorm1d(2)
    found = fitted(source, model=live)
    apply(found.loaded)
    assert torch.equal(live.running_mean, torch.ones(2))  # type: ignore[arg-type]
    assert found.notes == ("model.running_mean differs between ranks: that of rank 0 is taken, as DDP does",)


def test_keys_are_checked_for_all_ranks_together(tmp_path: Path) -> None:
    source = saved(tmp_path, [{"model": {"a": linear(1.0)}}, {"model": {"b": linear(2.0)}}])
    live = {"a": linear(9.0)}
    with pytest.raises(WorldMismatchError, match=r"model\.b\.weight: in the checkpoint, unexpected here"):
        fitted(source, model=live)
    with pytest.raises(WorldMismatchError, match=r"model\.c\.weight: missing in the checkpoint"):
        fitted(source, model={"a": linear(9.0), "b": linear(9.0), "c": linear(9.0)})
    both = {"a": linear(9.0), "b": linear(9.0)}
    apply(fitted(source, model=both).loaded)
    assert [float(model.weight[0, 0].detach()) for model in both.values()] == [1.0, 2.0]


def test_a_stage_that_moves_to_another_rank_of_as_many_brings_its_schedule_along(tmp_path: Path) -> None:
    def stage(name: str, rate: float) -> dict[str, Any]:
        model = linear(rate)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"model": {name: model}, "optimizer": {name: optimizer}, "lr_scheduler": {name: schedule}}

    source = saved(tmp_path, [stage("a", 1.0), stage("b", 2.0)])
    live = stage("b", 9.0)
    names = union([names_of(Parts(**stage(name, 1.0))) for name in "ab"])
    apply(fit(Parts(**live), source, names, rank=0, world=2).loaded)
    assert float(live["model"]["b"].weight[0, 0].detach()) == 2.0
    assert live["optimizer"]["b"].param_groups[0]["lr"] == 2.0
    assert live["lr_scheduler"]["b"].base_lrs == [2.0]


class Position:
    """Where a rank is in its data."""

    elastic = False

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("world", [2, 8, 3])
@pytest.mark.fault("B44")
def test_a_position_in_the_data_of_so_many_ranks_is_refused_on_others_unless_it_may_be_left(
    tmp_path: Path, world: int
) -> None:
    """Also one that is the same on all ranks: so many batches of four ranks are not as many of two."""
    source = saved(tmp_path, [{"model": linear(1.0), "dataloader": Position(7)} for _ in range(4)])
    model, live = linear(9.0), Position(0)
    with pytest.raises(WorldMismatchError, match=rf"among 4 ranks is in the checkpoint, and here are {world}: .*Elas"):
        fitted(source, rank=1, world=world, model=model, dataloader=live)
    assert (live.at, bool((model.weight == 9).all())) == (0, True)
    found = fitted(source, rank=1, world=world, allowed=Allowed(partial=True), model=model, dataloader=live)
    apply(found.loaded)
    assert (live.at, bool((model.weight == 1).all())) == (0, True)
    assert found.notes == (f"dataloader is not restored: it is that of one of 4 ranks, and here are {world}",)


@pytest.mark.parametrize("world", [2, 8, 3])
@pytest.mark.fault("B44")
def test_an_elastic_position_goes_on_with_other_ranks_and_no_sample_of_the_epoch_comes_twice(
    tmp_path: Path, world: int
) -> None:
    """Four ranks have trained on 40 of 240 samples, and workers have fetched more, when the number of ranks changes."""

    def dealt(ranks: list[ElasticSampler], each: int) -> list[int]:
        return [number for sampler in ranks for number in islice(sampler, each)]

    before = [ElasticSampler(240, seed=5, rank=rank, world=4) for rank in range(4)]
    trained = dealt(before, 20)
    for sampler in before:
        sampler.advance(10)
    trained = [trained[rank * 20 + at] for rank in range(4) for at in range(10)]
    source = saved(tmp_path, [{"model": linear(1.0), "dataloader": sampler} for sampler in before])
    after = [ElasticSampler(240, seed=5, rank=rank, world=world) for rank in range(world)]
    for rank, sampler in enumerate(after):
        apply(fitted(source, rank=rank, world=world, model=linear(9.0), dataloader=sampler).loaded)
    rest = dealt(after, 240)
    assert sorted(trained + rest) == sorted(set(trained + rest))
    assert len(rest) == 200 - 200 % world


def test_what_says_that_it_is_elastic_is_restored_as_all_ranks_had_it_or_refused(tmp_path: Path) -> None:
    for places, expected in (((7, 7), 7), ((7, 8), 0)):
        source = saved(tmp_path, [{"model": linear(1.0), "dataloader": Position(at)} for at in places])
        live = Position(0)
        live.elastic = True
        with (
            nullcontext() if expected else pytest.raises(WorldMismatchError, match=r"dataloader\.at: 7 on rank 0 and 8")
        ):
            apply(fitted(source, model=linear(9.0), dataloader=live).loaded)
        assert live.at == expected


def test_the_spec_of_a_pipeline_is_that_of_all_its_stages_whoever_has_them() -> None:
    def stage(name: str) -> dict[str, Any]:
        return {"model": {"class": {name: "M"}, "params": {name: ["float32", [1]]}}, "optimizer": {"groups": [[name]]}}

    whole = joined([stage("a"), stage("b")])
    assert whole == joined([stage("b"), stage("a")])
    assert whole["model"]["params"] == {"a": ["float32", [1]], "b": ["float32", [1]]}
    assert whole["optimizer"]["groups"] == [["a", "b"]]


# Every kind into every other, on real ranks

MLP = ("ddp", "ddp+zero1", "fsdp1", "fsdp2", "hsdp")
BLOCKS = ("tp+sp", "fsdp2xtp", "blocks-ddp", "blocks-fsdp1", "blocks-fsdp2")
STAGES = ("pipeline", "pipelinexfsdp2", "stages-dealt", "stages-ddp", "stages-fsdp2")
EXPERTS = ("experts", "experts-dealt", "experts-ddp", "experts-fsdp1", "experts-fsdp2")
STACKED = ("stacked", "stackedxfsdp2", "stacked-ddp", "stacked-fsdp1", "stacked-fsdp2")
ODD = ("odd-ddp", "odd-fsdp1", "odd-fsdp2")
SAVED = (
    *(*MLP, "fsdp1-flat", *BLOCKS[:2], *STAGES[:2], *EXPERTS[:1], *STACKED[:2]),
    *("odd-fsdp1-flat", *ODD, "normed-ddp", "expert"),
)
INTO: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(MLP, MLP),
    **dict.fromkeys(BLOCKS[:2], BLOCKS),
    **dict.fromkeys(STAGES[:2], STAGES),
    **dict.fromkeys(EXPERTS[:1], EXPERTS),
    **dict.fromkeys(STACKED[:2], STACKED),
    **dict.fromkeys(ODD, ODD),
    "fsdp1-flat": ("fsdp1-flat", *MLP),
    "odd-fsdp1-flat": ("odd-fsdp1-flat", *ODD),
    "normed-ddp": ("normed-ddp", "normed-fsdp2"),
    "expert": ("expert",),
}
"""Experts of one name on all ranks have a place only where they were; nothing but what was is laid out flattened."""


@pytest.fixture(scope="module")
def warm() -> Iterator[ForkServer]:
    become_subreaper()
    with ForkServer(
        "tests.support.resharding_rank", "torch._dynamo", "toprope.trainer_hooks.restore.resharding", path=[ROOT]
    ) as server:
        yield server


def run(warm: ForkServer, out: Path, world: int, *arguments: str) -> None:
    ranks = World(
        server=warm,
        directory=out / f"world-{world}",
        arguments=(str(out), *arguments),
        world=world,
        target="tests.support.resharding_rank:main",
    )
    ranks.start()
    try:
        ranks.finish(timeout_s=400)
    finally:
        ranks.stop()


@pytest.fixture(scope="module")
def checkpoints(warm: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What four ranks saved of each kind."""
    out = tmp_path_factory.mktemp("kinds")
    run(warm, out, 4, "save", *SAVED)
    return out


@pytest.mark.fault("B141")
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
def test_every_kind_is_restored_into_others_whole_and_bit_for_bit(
    warm: ForkServer, checkpoints: Path, world: int
) -> None:
    """Full parameters, buffers, moments and learning rates are those that torch joined when they were saved."""
    saved_kinds = SAVED if world <= 4 else ODD  # a pipeline of four stages has no use for more ranks
    run(warm, checkpoints, world, "load", *(f"{kind}:{','.join(INTO[kind])}" for kind in saved_kinds))
    for rank in range(world):
        found = json.loads((checkpoints / f"{world}-ranks-rank-{rank}.json").read_text())
        assert len(found) == sum(len(INTO[kind]) for kind in saved_kinds)
        expert = found.pop("expert -> expert", {"wrong": ""})["wrong"]
        assert {pair: one["wrong"] for pair, one in found.items() if one["wrong"]} == {}
        if world in {1, 2, 3}:
            assert "model.expert.weight: plain tensors on ranks 0 and 1 of the checkpoint that differ" in expert
            assert f"saved by 4 ranks, no mesh; this is rank {rank} of {world}" in expert
            assert "'ckpt export'" in expert
        else:
            assert expert == ""
