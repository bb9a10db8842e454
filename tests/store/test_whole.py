"""Whole tensors out of parts: bands and runs against a brute force, tilings, and what is told apart by rank."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tests.support.fake_store import FakeStore
from tests.support.tensor_stores import Stored, Tensors, piece, pieces, tensor_job, whole

from toprope.store.checkpoint import assemble
from toprope.store.checkpoint.assemble import read_indexes, tensor_bytes
from toprope.store.checkpoint.whole import Whole, bands, common, gather, runs, untiled
from toprope.store.errors import CorruptObjectError
from toprope.store.log.chain import read_log


def gathered(tensors: Tensors, *, world: int) -> tuple[FakeStore, dict[str, Whole]]:
    store = FakeStore()
    tensor_job(store, tensors, world=world)
    _, indexes = read_indexes(store, read_log(store, "job"), 4)
    return store, {one.label: one for one in gather(indexes) if one.name != "__document__"}


@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3), (5, 1, 4), (3, 4, 5), (2, 2, 2, 3), (0, 7), (3, 0)])
@pytest.mark.parametrize("limit", [1, 4, 16, 50, 10_000])
def test_bands_are_all_of_a_tensor_in_order(shape: tuple[int, ...], limit: int) -> None:
    numbers = np.arange(int(np.prod(shape)), dtype="float32").reshape(shape)
    found, at = b"", 0
    for band in bands(shape, item_bytes=4, limit=limit):
        body = numbers[tuple(slice(*one) for one in band.box)].tobytes()
        assert (band.begin, band.end) == (at, at + len(body))
        assert len(body) <= max(limit, 4)
        found, at = found + body, band.end
    assert found == numbers.tobytes()


def test_runs_are_where_the_elements_of_a_block_lie() -> None:
    draw = random.Random(7)
    for _ in range(300):
        extents = [draw.randint(1, 4) for _ in range(draw.randint(0, 4))]
        corner = [draw.randint(0, 3) for _ in extents]
        within = tuple((at, at + extent) for at, extent in zip(corner, extents, strict=True))
        block = tuple((draw.randint(a, b - 1), b) for a, b in within)
        block = tuple((a, draw.randint(a + 1, b)) for a, b in block)
        numbers = np.arange(int(np.prod(extents))).reshape(extents)
        inside = tuple(slice(a - c, b - c) for (a, b), c in zip(block, corner, strict=True))
        found = list(itertools.chain.from_iterable(range(at, at + count) for at, count in runs(block, within)))
        assert found == numbers[inside].ravel().tolist()


def test_blocks_share_what_lies_in_both() -> None:
    assert common(((0, 4), (2, 6)), ((1, 9), (0, 3))) == ((1, 4), (2, 3))
    assert common(((0, 4), (2, 6)), ((4, 9), (0, 3))) is None
    assert common((), ()) == ()


@pytest.mark.fault("B16")
@pytest.mark.parametrize(("shape", "ranks"), [((8, 128), 32), ((7, 3), 3)])
def test_small_parameters_on_many_ranks_tile_their_own_shape(shape: tuple[int, int], ranks: int) -> None:
    values = np.arange(shape[0] * shape[1], dtype="float32").reshape(shape)
    cut = pieces(values, ranks=ranks)
    store, found = gathered(lambda _, rank: {"model.w": cut[rank]}, world=ranks)
    assert (found["model.w"].shape, untiled(found["model.w"])) == (shape, None)
    assert b"".join(tensor_bytes(store, found["model.w"], job="job")) == values.tobytes()


@pytest.mark.parametrize("limit", [1, 24, 100, 10_000])
def test_any_cut_gives_the_tensor_back_whatever_the_band(limit: int) -> None:
    draw = random.Random(limit)
    for _ in range(12):
        values = np.arange(4 * 6 * 5, dtype="float64").reshape(4, 6, 5)
        cuts = [sorted({0, extent, *draw.sample(range(1, extent), 2)}) for extent in values.shape]
        blocks = list(itertools.product(*(itertools.pairwise(one) for one in cuts)))
        draw.shuffle(blocks)
        stored = [piece(values, *block) for block in blocks]
        store, found = gathered(lambda _, rank: {"w": stored[rank]}, world=len(stored))  # noqa: B023 - used at once
        assert untiled(found["w"]) is None
        assert b"".join(tensor_bytes(store, found["w"], job="job", limit=limit)) == values.tobytes()


def bad_cuts() -> dict[str, tuple[list[Stored], str]]:
    values: np.ndarray[Any, Any] = np.arange(24, dtype="float32").reshape(4, 6)
    top, bottom = piece(values, (0, 2), (0, 6)), piece(values, (2, 4), (0, 6))
    return {
        "a gap": ([top], "12 of its 24 elements"),
        "a hole": ([top, piece(values, (2, 4), (0, 3))], "18 of its 24 elements"),
        "an overlap": ([top, bottom, piece(values, (1, 2), (0, 6))], "ranks 0 and 2 overlap"),
        "an overlap and a gap": ([top, piece(values, (1, 3), (0, 6))], "ranks 0 and 1 overlap"),
        "two columns": ([piece(values, (0, 4), (0, 4)), piece(values, (0, 4), (2, 6))], "overlap"),
        "other values": ([top, bottom, piece(values + 1, (2, 4), (0, 6))], "overlap"),
        "another shape": ([top, piece(np.zeros((4, 7), "float32"), (2, 4), (0, 6))], "F32 [4, 7]"),
        "another dtype": ([top, piece(np.zeros((4, 6), "float64"), (2, 4), (0, 6))], "F64 [4, 6]"),
    }


@pytest.mark.parametrize("what", bad_cuts())
def test_pieces_that_do_not_tile_are_found(what: str) -> None:
    stored, text = bad_cuts()[what]
    _, found = gathered(lambda _, rank: {"w": stored[rank]}, world=len(stored))
    why = untiled(found["w"])
    assert why is not None
    assert text in why


def test_what_all_have_alike_is_one_and_what_differs_is_each_ranks_own() -> None:
    values = np.arange(6, dtype="float32")
    halves = pieces(values, ranks=2)

    def tensors(_: int, rank: int) -> dict[str, Stored]:
        mine = {"model.mean": whole([1.0, 2.0]), "rng": whole([rank], "uint8"), "half": halves[rank % 2]}
        return mine | ({"model.w": whole(values)} if rank == 1 else {})

    _, found = gathered(tensors, world=4)
    assert sorted(found) == [
        "half", "model.mean", "model.w", "rank-00000.rng", "rank-00001.rng", "rank-00002.rng", "rank-00003.rng",
    ]  # fmt: skip
    assert [len(found[name].parts) for name in ("half", "model.mean", "model.w")] == [2, 1, 1]
    assert all(untiled(one) is None for one in found.values())


def test_a_flipped_byte_of_any_piece_names_it() -> None:
    values = np.arange(24, dtype="float32").reshape(4, 6)
    cut = pieces(values, ranks=3, along=1)
    store, found = gathered(lambda _, rank: {"w": cut[rank]}, world=3)
    for part in found["w"].parts:
        key = next(key for key in store.objects if key == part.index.files[0].key)
        good = store.objects[key]
        for at in range(part.tensor.begin, part.tensor.end):
            store.objects[key] = good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]
            with pytest.raises(CorruptObjectError, match=f"step 10, rank {part.rank}, tensor w: digest .* bytes"):
                list(tensor_bytes(store, found["w"], job="job"))
        store.objects[key] = good


def test_memory_is_bounded_by_the_band_and_not_by_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.zeros((64, 1000), dtype="float32")
    cut = pieces(values, ranks=4, along=1)
    store, found = gathered(lambda _, rank: {"w": cut[rank]}, world=4)
    assert assemble.BAND_BYTES < 2**26
    assert max(len(chunk) for chunk in tensor_bytes(store, found["w"], job="job", limit=8000)) == 8000


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"offsets": (9, 0)}, "does not lie inside"),
        ({"offsets": (-1, 0)}, "does not lie inside"),
        ({"offsets": (2,)}, "does not lie inside"),
        ({"end": 140}, "bytes, not those of its shape"),
        ({"dtype": "F128"}, "F128"),
    ],
)
def test_what_an_index_says_of_a_piece_is_not_believed(changes: dict[str, Any], text: str) -> None:
    cut = pieces(np.arange(24, dtype="float32").reshape(4, 6), ranks=2)
    store = FakeStore()
    tensor_job(store, lambda _, rank: {"w": cut[rank]}, world=2)
    _, (first, second) = read_indexes(store, read_log(store, "job"), 4)
    tensors = tuple(replace(one, **changes) if one.name == "w" else one for one in second.tensors)
    found = next(one for one in gather([first, replace(second, tensors=tensors)]) if one.name == "w")
    parts = sorted(found.parts, key=lambda part: part.rank)
    why = untiled(Whole(name="w", rank=None, dtype=found.dtype, shape=found.shape, parts=tuple(parts)))
    assert why is not None
    assert text in why
