"""A part of a checkpoint: verified by a sample, looked at deeper, restored by names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from tests.support.stores import small_store
from tests.support.tensor_stores import Stored, complex128, piece, pieces, read_plainly, tensor_job, whole

from toprope.__main__ import main
from toprope.store.errors import UsageError
from toprope.store.look.sample import parse_sample
from toprope.store.objects.directory import DirectoryStore

WEIGHT = np.arange(40, dtype="float32").reshape(8, 5)


def tensors(step: int, rank: int) -> dict[str, Stored]:
    return {
        "model.weight": pieces(WEIGHT, ranks=2)[rank],
        "model.bias": whole([step, 1.0]),
        "model.wave": complex128([rank + 2j]),
        **{f"optimizer.state.{number}": whole([number, rank]) for number in range(20)},
    }


@pytest.fixture
def root(tmp_path: Path) -> Path:
    directory = tmp_path / "store"
    directory.mkdir()
    tensor_job(DirectoryStore(directory), tensors, world=2)
    return directory


def ckpt(*arguments: object) -> int:
    return main([str(one) for one in arguments])


def flipped(root: Path, tensor: str, *, rank: int = 0) -> None:
    """Change a byte of a tensor in its file."""
    path = next(root.rglob(f"rank-{rank:05d}*.safetensors"))
    body = bytearray(path.read_bytes())
    length = int.from_bytes(body[:8], "little")
    body[8 + length + json.loads(body[8 : 8 + length])[tensor]["data_offsets"][0]] ^= 1
    path.write_bytes(body)


def test_a_sample_is_the_same_for_a_seed_and_finds_what_it_reads(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ckpt("verify", root, "--sample", "10%", "--json") == 0
    first = json.loads(capsys.readouterr().out)["checkpoints"][0]["sampled"]
    assert first == {"tensors": 5, "of": 48, "bytes": first["bytes"]}
    flipped(root, "optimizer.state.7", rank=1)
    statuses = [ckpt("verify", root, "--sample", "12", "--seed", seed) for seed in range(12)]
    assert set(statuses) == {0, 2}
    assert statuses == [ckpt("verify", root, "--sample", "12", "--seed", seed) for seed in range(12)]
    capsys.readouterr()
    assert ckpt("verify", root, "--sample", "100%") == 2
    out, err = capsys.readouterr()
    assert "rank 1, tensor optimizer.state.7: digest" in out
    assert out.count("optimizer.state.7") == 1
    assert "1 finding" in err


def test_a_sample_says_what_it_did_not_read(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ckpt("verify", root, "--sample", "1%") == 0
    out, err = capsys.readouterr()
    assert "read 1 of 48 tensors" in out
    assert "the rest was not read" in out
    assert "all that was read is good" in err


def test_without_reading_tensors_what_is_cut_long_or_missing_is_found_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes: dict[str, Callable[[Path], object]] = {
        "missing": lambda path: path.unlink(),
        "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
        "long": lambda path: path.write_bytes(path.read_bytes() + b"!"),
        "index": lambda path: next(path.parent.glob("*.json")).unlink(),
    }
    for name, change in changes.items():
        (tmp_path / name).mkdir()
        small_store(DirectoryStore(tmp_path / name), steps=(10,))
        change(next((tmp_path / name).rglob("rank-00001*.safetensors")))
        assert ckpt("verify", tmp_path / name, "--sample", "0") == 2, name
        assert "read 0 of" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "x", "-1", "101%", "1.5", "%"])
def test_a_sample_that_is_none_is_wrong_use(text: str) -> None:
    with pytest.raises(UsageError, match="give a number of tensors"):
        parse_sample(text, seed=0)


def test_a_sample_of_a_part_of_a_hundred_has_one_at_least() -> None:
    assert parse_sample("0.1%", seed=0).of(10) == 1
    assert parse_sample("50%", seed=0).of(3) == 2
    assert parse_sample("20", seed=0).of(3) == 3


def test_deep_finds_pieces_that_do_not_make_up_a_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def gap(step: int, rank: int) -> dict[str, Stored]:
        return {"model.weight": piece(WEIGHT, ((0, 4), (5, 8))[rank], (0, 5))}

    tensor_job(DirectoryStore(tmp_path), gap, world=2)
    assert ckpt("verify", tmp_path) == 0
    assert ckpt("verify", tmp_path, "--deep", 3) == 2
    assert "tensor model.weight: its pieces have 35 of its 40 elements" in capsys.readouterr().out


def test_deep_names_what_another_number_of_ranks_can_not_cut(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ckpt("verify", root, "--deep", 3, "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert "model.wave" in found["own"]
    assert "model.weight" not in found["own"]
    assert ckpt("verify", root, "--deep", 2) == 0
    assert "each rank's own" not in capsys.readouterr().out


def test_only_some_tensors_are_restored_as_they_are_stored(root: Path, tmp_path: Path) -> None:
    to = tmp_path / "out"
    assert ckpt("restore", root, "--to", to, "--only", "model.*") == 0
    files = [f"rank-0000{rank}-of-00002.safetensors" for rank in range(2)]
    assert sorted(path.name for path in to.iterdir()) == ["PARTIAL.json", *files]
    for rank, file in enumerate(files):
        stored = read_plainly(next(root.rglob(f"rank-0000{rank}*.safetensors")).read_bytes())
        expected = {name: one for name, one in stored.items() if name.startswith("model.")}
        assert read_plainly((to / file).read_bytes()) == expected
        with safe_open(to / file, framework="np") as opened:
            said = opened.metadata()
        assert said["partial"] == "true"
        assert said["dtype:model.wave"] == "complex128"
        assert json.loads(said["piece:model.weight"]) == {"global_shape": [8, 5], "offsets": [4 * rank, 0]}
    assert json.loads((to / "PARTIAL.json").read_text()) == {
        "job": "job", "attempt": 1, "step": 10, "only": ["model.*"],
    }  # fmt: skip


def test_a_part_needs_only_what_it_consists_of(root: Path, tmp_path: Path) -> None:
    flipped(root, "optimizer.state.7")
    assert ckpt("restore", root, "--to", tmp_path / "out", "--only", "model.weight") == 0
    flipped(root, "model.weight")
    assert ckpt("restore", root, "--to", tmp_path / "more", "--only", "model.weight") == 2
    assert not (tmp_path / "more").exists()


def test_names_that_are_not_there_are_wrong_use(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ckpt("restore", root, "--to", tmp_path / "out", "--only", "module.*") == 64
    assert "no tensor is named like module.*; there are model.bias" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
