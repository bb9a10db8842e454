"""Parameters that FSDP1 flattened, found again under their own names in the documents of all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toprope.trainer_hooks.image.shard import Extent, Piece
from toprope.trainer_hooks.restore.blocks import run_of
from toprope.trainer_hooks.restore.flattened import unflattened
from toprope.trainer_hooks.restore.merging import Merger
from toprope.trainer_hooks.restore.reader import ShardReader, Target

NAME = "m._flat_param"
FLAT, MOMENT, COUNT = f"model.{NAME}", f"optimizer.state.{NAME}.exp_avg", f"optimizer.state.{NAME}.step"


@dataclass
class Shard:
    """A rank's shard in memory."""

    tensors: dict[str, torch.Tensor]

    def __post_init__(self) -> None:
        self.extents = {name: Extent(name, one.dtype, tuple(one.shape), 0, 0) for name, one in self.tensors.items()}

    def document(self) -> Any:  # noqa: ANN401 - as the protocol has it
        raise NotImplementedError

    def piece(self, name: str) -> Piece:
        shape = tuple(self.tensors[name].shape)
        return Piece(shape, (0,) * len(shape))

    def digest(self, _: str) -> str:
        return ""

    def tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def saved(originals: dict[str, torch.Tensor], gap: int, ranks: int) -> tuple[dict[int, Shard], dict[int, Any]]:
    """Flatten these with gaps between them, cut that over the ranks with padding at the end, as FSDP1 does."""
    rows, begin, parts = [], 0, []
    for name, tensor in originals.items():
        parts.append([name, list(tensor.shape), begin])
        rows += [tensor.reshape(-1), torch.full((gap,), -1.0)]
        begin += tensor.numel() + gap
    flat = torch.cat([*rows, torch.full((-begin % ranks,), -1.0)])
    size = len(flat) // ranks
    shards, documents = {}, {}
    for rank in range(ranks):
        run = flat[rank * size : (rank + 1) * size]
        shards[rank] = Shard({FLAT: run, MOMENT: run * 2, COUNT: torch.tensor(3.0)})
        entry = {"$": "tensor", "rank": rank, "device": "cpu"}
        cut = {"flat": [rank * size, len(flat)], "shape": [begin]}
        state = {"exp_avg": {**entry, "name": MOMENT, **cut}, "step": {**entry, "name": COUNT}}
        documents[rank] = {
            "model": {
                "params": {NAME: {**entry, "name": FLAT, **cut}},
                "flattened": {NAME: parts},
            },
            "optimizer": {"groups": [{"params": [NAME], "settings": {}}], "state": {NAME: state}},
        }
    return shards, documents


def joined(shards: dict[int, Shard], key: str, entries: dict[int, Any]) -> torch.Tensor:
    merger = Merger(shards, {})
    found = merger.tensor(key, entries)
    assert found is not None, merger.problems
    shape = found.whole.shape
    reader = ShardReader(merger.wholes, lambda rank, name: shards[rank].tensor(name))
    target = Target(shape, run_of(shape, 0, prod(shape)), torch.zeros(prod(shape)))
    reader.plan(key, target)
    return reader.fill(key, target).view(shape)


@settings(max_examples=30)
@given(
    st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=4).filter(lambda s: any(map(prod, s))),
    st.integers(0, 2),
    st.integers(1, 4),
)
def test_each_original_is_put_together_from_what_the_ranks_have_of_the_flat_one(
    shapes: list[list[int]], gap: int, ranks: int
) -> None:
    cuts = [0, *torch.tensor([prod(shape) for shape in shapes]).cumsum(0).tolist()]
    originals = {
        f"m.{number}": torch.arange(a, b, dtype=torch.float32).view(shape)
        for number, (shape, (a, b)) in enumerate(zip(shapes, pairwise(cuts), strict=True))
    }
    shards, documents = saved(originals, gap, ranks)
    found = unflattened(documents, shards, set())
    assert set(found[0]["model"]["params"]) == set(originals) == set(found[0]["optimizer"]["state"])
    assert found[0]["optimizer"]["groups"][0]["params"] == list(originals)
    for name, tensor in originals.items():
        params = {rank: one["model"]["params"][name] for rank, one in found.items()}
        states = {rank: one["optimizer"]["state"][name] for rank, one in found.items()}
        assert torch.equal(joined(shards, name, params), tensor)
        assert torch.equal(joined(shards, name, {rank: one["exp_avg"] for rank, one in states.items()}), tensor * 2)
        assert [one["step"]["name"] for one in states.values()] == [COUNT] * ranks


def test_a_trainer_that_flattens_them_too_finds_them_as_they_are() -> None:
    shards, documents = saved({"m.a": torch.ones(3)}, 0, 2)
    assert unflattened(documents, shards, {NAME}) == documents
