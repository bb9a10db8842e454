"""Import: what others wrote, in a store and out again, bit for bit; what is hostile or strange is refused by name."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections import OrderedDict
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.support.fake_store import FakeStore
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from toprope.__main__ import main
from toprope.store.errors import CkptError, CorruptObjectError, UnavailableError, UsageError
from toprope.store.log.chain import read_log
from toprope.store.look.show import job_names
from toprope.store.look.verify import verify_checkpoint
from toprope.store.names import Key
from toprope.store.transfer.dcp_metadata import read_metadata
from toprope.store.transfer.importing import import_source
from toprope.store.transfer.incoming import open_source

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATE: dict[str, torch.Tensor] = {
    "model.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4) / 7,
    "model.half": torch.tensor([1.5, -0.0, float("nan")], dtype=torch.bfloat16),
    "model.float8": torch.arange(256, dtype=torch.uint8).view(torch.float8_e5m2),
    "model.wave": torch.tensor([[1 + 2j], [3 - 4j]], dtype=torch.complex128),
    "model.short": torch.tensor([1 + 2j], dtype=torch.complex64),
    "model.count": torch.tensor(7),
    "model.empty": torch.zeros(0, 5),
    "model.flags": torch.tensor([True, False]),
}
VALUES: dict[str, object] = {"settings.lr": 0.1, "settings.betas": (0.9, 0.999), "settings.nothing": None}


def ckpt(*arguments: object) -> int:
    return main([str(one) for one in arguments])


def raw(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    body = tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    return str(tensor.dtype), tuple(tensor.shape), body.numpy().tobytes()


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    def plain(value: object) -> object:
        return raw(value) if isinstance(value, torch.Tensor) else value

    return {name: plain(one) for name, one in found.items()} == {name: plain(one) for name, one in expected.items()}


def write_dcp(directory: Path, state: dict[str, Any]) -> None:
    save(state, storage_writer=FileSystemWriter(directory), no_dist=True)


def torch_file(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(directory / "model.pt", weights_only=True)
    return found


@pytest.mark.parametrize("kind", ["dcp", "torch"])
def test_what_torch_wrote_comes_back_bit_for_bit(tmp_path: Path, kind: str) -> None:
    source, root = tmp_path / "source", tmp_path / "store"
    if kind == "dcp":
        write_dcp(source, STATE | VALUES)
    else:
        torch.save(STATE | VALUES, source)
    assert ckpt("import", root, source, "--job", "gpt", "--step", 7) == 0
    assert ckpt("verify", root, "--step", 7) == 0
    assert ckpt("export", root, tmp_path / "out", "--to", "torch") == 0
    assert same(torch_file(tmp_path / "out"), STATE | VALUES)
    assert ckpt("export", root, tmp_path / "dcp", "--to", "dcp") == 0
    assert ckpt("import", root, tmp_path / "dcp", "--job", "again") == 0
    assert ckpt("export", root, tmp_path / "twice", "--to", "torch", "--job", "again") == 0
    assert same(torch_file(tmp_path / "twice"), STATE | VALUES)


def test_files_of_hugging_face_come_back_bit_for_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "store"
    state = {name: one for name, one in STATE.items() if name != "model.wave"}
    save_file(state, tmp_path / "one.safetensors")
    assert ckpt("import", root, tmp_path / "one.safetensors", "--job", "one") == 0
    assert ckpt("export", root, tmp_path / "split", "--max-shard-size", "100", "--job", "one") == 0
    assert (tmp_path / "split" / "model.safetensors.index.json").exists()
    capsys.readouterr()
    assert ckpt("import", root, tmp_path / "split", "--job", "two", "--json") == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == len(state)
    assert ckpt("export", root, tmp_path / "out", "--to", "torch", "--job", "two") == 0
    assert same(torch_file(tmp_path / "out"), state)


def test_bytes_of_a_dtype_that_safetensors_lacks_keep_their_true_one(tmp_path: Path) -> None:
    root = tmp_path / "store"
    torch.save(STATE, tmp_path / "a.pt")
    assert ckpt("import", root, tmp_path / "a.pt", "--job", "one") == 0
    assert ckpt("export", root, tmp_path / "files", "--as-bytes") == 0
    assert ckpt("import", root, tmp_path / "files", "--job", "two") == 0
    assert ckpt("export", root, tmp_path / "out", "--to", "torch", "--job", "two") == 0
    assert same(torch_file(tmp_path / "out"), STATE)


def test_model_and_optimizer_go_through_a_store_and_load_with_pytorch_alone(tmp_path: Path) -> None:
    def trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
        for _ in range(seed + 1):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = trained(1)
    weights, moments = get_state_dict(model, optimizer)
    write_dcp(tmp_path / "dcp", {"model": weights, "optimizer": moments})
    root = tmp_path / "store"
    assert ckpt("import", root, tmp_path / "dcp", "--job", "gpt") == 0
    assert ckpt("export", root, tmp_path / "out", "--to", "dcp") == 0
    other, its_optimizer = trained(0)
    into, its_moments = get_state_dict(other, its_optimizer)
    state: dict[str, Any] = {"model": into, "optimizer": its_moments}
    load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    set_state_dict(other, its_optimizer, model_state_dict=into, optim_state_dict=state["optimizer"])
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert its_optimizer.param_groups[0]["lr"] == 0.02
    for one, another in zip(its_optimizer.state.values(), optimizer.state.values(), strict=True):
        assert same(one, another)


def test_a_tensor_in_blocks_of_two_dimensions_is_put_together(tmp_path: Path) -> None:
    whole = torch.arange(48, dtype=torch.float64).reshape(6, 8)
    directory = tmp_path / "dcp"
    write_dcp(directory, {"model.weight": whole})
    metadata = FileSystemReader(directory).read_metadata()
    tensors, _ = read_metadata((directory / ".metadata").read_bytes(), name="x")
    assert tensors[0].shape == (6, 8)
    blocks = {(row, column): whole[row : row + 3, column : column + 4] for row in (0, 3) for column in (0, 4)}
    described = metadata.state_dict_metadata["model.weight"]
    assert isinstance(described, TensorStorageMetadata)
    kind = type(described.chunks[0])
    info = next(iter(metadata.storage_data.values()))
    index = next(iter(metadata.storage_data))
    described.chunks = []
    metadata.storage_data = {}
    for number, (at, block) in enumerate(blocks.items()):
        torch.save(block.clone(), directory / f"{number}.distcp")
        described.chunks.append(kind(torch.Size(at), torch.Size(block.shape)))
        place = type(info)(f"{number}.distcp", 0, (directory / f"{number}.distcp").stat().st_size)
        metadata.storage_data[type(index)("model.weight", at, number)] = place
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    root = tmp_path / "store"
    assert ckpt("import", root, directory, "--job", "gpt") == 0
    assert ckpt("export", root, tmp_path / "out", "--to", "torch") == 0
    assert same(torch_file(tmp_path / "out"), {"model.weight": whole})
    described.chunks.pop()
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptObjectError, match="its blocks have 36 of its 48 elements"):
        open_source(directory)


class _PicklerOf3110(pickle.Pickler):
    """Pickles members of enums as Python 3.11.0 to 3.11.3 does, which is what Debian 12 has: by ``getattr``."""

    def reducer_override(self, value: object) -> Any:  # noqa: ANN401 - as pickle has it
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_what_an_early_python_3_11_wrote_is_taken(tmp_path: Path) -> None:
    directory, root = tmp_path / "dcp", tmp_path / "store"
    write_dcp(directory, STATE)
    with (directory / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    with (directory / ".metadata").open("wb") as file:
        _PicklerOf3110(file).dump(metadata)
    assert b"getattr" in (directory / ".metadata").read_bytes()
    assert ckpt("import", root, directory, "--job", "gpt") == 0
    assert ckpt("export", root, tmp_path / "out", "--to", "torch") == 0
    assert same(torch_file(tmp_path / "out"), STATE)


class _Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def test_a_hostile_pickle_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark, root = tmp_path / "mark", tmp_path / "store"
    directory = tmp_path / "dcp"
    write_dcp(directory, STATE)
    good = (directory / ".metadata").read_bytes()
    metadata = FileSystemReader(directory).read_metadata()
    metadata.planner_data = _Bomb(mark)
    for protocol in range(2, 6):
        (directory / ".metadata").write_bytes(pickle.dumps(metadata, protocol))
        assert ckpt("import", root, directory, "--job", "gpt") == 2
        assert "does not belong there" in capsys.readouterr().err
    metadata.planner_data = torch.nn.Linear  # of torch, and nothing that a checkpoint has
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptObjectError, match=r"'torch\.nn\.modules\.linear Linear', which does not belong there"):
        open_source(directory)
    (directory / ".metadata").write_bytes(good)
    for path in directory.glob("*.distcp"):
        path.write_bytes(pickle.dumps(_Bomb(mark)).ljust(path.stat().st_size, b"."))
    assert ckpt("import", root, directory, "--job", "gpt") == 2
    torch.save({"model.weight": _Bomb(mark)}, tmp_path / "bomb.pt")
    assert ckpt("import", root, tmp_path / "bomb.pt", "--job", "gpt") == 2
    assert "nothing is unpickled otherwise" in capsys.readouterr().err
    assert not mark.exists()
    assert ckpt("ls", root) == 0
    assert "no jobs yet" in capsys.readouterr().err


def test_every_byte_of_the_metadata_may_be_wrong(tmp_path: Path) -> None:
    write_dcp(tmp_path, {"model.weight": torch.zeros(2)})
    good = (tmp_path / ".metadata").read_bytes()
    for at in range(len(good)):
        for flip in (0x01, 0x80, 0xFF):
            body = bytearray(good)
            body[at] ^= flip
            try:
                read_metadata(bytes(body), name="x")
            except CorruptObjectError:
                continue
        with pytest.raises(CorruptObjectError):
            read_metadata(good[:at], name="x")


def test_a_file_outside_of_the_directory_is_not_read(tmp_path: Path) -> None:
    directory = tmp_path / "dcp"
    write_dcp(directory, {"model.weight": torch.zeros(2)})
    body = (directory / ".metadata").read_bytes()
    for name in ("../a.distcp", "/etc/passwd", "..", "a/b"):
        metadata = FileSystemReader(directory).read_metadata()
        next(iter(metadata.storage_data.values())).relative_path = name
        (directory / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(CorruptObjectError, match="not one of its directory"):
            open_source(directory)
    (directory / ".metadata").write_bytes(body)
    open_source(directory)


def test_an_index_that_names_other_files_or_tensors_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for weight_map, text in (
        ({"a": "../x.safetensors"}, "not one of its directory"),
        ({"b": "model.safetensors"}, "disagree"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CorruptObjectError, match=text):
            open_source(tmp_path)


def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("hello")
    for name, text in (("empty", "neither"), ("text", "not a file of"), ("none", "no such file")):
        with pytest.raises(UsageError, match=text):
            open_source(tmp_path / name)


def test_values_that_are_not_plain_are_left_out_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"weight": torch.zeros(2), "dtype": torch.float16, "nested": OrderedDict(a=1)}, tmp_path / "a.pt")
    assert ckpt("import", tmp_path / "store", tmp_path / "a.pt", "--job", "gpt", "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["left_out"] == ["dtype"]
    assert err.startswith("dtype is left out:")
    assert err.count("\n") == 1


def test_a_job_that_is_there_is_left_alone(tmp_path: Path) -> None:
    store = FakeStore()
    save_file({"a": torch.zeros(2)}, tmp_path / "a.safetensors")
    import_source(store, open_source(tmp_path / "a.safetensors"), job="gpt", step=3)
    before = dict(store.objects)
    with pytest.raises(UsageError, match="there is a job of this name"):
        import_source(store, open_source(tmp_path / "a.safetensors"), job="gpt", step=3)
    assert store.objects == before
    state = read_log(store, "gpt")
    assert [ready.step for ready in state.readies.values()] == [3]


class _Stops(FakeStore):
    """A store that answers no create after so many, or keeps other bytes than it was given."""

    def __init__(self, after: int = -1, *, forgetful: bool = False) -> None:
        super().__init__()
        self.left, self.forgetful = after, forgetful

    def create(self, key: Key, body: bytes | memoryview) -> None:
        if self.left == 0:
            raise UnavailableError(f"{key}: gone")
        self.left -= 1
        super().create(key, bytes(body)[:-1] + b"!" if self.forgetful and key.endswith("safetensors") else body)


def test_an_import_that_is_stopped_leaves_no_checkpoint_that_is_not_whole(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "a.safetensors")
    whole = FakeStore()
    import_source(whole, open_source(tmp_path / "a.safetensors"), job="gpt", step=3)
    for after in range(len(whole.created)):
        store = _Stops(after)
        with pytest.raises(UnavailableError):
            import_source(store, open_source(tmp_path / "a.safetensors"), job="gpt", step=3)
        state = read_log(store, "gpt")
        assert not state.live or not verify_checkpoint(store, state, state.live[0]).damages


def test_what_the_store_does_not_keep_is_found(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "a.safetensors")
    store = _Stops(forgetful=True)
    with pytest.raises(CkptError, match="returns other bytes than were written"):
        import_source(store, open_source(tmp_path / "a.safetensors"), job="gpt", step=3)
    assert not job_names(store)


def test_a_lying_header_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    assert ckpt("import", tmp_path / "store", path, "--job", "gpt") == 2
    assert not (tmp_path / "store" / "gpt").exists()
