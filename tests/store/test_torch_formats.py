"""What PyTorch reads and writes: a DCP directory and a torch.save file, out of a store and back, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.tensor_stores import Stored, bfloat16, complex128, pieces, tensor_job, whole
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from toprope.__main__ import main
from toprope.store.objects.directory import DirectoryStore
from toprope.store.transfer.torch_formats import dcp_write

WEIGHT = np.arange(40, dtype="float32").reshape(8, 5)
COLUMNS = np.arange(24, dtype="float64").reshape(4, 6)
FLOAT8 = np.arange(256, dtype="uint8")


def tensors(step: int, rank: int) -> dict[str, Stored]:
    """A rank of three: every way to cut a tensor, and every odd dtype and shape."""
    mine = {
        "model.layer.weight": pieces(WEIGHT + step, ranks=3)[rank],
        "model.head.weight": pieces(COLUMNS * step, ranks=3, along=1)[rank],
        "model.count": whole(step, "int64"),
        "model.empty": whole(np.zeros((0, 7))),
        "model.flags": whole([True, False, True], "bool"),
        "model.float8": Stored(values=FLOAT8, dtype="F8_E4M3"),
        "optimizer.state.layer.weight.exp_avg": pieces(WEIGHT / 3, ranks=3)[rank],
        "optimizer.state.layer.weight.step": whole(step),
    }
    if rank == 1:
        mine |= {"model.layer.bias": bfloat16([1.5, step]), "model.wave": complex128([[1 + 2j], [3 - 4j]])}
    return mine


EXPECTED: dict[str, torch.Tensor] = {
    "model.layer.weight": torch.from_numpy(WEIGHT + 10),
    "model.head.weight": torch.from_numpy(COLUMNS * 10),
    "model.count": torch.tensor(10),
    "model.empty": torch.zeros(0, 7),
    "model.flags": torch.tensor([True, False, True]),
    "model.float8": torch.from_numpy(FLOAT8).view(torch.float8_e4m3fn),
    "model.layer.bias": torch.tensor([1.5, 10], dtype=torch.bfloat16),
    "model.wave": torch.tensor([[1 + 2j], [3 - 4j]], dtype=torch.complex128),
    "optimizer.state.layer.weight.exp_avg": torch.from_numpy(WEIGHT / 3),
    "optimizer.state.layer.weight.step": torch.tensor(10.0),
}


def raw(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    body = tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    return str(tensor.dtype), tuple(tensor.shape), body.numpy().tobytes()


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return {name: raw(one) for name, one in found.items()} == {name: raw(one) for name, one in expected.items()}


@pytest.fixture
def root(tmp_path: Path) -> str:
    directory = tmp_path / "store"
    directory.mkdir()
    tensor_job(DirectoryStore(directory), tensors, world=3)
    return str(directory)


def ckpt(*arguments: object) -> int:
    return main([str(one) for one in arguments])


def loaded(directory: Path) -> dict[str, torch.Tensor]:
    """What plain DCP loads from a directory, into tensors that are full of something else."""
    metadata = FileSystemReader(directory).read_metadata()
    live = {
        name: torch.empty(one.size, dtype=one.properties.dtype)
        for name, one in metadata.state_dict_metadata.items()
        if isinstance(one, TensorStorageMetadata)
    }
    for tensor in live.values():
        if tensor.numel():
            tensor.reshape(-1).view(torch.uint8).fill_(0xA5)
    load(live, checkpoint_id=directory, no_dist=True)
    return live


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_dcp_directory_loads_bit_for_bit(root: str, tmp_path: Path) -> None:
    assert ckpt("export", root, tmp_path / "dcp", "--to", "dcp") == 0
    assert same(loaded(tmp_path / "dcp"), EXPECTED)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_tensors_are_cut_into_blocks_and_files_and_load_the_same(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp_write, "BLOCK_BYTES", 48)
    monkeypatch.setattr(dcp_write, "FILE_BYTES", 100)
    assert ckpt("export", root, tmp_path / "dcp", "--to", "dcp") == 0
    files = [path.stat().st_size for path in (tmp_path / "dcp").glob("*.distcp")]
    assert len(files) > 5
    assert same(loaded(tmp_path / "dcp"), EXPECTED)


def test_a_torch_file_loads_with_weights_only(root: str, tmp_path: Path) -> None:
    assert ckpt("export", root, tmp_path / "out", "--to", "torch") == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model.pt"]
    assert same(torch.load(tmp_path / "out" / "model.pt", weights_only=True), EXPECTED)


def test_only_some_tensors_without_their_prefix(root: str, tmp_path: Path) -> None:
    arguments = ("--only", "model.layer.*", "--prefix-strip", "model.")
    assert ckpt("export", root, tmp_path / "out", "--to", "torch", *arguments) == 0
    found = torch.load(tmp_path / "out" / "model.pt", weights_only=True)
    assert same(found, {f"layer.{name}": EXPECTED[f"model.layer.{name}"] for name in ("weight", "bias")})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_makes_a_file_of_a_dcp_directory_with_nested_names(root: str, tmp_path: Path) -> None:
    ckpt("export", root, tmp_path / "dcp", "--to", "dcp")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "made.pt")
    found: dict[str, Any] = torch.load(tmp_path / "made.pt", weights_only=True)
    assert raw(found["model"]["layer.weight"]) == raw(EXPECTED["model.layer.weight"])
    moment = found["optimizer"]["state"]["layer.weight"]["exp_avg"]
    assert raw(moment) == raw(EXPECTED["optimizer.state.layer.weight.exp_avg"])


@pytest.mark.parametrize("form", ["dcp", "torch"])
def test_what_is_damaged_is_not_exported(root: str, tmp_path: Path, form: str) -> None:
    shard = next(Path(root).rglob("rank-00001*.safetensors"))
    body = bytearray(shard.read_bytes())
    body[-40] ^= 1
    shard.write_bytes(bytes(body))
    assert ckpt("export", root, tmp_path / "out", "--to", form) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]


def test_without_torch_the_other_format_is_exported_and_these_say_what_they_need(root: str, tmp_path: Path) -> None:
    program = """
import sys; sys.modules["torch"] = None
from toprope.__main__ import main
print([main(["export", sys.argv[1], sys.argv[2] + form, "--to", form]) for form in ("dcp", "torch")])
sys.exit(main(["export", sys.argv[1], sys.argv[2] + "plain", "--only", "model.*", "--as-bytes"]))
"""
    command = [sys.executable, "-c", program, root, str(tmp_path / "to-")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "[64, 64]"), done.stderr
    assert "needs torch, which is not installed here" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store", "to-plain"]
