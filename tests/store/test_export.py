"""Export: every byte of whole tensors, in files that load without Toprope, or a refusal by name and nothing written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file
from tests.support.fake_store import FakeStore
from tests.support.stores import small_store
from tests.support.tensor_stores import Stored, bfloat16, complex128, pieces, read_plainly, tensor_job, whole

from toprope.__main__ import main
from toprope.store.errors import CkptError, StoreError, UnavailableError, UsageError
from toprope.store.log.chain import read_log
from toprope.store.objects.directory import DirectoryStore
from toprope.store.objects.opening import open_store
from toprope.store.sizes import parse_size
from toprope.store.transfer.export import Wanted, export

WEIGHT = np.arange(40, dtype="float32").reshape(8, 5)
COLUMNS = np.arange(24, dtype="float64").reshape(4, 6)
MODEL = Wanted(only=("model.*",))


def tensors(step: int, rank: int) -> dict[str, Stored]:
    """A rank of three: a weight cut by rows, one by columns, a bias that rank 1 has, a buffer, and its own numbers."""
    mine = {
        "model.layer.weight": pieces(WEIGHT + step, ranks=3)[rank],
        "model.head.weight": pieces(COLUMNS * step, ranks=3, along=1)[rank],
        "model.count": whole(step, "int64"),
        "rng.torch": whole([rank, 1, 2], "uint8"),
    }
    return mine | ({"model.layer.bias": bfloat16([1.5, step])} if rank == 1 else {})


def job(store: FakeStore | DirectoryStore, *, steps: tuple[int, ...] = (10, 20)) -> None:
    tensor_job(store, tensors, world=3, steps=steps)


def run(store: FakeStore, to: Path, wanted: Wanted, *, step: int | None = None, force: bool = False) -> list[str]:
    return list(export(store, read_log(store, "job"), to=to, wanted=wanted, step=step, force=force).files)


def new_store(parent: Path) -> Path:
    root = parent / "store"
    root.mkdir()
    return root


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_pieces_are_put_together_and_what_all_have_alike_is_written_once(tmp_path: Path) -> None:
    store = FakeStore()
    job(store)
    assert run(store, tmp_path / "out", MODEL) == names_in(tmp_path / "out") == ["model.safetensors"]
    found = read_plainly((tmp_path / "out" / "model.safetensors").read_bytes())
    assert found == {
        "model.layer.weight": ("F32", [8, 5], (WEIGHT + 20).tobytes()),
        "model.head.weight": ("F64", [4, 6], (COLUMNS * 20).tobytes()),
        "model.layer.bias": ("BF16", [2], bfloat16([1.5, 20]).values.tobytes()),
        "model.count": ("I64", [], np.int64(20).tobytes()),
    }
    with safe_open(tmp_path / "out" / "model.safetensors", framework="np") as opened:
        assert opened.metadata()["format"] == "pt"
        assert (opened.metadata()["toprope.job"], opened.metadata()["toprope.step"]) == ("job", "20")
        assert opened.get_tensor("model.layer.weight").tolist() == (WEIGHT + 20).tolist()
    assert names_in(tmp_path) == ["out"]


def test_an_older_step_and_names_without_their_prefix(tmp_path: Path) -> None:
    store = FakeStore()
    job(store)
    run(store, tmp_path / "out", Wanted(only=("model.layer.w*", "model.count"), prefix_strip="model."), step=10)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert sorted(found) == ["count", "layer.weight"]
    assert found["layer.weight"].tobytes() == (WEIGHT + 10).tobytes()


def test_what_is_too_large_for_one_file_is_split_as_hugging_face_does(tmp_path: Path) -> None:
    store = FakeStore()
    job(store)
    wanted = Wanted(only=("model.*",), prefix_strip="model.", max_shard_bytes=200)
    parts = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert run(store, tmp_path / "out", wanted) == [*parts, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": 8 + 192 + 4 + 160},
        "weight_map": {"count": parts[0], "head.weight": parts[0], "layer.bias": parts[1], "layer.weight": parts[1]},
    }
    assert names_in(tmp_path / "out") == [*parts, "model.safetensors.index.json"]
    files = [read_plainly((tmp_path / "out" / part).read_bytes()) for part in parts]
    for part, found in zip(parts, files, strict=True):
        assert sorted(found) == [name for name, place in index["weight_map"].items() if place == part]
    assert files[1]["layer.weight"][2] == (WEIGHT + 20).tobytes()


def test_what_was_exported_loads_with_toprope_blocked(tmp_path: Path) -> None:
    root = new_store(tmp_path)
    job(DirectoryStore(root), steps=(10,))
    for limit in ("1", "164", "5GB"):
        arguments = [str(tmp_path / limit), "--max-shard-size", limit, "--prefix-strip", "model."]
        assert main(["export", str(root), "--only", "model.*", *arguments]) == 0
    program = """
import sys; sys.modules["toprope"] = None
import glob, json, os
from safetensors import safe_open
for directory in sys.argv[1:]:
    found, places = {}, {}
    for path in sorted(glob.glob(directory + "/*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():
                found[name], places[name] = opened.get_tensor(name).double().tolist(), os.path.basename(path)
    index = directory + "/model.safetensors.index.json"
    assert not os.path.exists(index) or json.load(open(index))["weight_map"] == places
    print(json.dumps([len(set(places.values())), found]))
"""
    command = [sys.executable, "-c", program, *(str(tmp_path / limit) for limit in ("1", "164", "5GB"))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    files, found = zip(*map(json.loads, done.stdout.splitlines()), strict=True)
    assert files == (4, 3, 1)
    for one in found:
        assert one == {
            "layer.weight": (WEIGHT + 10).tolist(),
            "head.weight": (COLUMNS * 10).tolist(),
            "layer.bias": [1.5, 10.0],
            "count": 10.0,
        }


def test_what_is_each_ranks_own_is_refused_by_name_or_kept_under_its_rank(tmp_path: Path) -> None:
    store = FakeStore()
    job(store)
    with pytest.raises(UsageError, match=r"^rng\.torch: not the same on all ranks .*--only.*--per-rank"):
        run(store, tmp_path / "out", Wanted())
    assert names_in(tmp_path) == []
    run(store, tmp_path / "out", Wanted(per_rank=True))
    found = read_plainly((tmp_path / "out" / "model.safetensors").read_bytes())
    for rank in range(3):
        assert found[f"rank-0000{rank}.rng.torch"] == ("U8", [3], bytes([rank, 1, 2]))
        assert json.loads(found[f"rank-0000{rank}.__document__"][2]) == {"step": 20, "rank": rank}
    assert len(found) == 4 + 2 * 3


@pytest.mark.fault("B35")
def test_stages_that_number_their_layers_alike_never_collide(tmp_path: Path) -> None:
    """Two pipeline stages, of 3 and 5 layers: local numbers are kept apart by rank, global ones give 8 layers."""

    def layers(rank: int, *, first: int) -> dict[str, Stored]:
        return {
            f"{part}.layers.{first + number}.{leaf}": whole([rank, number, len(leaf)])
            for number in range((3, 5)[rank])
            for part, leaf in (("model", "weight"), ("optimizer.state", "weight.exp_avg"))
        }

    local, ours = FakeStore(), FakeStore()
    tensor_job(local, lambda _, rank: layers(rank, first=0), world=2)
    with pytest.raises(UsageError, match=r"model\.layers\.0\.weight, model\.layers\.1\.weight"):
        run(local, tmp_path / "out", MODEL)
    run(local, tmp_path / "local", Wanted(only=("model.*", "optimizer.*"), per_rank=True))
    found = load_file(tmp_path / "local" / "model.safetensors")
    assert len(found) == 2 * 8
    for name, values in found.items():
        rank = int(name[5:10]) if name.startswith("rank-") else 1
        number = int(name.partition("layers.")[2].partition(".")[0])
        assert values.tolist()[:2] == [rank, number]
    tensor_job(ours, lambda _, rank: layers(rank, first=3 * rank), world=2)
    run(ours, tmp_path / "global", Wanted(only=("model.*", "optimizer.*")))
    found = load_file(tmp_path / "global" / "model.safetensors")
    assert len([name for name in found if name.startswith("model.layers.")]) == 8
    assert found["model.layers.7.weight"].tolist() == [1, 4, 6]
    assert found["optimizer.state.layers.7.weight.exp_avg"].tolist() == [1, 4, 14]


@pytest.mark.fault("B16")
def test_small_parameters_on_many_ranks_are_exported_whole(tmp_path: Path) -> None:
    store = FakeStore()
    wide, odd = np.arange(8 * 128, dtype="float32").reshape(8, 128), np.arange(21, dtype="float32").reshape(7, 3)
    cut = {"model.wide": pieces(wide, ranks=32), "model.odd": pieces(odd, ranks=32)}
    tensor_job(store, lambda _, rank: {name: parts[rank] for name, parts in cut.items()}, world=32)
    run(store, tmp_path / "out", Wanted())
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: (values.shape, values.tobytes()) for name, values in found.items()} == {
        "model.wide": ((8, 128), wide.tobytes()),
        "model.odd": ((7, 3), odd.tobytes()),
    }


def test_pieces_that_do_not_tile_are_refused_by_name(tmp_path: Path) -> None:
    store = FakeStore()
    tensor_job(store, lambda _, rank: {"model.w": pieces(WEIGHT, ranks=3)[rank]}, world=2)
    with pytest.raises(StoreError, match=r"model\.w: can't be put together: its pieces have 30 of its 40 elements"):
        run(store, tmp_path / "out", Wanted())
    assert names_in(tmp_path) == []


def test_what_fsdp1_flattened_has_its_shape_again(tmp_path: Path) -> None:
    store = FakeStore()
    flat = pieces(WEIGHT.ravel(), ranks=3)
    spec = {"model": {"params": {"w": ["float32", [8, 5]], "b": ["float32", [40]]}}}
    names = ("model.w", "optimizer.state.w.exp_avg", "model.b")
    builder = tensor_job(store, lambda _, rank: dict.fromkeys(names, flat[rank]), world=3, spec=spec)
    run(store, tmp_path / "out", Wanted())
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert [found[name].shape for name in names] == [(8, 5), (8, 5), (40,)]
    assert found["model.w"].tobytes() == found["model.b"].tobytes() == WEIGHT.tobytes()
    (key,) = [key for key in store.objects if str(builder.log.state.spec_sha256) in key]
    store.objects[key] = store.objects[key].replace(b"8, 5", b"5, 8")
    with pytest.raises(StoreError, match="the spec is not the one"):
        run(store, tmp_path / "other", Wanted())


def test_dtypes_that_safetensors_lacks_are_refused_by_name_or_kept_as_bytes(tmp_path: Path) -> None:
    store = FakeStore()
    values = [1 + 2j, 3 - 1j]
    tensor_job(store, lambda *_: {"model.z": complex128(values), "model.mask": whole([1, 0], "uint8")}, world=1)
    with pytest.raises(UsageError, match=r"^model\.z \(complex128\): safetensors has no such dtype.*--as-bytes"):
        run(store, tmp_path / "out", Wanted())
    run(store, tmp_path / "mask", Wanted(only=("model.mask",)))
    run(store, tmp_path / "out", Wanted(as_bytes=True, prefix_strip="model."))
    found = read_plainly((tmp_path / "out" / "model.safetensors").read_bytes())
    assert found == {"z": ("U8", [2, 16], np.array(values).tobytes()), "mask": ("U8", [2], b"\1\0")}
    with safe_open(tmp_path / "out" / "model.safetensors", framework="np") as opened:
        assert opened.metadata()["dtype:z"] == "complex128"


def test_a_header_is_not_believed_when_it_says_nothing_of_a_dtype(tmp_path: Path) -> None:
    store = FakeStore()
    tensor_job(store, lambda *_: {"model.z": complex128([1j])}, world=1)
    (key,) = [key for key in store.objects if key.endswith("safetensors")]
    store.objects[key] = store.objects[key].replace(b"dtype:model.z", b"dtypo:model.z")
    with pytest.raises(StoreError, match="rank 0: the header was changed"):
        run(store, tmp_path / "out", Wanted())
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (Wanted(only=("modl.*",)), r"no tensor is named like modl\.\*; there are a, b\.a, model\.count"),
        (Wanted(only=("model.count",), prefix_strip="model.count"), "would be named ''"),
        (Wanted(only=("a", "b.a"), prefix_strip="b."), "b.a: would be named 'a', as a would be"),
    ],
)
def test_names_that_can_not_be_are_refused(tmp_path: Path, wanted: Wanted, text: str) -> None:
    store = FakeStore()
    twins = {"a": whole([1]), "b.a": whole([2])}
    tensor_job(store, lambda step, rank: tensors(step, rank) | twins, world=3)
    with pytest.raises(UsageError, match=text):
        run(store, tmp_path / "out", wanted)
    assert names_in(tmp_path) == []


@pytest.mark.fault("B81")
def test_a_flipped_byte_anywhere_leaves_the_older_export_as_it_was(memory_dir: Path) -> None:
    store = FakeStore()
    job(store)
    run(store, memory_dir / "out", MODEL, step=10)
    before = (memory_dir / "out" / "model.safetensors").read_bytes()
    damaged = tried = 0
    for key in [key for key in store.objects if "s000000020" in key]:
        good = store.objects[key]
        for at in range(0, len(good), 61):
            store.objects[key] = good[:at] + bytes([good[at] ^ (1 << at % 8)]) + good[at + 1 :]
            try:
                run(store, memory_dir / "out", MODEL, step=20, force=True)
            except StoreError as error:
                damaged += key in str(error)
                assert (memory_dir / "out" / "model.safetensors").read_bytes() == before
                tried += 1
            else:  # in what was not asked for
                assert key.endswith("safetensors")
                run(store, memory_dir / "out", MODEL, step=10, force=True)
            assert names_in(memory_dir) == ["out"]
            assert names_in(memory_dir / "out") == ["model.safetensors"]
        store.objects[key] = good
    assert damaged == tried > 30


@pytest.mark.fault("B79")
@pytest.mark.parametrize("how", ["missing", "short", "long", "zeroed", "swapped"])
def test_each_kind_of_damage_names_the_tensor_and_is_status_2(
    tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = new_store(tmp_path)
    job(DirectoryStore(root), steps=(10,))
    path, other = (next(root.glob(f"job/shards/a1/*/rank-0000{rank}-of-*.safetensors")) for rank in (0, 2))
    body = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "swapped":
        path.write_bytes(other.read_bytes())
        other.write_bytes(body)
    else:
        path.write_bytes(
            {"short": body[:400], "long": body[:500] + b"\0" + body[500:], "zeroed": bytes(len(body))}[how]
        )
    arguments = ["export", str(root), str(tmp_path / "out"), "--only", "model.*"]
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ckpt: job job, step 10, rank 0, tensor model.")
    assert err.count("\n") == 1
    assert names_in(tmp_path) == ["store"]


def test_a_damaged_index_or_manifest_names_its_rank(tmp_path: Path) -> None:
    for part, text in (("rank-00001-of-00003-.*index", "rank 1: SHA-256"), ("manifests", "step 10: SHA-256")):
        store = FakeStore()
        job(store, steps=(10,))
        (key,) = [key for key in store.objects if part.partition("-.*")[0] in key and key.endswith("json")]
        store.objects[key] = store.objects[key].replace(b'"step":10', b'"step":11')
        with pytest.raises(StoreError, match=text):
            run(store, tmp_path / "out", MODEL)


def test_what_is_there_is_never_overwritten_without_force(tmp_path: Path) -> None:
    store = FakeStore()
    job(store)
    run(store, tmp_path / "out", Wanted(only=("model.*",), max_shard_bytes=1), step=10)
    with pytest.raises(UsageError, match="--force"):
        run(store, tmp_path / "out", MODEL)
    run(store, tmp_path / "out", MODEL, force=True)
    assert names_in(tmp_path / "out") == ["model.safetensors"]
    (tmp_path / "out" / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"holds 'config\.json', which this command did not write"):
        run(store, tmp_path / "out", MODEL, force=True)
    assert names_in(tmp_path / "out") == ["config.json", "model.safetensors"]


def test_a_store_or_a_disk_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore()
    job(store)
    state = read_log(store, "job")
    store.reads_lost = 1
    with pytest.raises(UnavailableError):
        export(store, state, to=tmp_path / "out", wanted=MODEL)

    def fail(_: int) -> None:
        raise OSError(28, "")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CkptError, match="can't be written: No space left on device"):
        export(store, state, to=tmp_path / "out", wanted=MODEL)
    assert names_in(tmp_path) == []


def test_export_reads_a_bucket(s3_root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = s3_root
    job(open_store(root, write=True))  # type: ignore[arg-type]  # any store does
    arguments = ["export", root, str(tmp_path / "out"), "--only", "model.*", "--step", "10", "--json"]
    assert main(arguments) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["step"], said["tensors"], said["bytes"], said["files"]) == (10, 4, 364, ["model.safetensors"])
    found = read_plainly((tmp_path / "out" / "model.safetensors").read_bytes())
    assert found["model.head.weight"][2] == (COLUMNS * 10).tobytes()


def test_wrong_use_and_nothing_there_have_their_statuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = new_store(tmp_path)
    small_store(DirectoryStore(root), steps=(10,))
    to = [str(tmp_path / "out")]
    for more, status in (
        (["--step", "11"], 3),
        (["--max-shard-size", "5 apples"], 64),
        (["--job", "none"], 64),
        (["--only", "model.weight"], 64),
    ):
        assert main(["export", str(root), *to, *more]) == status
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
    assert main(["export", str(tmp_path / "none"), *to]) == 4
    assert names_in(tmp_path) == ["store"]


def test_sizes_are_read_as_people_write_them() -> None:
    sizes = {"5GB": 5_000_000_000, "512MiB": 2**29, "4096": 4096, "1.5 kB": 1500, "2K": 2000, "1 TiB": 2**40}
    assert {text: parse_size(text) for text in sizes} == sizes
    for text in ("", "0", "-1", "GB", "5 XB", "5iB5"):
        with pytest.raises(UsageError):
            parse_size(text)
