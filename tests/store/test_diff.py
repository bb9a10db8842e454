"""Diff: what it finds by digests alone, what it says of values, and that damage is named."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from tests.support.fake_store import FakeStore
from tests.support.tensor_stores import Stored, Tensors, bfloat16, pieces, tensor_job, whole

from toprope.__main__ import main
from toprope.store.checkpoint.assemble import read_indexes
from toprope.store.errors import StoreError, UsageError
from toprope.store.log.chain import read_log
from toprope.store.look.diff import Diff, Side, diff
from toprope.store.look.values import Comparison, plainly, with_numpy
from toprope.store.names import Key
from toprope.store.objects.directory import DirectoryStore
from toprope.store.objects.opening import open_store
from toprope.store.places import parse_selected
from toprope.store.transfer.restore import plan

WEIGHT = np.arange(24, dtype="float32").reshape(4, 6)


def tensors(step: int, rank: int) -> dict[str, Stored]:
    """Two ranks: what changes by step 20 is cut by rows, per rank, alike on both, of another shape, new and gone."""
    moved = WEIGHT.copy()
    moved[3, 5] += step / 80
    mine = {
        "model.cut": pieces(moved, ranks=2)[rank],
        "model.same": pieces(WEIGHT, ranks=2, along=1)[rank],
        "model.mean": whole([step, rank if step == 20 else 0]),
        "model.grown": whole([0] * step),
        "rng": whole([rank, step], "uint8"),
    }
    return mine | {f"model.of.{step}": bfloat16([1])}


def side(store: FakeStore, step: int) -> Side:
    state = read_log(store, "job")
    return Side(store=store, job="job", indexes=read_indexes(store, state, plan(state, step=step)[0])[1])


def compared(store: FakeStore, *, compare: Comparison | None = None, to: FakeStore | None = None) -> Diff:
    return diff(side(store, 10), side(to or store, 20 if to is None else 10), compare=compare)


def store_of(tensors: Tensors, *, world: int, steps: tuple[int, ...] = (10,)) -> FakeStore:
    store = FakeStore()
    tensor_job(store, tensors, world=world, steps=steps)
    return store


def test_digests_alone_tell_what_differs() -> None:
    store = store_of(tensors, world=2, steps=(10, 20))
    before, after = side(store, 10), side(store, 20)
    for key in [key for key in store.objects if key.endswith(".safetensors")]:
        del store.objects[key]  # no tensor is read
    found = diff(before, after)
    assert {(change.name, change.kind, change.before, change.after) for change in found.changes} == {
        ("model.cut", "changed", "F32 [4, 6]", "F32 [4, 6]"),
        ("rank-00000.model.mean", "changed", "F32 [2]", "F32 [2]"),
        ("rank-00001.model.mean", "changed", "F32 [2]", "F32 [2]"),
        ("rank-00000.rng", "changed", "U8 [2]", "U8 [2]"),
        ("rank-00001.rng", "changed", "U8 [2]", "U8 [2]"),
        ("model.grown", "reshaped", "F32 [10]", "F32 [20]"),
        ("model.of.10", "removed", "BF16 [1]", None),
        ("model.of.20", "added", None, "BF16 [1]"),
        ("rank-00000.__document__", "changed", "U8 [23]", "U8 [23]"),
        ("rank-00001.__document__", "changed", "U8 [23]", "U8 [23]"),
    }
    assert found.same == 1
    assert diff(before, before).changes == ()


@pytest.mark.parametrize("compare", [plainly, with_numpy])
def test_values_say_by_how_much(compare: Comparison) -> None:
    store = store_of(tensors, world=2, steps=(10, 20))
    apart = {change.name: change.apart for change in compared(store, compare=compare).changes}
    cut, mean = apart["model.cut"], apart["rank-00001.model.mean"]
    assert cut is not None
    assert mean is not None
    assert (cut.elements, cut.different, cut.max_abs) == (24, 1, 0.125)
    assert (mean.elements, mean.different, mean.max_abs) == (2, 2, 10.0)
    assert apart["model.of.10"] is apart["model.grown"] is None


def test_what_other_ranks_stored_in_other_pieces_is_compared_by_its_values() -> None:
    by_rows = store_of(lambda _, rank: {"w": pieces(WEIGHT, ranks=2)[rank]}, world=2)
    moved = WEIGHT + np.eye(4, 6, dtype="float32")
    alike, other = (
        store_of(lambda _, rank, of=of: {"w": pieces(of, ranks=3, along=1)[rank]}, world=3)  # type: ignore[misc]
        for of in (WEIGHT, moved)
    )
    for to in (alike, other):
        assert [change.kind for change in compared(by_rows, to=to).changes if change.name == "w"] == ["recut"]
    assert [change.name for change in compared(by_rows, to=alike, compare=plainly).changes if change.name == "w"] == []
    (change,) = (change for change in compared(by_rows, to=other, compare=plainly).changes if change.name == "w")
    assert change.apart is not None
    assert (change.apart.different, change.apart.max_abs) == (4, 1.0)


def test_damage_in_what_is_compared_is_named() -> None:
    store = store_of(tensors, world=2, steps=(10, 20))
    before, after = side(store, 10), side(store, 20)
    part = next(one for one in after.indexes[1].tensors if one.name == "model.cut")
    key = Key(after.indexes[1].files[0].key)
    body = bytearray(store.objects[key])
    body[part.begin] ^= 1
    store.objects[key] = bytes(body)
    assert len(diff(before, after).changes) == 10
    with pytest.raises(StoreError, match=r"step 20, rank 1, tensor model\.cut: digest"):
        diff(before, after, compare=plainly)


@pytest.mark.parametrize(
    ("text", "root", "step"),
    [
        ("store/gpt@10", "store", 10),
        ("/a/b@c/gpt@7", "/a/b@c", 7),
        ("s3://b/p/gpt@10", "s3://b/p", 10),
        ("s3://b/p?endpoint=http://h:1/gpt@10", "s3://b/p?endpoint=http://h:1", 10),
        ("s3://b/p/gpt@10?endpoint=http://h:1", "s3://b/p?endpoint=http://h:1", 10),
    ],
)
def test_a_checkpoint_is_named_by_root_job_and_step(text: str, root: str, step: int) -> None:
    assert parse_selected(text) == (root, "gpt", step)


@pytest.mark.parametrize("text", ["store", "store/gpt", "store/gpt@", "store/gpt@x", "gpt@10", "store/GPT@10"])
def test_what_names_no_checkpoint_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="ROOT/JOB@STEP"):
        parse_selected(text)


def test_the_command_says_what_differs_and_its_status_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor_job(DirectoryStore(tmp_path), tensors, world=2, steps=(10, 20), name="gpt")
    root = str(tmp_path)
    assert main(["diff", root, "--step", "10", "--step", "20"]) == 1
    out, err = capsys.readouterr()
    assert ["changed", "model.cut", "F32", "[4,", "6]"] in [line.split() for line in out.splitlines()]
    assert (
        err
        == "6 changed, 1 added, 1 removed, 1 reshaped, 1 the same (by digest; --values says by how much)\n".replace(
            "6", "7"
        )
    )
    assert main(["diff", f"{root}/gpt@10", f"{root}/gpt@20", "--values"]) == 1
    out, err = capsys.readouterr()
    assert "1 of 24 elements, by at most 0.125" in out
    assert "(values compared with numpy)" in err
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert main(["diff", root, "--job", "gpt", "--step", "10", "--step", "20", "--values", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["same"], said["values"]) == (1, "the standard library")
    cut = next(change for change in said["changes"] if change["name"] == "model.cut")
    assert cut["apart"] == {"elements": 24, "different": 1, "max_abs": 0.125, "not_finite": 0}
    assert main(["diff", root, "--step", "10", "--step", "10"]) == 0
    assert capsys.readouterr() == ("", "9 the same (by digest; --values says by how much)\n")


def test_statuses_of_wrong_use_of_nothing_there_and_of_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensor_job(DirectoryStore(tmp_path), tensors, world=2, steps=(10, 20), name="gpt")
    root = str(tmp_path)
    for arguments, status in (
        ([root], 64),
        ([root, "--step", "10"], 64),
        ([f"{root}/gpt@10", f"{root}/gpt@20", "--job", "gpt"], 64),
        ([f"{root}/gpt@10", root], 64),
        ([root, "--step", "10", "--step", "15"], 3),
        ([f"{root}/gpt@10", f"{root}/none/gpt@10"], 4),
    ):
        assert main(["diff", *arguments]) == status
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
    path = next(tmp_path.glob("gpt/shards/a1/s000000020/rank-00001-*.index.json"))
    path.write_bytes(path.read_bytes().replace(b"F32", b"F64"))
    assert main(["diff", root, "--step", "10", "--step", "20"]) == 2
    assert "job gpt, step 20, rank 1: SHA-256" in capsys.readouterr().err


def test_diff_reads_buckets(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    root = request.getfixturevalue("strict").root("team")
    tensor_job(open_store(root, write=True), tensors, world=2, steps=(10, 20), name="gpt")
    tensor_job(DirectoryStore(tmp_path), tensors, world=2, steps=(10, 20), name="gpt")
    assert main(["diff", f"{root}/gpt@10", f"{tmp_path}/gpt@20", "--values"]) == 1
    assert "1 of 24 elements, by at most 0.125" in capsys.readouterr().out
