"""Where the block of a rank lies: all blocks of a tensor tile it, each as often as it has replicas."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.tiny_trainer import METADATA, snapshot_file

from toprope.store.checkpoint.manifest import Tensor
from toprope.store.checkpoint.shard import hash_image, index_of
from toprope.store.names import Key
from toprope.trainer_hooks.capture.spread import LayoutError, Mesh, Spread, block_of, replicas_of, spread_from
from toprope.trainer_hooks.errors import StateMismatchError
from toprope.trainer_hooks.image.shard import Piece


def spreads(shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[str, ...]) -> list[Spread]:
    """The spread of one tensor, seen from each rank of a mesh."""
    ranks = tuple(range(math.prod(mesh)))
    return [Spread(Mesh(mesh, ranks), rank, placements, shape) for rank in ranks]


def elements(spread: Spread) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(begin, end) for begin, end in block_of(spread)))


@given(
    shape=st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple),
    mesh=st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
    data=st.data(),
)
def test_the_blocks_of_all_ranks_tile_the_tensor(
    shape: tuple[int, ...], mesh: tuple[int, ...], data: st.DataObject
) -> None:
    words = st.sampled_from(["R", *(f"S{number}" for number in range(len(shape)))])
    placements = tuple(data.draw(words) for _ in mesh)
    seen = Counter(element for spread in spreads(shape, mesh, placements) for element in elements(spread))
    copies = math.prod(extent for extent, word in zip(mesh, placements, strict=True) if word == "R")
    assert seen == Counter(dict.fromkeys(itertools.product(*map(range, shape)), copies))


@given(
    shape=st.lists(st.integers(1, 9), min_size=2, max_size=2).map(tuple),
    mesh=st.lists(st.integers(1, 3), min_size=2, max_size=2).map(tuple),
)
def test_fsdp_shards_what_tensor_parallelism_has_left_it(shape: tuple[int, ...], mesh: tuple[int, ...]) -> None:
    dp, tp = mesh
    placements = (f"S0/{tp}" if tp > 1 else "S0", "S0")
    rows = torch.arange(shape[0])
    for spread in spreads(shape, mesh, placements):
        (begin, end), columns = block_of(spread)
        part = _chunk(rows, tp, spread.rank % tp)
        assert list(range(begin, end)) == _chunk(part, dp, spread.rank // tp).tolist()
        assert columns == (0, shape[1])


def _chunk(rows: torch.Tensor, count: int, number: int) -> torch.Tensor:
    chunks = rows.chunk(count) if rows.numel() else ()
    return chunks[number] if number < len(chunks) else rows[:0]


@pytest.mark.parametrize(
    ("placements", "reason"),
    [
        (("S0/3", "S0"), "several blocks on one rank"),
        (("S0/2", "R"), "several blocks on one rank"),
        (("_StridedRagged", "S0"), "placement _StridedRagged, which this version can't keep"),
        (("Partial", "R"), "placement Partial"),
        (("S0",), "1 placements on a mesh of 2 dimensions"),
    ],
)
def test_a_shard_that_is_not_one_block_is_refused(placements: tuple[str, ...], reason: str) -> None:
    with pytest.raises(LayoutError, match=reason):
        block_of(spreads((8, 8), (2, 2), placements)[0])


def test_a_rank_outside_the_mesh_is_refused() -> None:
    with pytest.raises(LayoutError, match="rank 7 is not among them"):
        block_of(Spread(Mesh((2,), (0, 1)), 7, ("S0",), (4,)))


def test_replicas_hold_the_same_block() -> None:
    for placements in (("R", "S0"), ("S0", "R"), ("R", "R"), ("S1", "S0")):
        everyone = spreads((5, 3), (2, 3), placements)
        for spread in everyone:
            same = tuple(other.rank for other in everyone if block_of(other) == block_of(spread))
            assert replicas_of(spread) == same


def test_a_described_spread_is_read_back_or_refused() -> None:
    meshes = [{"shape": [2], "ranks": [0, 1]}]
    value = {"mesh": 0, "placements": ["S0"], "shape": [3]}
    assert spread_from(value, meshes, rank=1) == Spread(Mesh((2,), (0, 1)), 1, ("S0",), (3,))
    for wrong in ({**value, "mesh": 1}, {**value, "placements": ["X"]}, {**value, "shape": 3}, {}):
        with pytest.raises(StateMismatchError, match="can't be read"):
            spread_from(wrong, meshes, rank=1)


@pytest.mark.fault("B16")
@pytest.mark.parametrize(("shape", "count"), [((8, 128), 32), ((7, 3), 3)], ids=str)
def test_the_index_gives_the_global_shape_and_offsets_that_tile_it(
    tmp_path: Path, shape: tuple[int, ...], count: int
) -> None:
    whole = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    found = torch.full(shape, -1.0)
    for spread in spreads(shape, (count,), ("S0",)):
        block = block_of(spread)
        local = whole[tuple(slice(begin, end) for begin, end in block)]
        indexed, values = _indexed(tmp_path / str(spread.rank), local, Piece(shape, tuple(b for b, _ in block)))
        assert (indexed.global_shape, indexed.shape) == (shape, tuple(local.shape))
        place = tuple(slice(at, at + extent) for at, extent in zip(indexed.offsets, indexed.shape, strict=True))
        assert bool((found[place] == -1).all())
        found[place] = values
    assert torch.equal(found, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float4_e2m1fn_x2, torch.complex128], ids=str)
def test_a_piece_of_any_dtype_is_one_to_the_services(tmp_path: Path, dtype: torch.dtype) -> None:
    local = torch.zeros(2 * 3 * dtype.itemsize, dtype=torch.uint8).view(dtype).reshape(2, 3)
    indexed, _ = _indexed(tmp_path / "i", local, Piece((4, 3), (2, 0)))
    item = [] if indexed.dtype != "U8" else [dtype.itemsize]
    assert list(indexed.global_shape) == [4, 3, *item]
    assert list(indexed.offsets) == [2, 0, *(0 for _ in item)]


def _indexed(path: Path, local: torch.Tensor, piece: Piece) -> tuple[Tensor, torch.Tensor]:
    """Return what the index says of an image's one tensor, and the values where it says that they lie."""
    snapshot_file(path, {"w": local}, json.dumps({}).encode(), METADATA, {"w": piece})
    body = path.read_bytes()
    (tensor,) = (t for t in index_of(hash_image(memoryview(body), name="i"), key=Key("k")).tensors if t.name == "w")
    stored = bytearray(body[tensor.begin : tensor.end])
    return tensor, torch.frombuffer(stored, dtype=local.dtype).reshape(local.shape) if stored else local
