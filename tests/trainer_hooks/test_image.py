"""The image: each dtype and stride keeps its values, and strangers can read it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors
import torch
from tests.support.tiny_trainer import METADATA, assert_same_tensor, open_image, raw, snapshot_file
from torch import nn

from toprope.store.checkpoint import shard
from toprope.store.checkpoint.shard import identity_of, parse_header
from toprope.trainer_hooks.errors import StateMismatchError, UnsupportedLeafError
from toprope.trainer_hooks.image import shard as image
from toprope.trainer_hooks.image.shard import (
    _AS_BYTES,
    _SAFETENSORS,
    Image,
    check_tensor,
    header_bytes,
    plan_image,
)

DTYPES = [*_SAFETENSORS, *_AS_BYTES]


def _odd_values(dtype: torch.dtype, shape: tuple[int, ...] = (3, 5)) -> torch.Tensor:
    """Return every bit pattern in turn: signed zeros, infinities and NaNs with payloads among them."""
    count = dtype.itemsize
    for extent in shape:
        count *= extent
    pattern = (torch.arange(count) * 37 % 256).to(torch.uint8)
    if dtype is torch.bool:
        pattern %= 2
    return pattern.clone().view(dtype).reshape(shape)


@pytest.mark.fault("B19")
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (1,), (), (0,), (0, 5), (1, 0, 3)], ids=str)
def test_a_tensor_of_each_dtype_and_shape_comes_back_bit_for_bit(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    expected = _odd_values(dtype, shape)
    check_tensor("a", expected)
    path = snapshot_file(tmp_path / "i", {"a": expected, "b": torch.ones(3)})
    assert_same_tensor(open_image(path).tensor("a"), expected)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_wide_elements_lie_where_torch_can_read_them(tmp_path: Path) -> None:
    odd = {f"{number}": torch.ones(2 * number + 1, dtype=torch.uint8) for number in range(3)}
    wide = {str(dtype): _odd_values(dtype, (5,)) for dtype in DTYPES}
    found = open_image(snapshot_file(tmp_path / "i", odd | wide))
    for name, expected in wide.items():
        assert (found._start + found.extents[name].begin) % expected.element_size() == 0
        assert_same_tensor(found.tensor(name).clone(), expected)


def test_wide_elements_that_lie_oddly_are_read_all_the_same(tmp_path: Path) -> None:
    expected = _odd_values(torch.complex128, (5,))
    path = snapshot_file(tmp_path / "i", {"a": expected})
    path.write_bytes(_moved_by_one(path.read_bytes()))
    tensor = open_image(path).tensor("a")
    assert tensor.data_ptr() % 16 == 0
    assert_same_tensor(tensor.clone(), expected)


def _moved_by_one(body: bytes) -> bytes:
    """Return an image whose header is one space longer."""
    (length,) = struct.unpack_from("<Q", body)
    return struct.pack("<Q", length + 1) + body[8 : 8 + length] + b" " + body[8 + length :]


UNKEPT: dict[str, Callable[[], torch.Tensor]] = {
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
    "sparse": lambda: torch.ones(2).to_sparse(),
    "meta": lambda: torch.empty(2, device="meta"),
    "bits8": lambda: torch.zeros(4, dtype=torch.uint8).view(torch.bits8),
    "lazy": nn.UninitializedParameter,
}


@pytest.mark.fault("B19")
@pytest.mark.filterwarnings("ignore:.*quantized tensor creation.*")
@pytest.mark.parametrize("what", UNKEPT)
def test_a_tensor_that_cannot_be_kept_is_refused_by_name(what: str) -> None:
    with pytest.raises(UnsupportedLeafError, match=r"^extra\.x: "):
        check_tensor("extra.x", UNKEPT[what]())


def _views() -> dict[str, torch.Tensor]:
    base = torch.arange(24.0).reshape(4, 6)
    image = torch.arange(120.0).reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    lazy = torch.randn(3, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))
    return {
        "transposed": base.t(),
        "every other row": base[::2],
        "channels last": image,
        "overlapping": torch.as_strided(base, (3, 3), (1, 1)),
        "expanded": torch.arange(3.0).expand(4096, 3),
        "conjugate": lazy.conj(),
        "negative": lazy.conj().imag,
        "offset": base.reshape(-1)[5:11],
    }


@pytest.mark.parametrize("what", _views())
def test_a_view_is_kept_by_its_logical_values(tmp_path: Path, what: str) -> None:
    view = _views()[what]
    path = snapshot_file(tmp_path / "i", {"a": view})
    assert_same_tensor(open_image(path).tensor("a"), view)
    assert path.stat().st_size < view.numel() * view.dtype.itemsize + 4096


def test_a_slice_does_not_drag_its_storage_along(tmp_path: Path) -> None:
    chunks = dict(zip("abcdefgh", torch.zeros(1 << 20).chunk(8), strict=True))
    assert snapshot_file(tmp_path / "i", {"s": torch.zeros(1_000_000)[:10]}).stat().st_size < 4096
    assert snapshot_file(tmp_path / "c", chunks).stat().st_size < (1 << 22) + 4096


def _mixed() -> dict[str, torch.Tensor]:
    return {f"model.{str(dtype)[6:]}": _odd_values(dtype) for dtype in DTYPES} | {"optimizer.none": torch.empty(0, 3)}


def test_a_stranger_opens_it_with_safetensors(tmp_path: Path) -> None:
    tensors, document = _mixed(), b'{"a":1}'
    path = snapshot_file(tmp_path / "i.safetensors", tensors, document)
    with safetensors.safe_open(path, framework="pt") as opened:
        metadata = opened.metadata()
        assert set(opened.keys()) == {*tensors, "__document__"}
        for name, tensor in tensors.items():
            assert raw(opened.get_tensor(name)) == raw(tensor)
            assert metadata.get(f"dtype:{name}", "") == _AS_BYTES.get(tensor.dtype, "")
        assert bytes(opened.get_tensor("__document__").tolist()) == document
    assert {key: metadata[key] for key in METADATA} == METADATA
    assert metadata["format"] == "1"


def test_the_reader_of_the_store_agrees_with_the_writer(tmp_path: Path) -> None:
    """The two share no code; this holds them to each other."""
    tensors = _mixed()
    path = snapshot_file(tmp_path / "i", tensors, b"{}")
    image = path.read_bytes()
    header = parse_header(image, size=len(image), name="i")
    found = {extent.name: image[extent.begin : extent.end] for extent in header.extents}
    assert found.pop("__document__") == b"{}"
    assert found == {name: raw(tensor) for name, tensor in tensors.items()}
    identity = identity_of(header, name="i")
    assert (identity.step, identity.rank, identity.world) == (3, 0, 1)


def test_tensors_lie_by_element_size_with_no_gap(tmp_path: Path) -> None:
    plan = plan_image(_mixed(), METADATA)
    at = 0
    sizes = []
    for extent in plan.extents:
        assert extent.begin == at
        at += extent.bytes
        sizes.append(extent.dtype.itemsize)
    assert sizes == sorted(sizes, reverse=True)
    assert plan.tensor_bytes == at


def test_the_header_keeps_its_length_whatever_the_step_and_the_document() -> None:
    plan = plan_image(_mixed(), METADATA)
    lengths = {
        len(header_bytes(plan, document, {**METADATA, "step": step}))
        for document, step in ((0, "1"), (10**9, "9" * 17), (77, "123456"))
    }
    assert lengths == {plan.header_bytes + 8}
    assert plan.header_bytes % 8 == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda image: image[:4], "expected at least"),
        (lambda image: struct.pack("<Q", 1 << 40) + image[8:], "header of"),
        (lambda image: image[:8] + b"[" + image[9:], "not a shard image"),
        (lambda image: image.replace(b'"format":"1"', b'"format":"9"'), "format 9"),
        (lambda image: image.replace(b'"shape":[3]', b'"shape":[4]'), "take 16 bytes"),
        (lambda image: image.replace(b'"F32"', b'"XXX"'), "KeyError"),
    ],
)
def test_a_damaged_image_is_refused(tmp_path: Path, change: object, reason: str) -> None:
    path = snapshot_file(tmp_path / "i", {"b": torch.ones(3)})
    image = path.read_bytes()
    assert callable(change)
    path.write_bytes(change(image))
    with pytest.raises(StateMismatchError, match=reason):
        Image(path, len(image))


def test_the_document_is_json_or_refused(tmp_path: Path) -> None:
    assert open_image(snapshot_file(tmp_path / "i", {}, json.dumps({"a": [1]}).encode())).document() == {"a": [1]}
    with pytest.raises(StateMismatchError, match="not JSON"):
        open_image(snapshot_file(tmp_path / "j", {}, b"\x80")).document()


def test_writer_and_reader_have_the_same_limits() -> None:
    names = ("MAX_HEADER_BYTES", "MAX_TENSORS", "MAX_DIMENSIONS", "MAX_NAME_CHARACTERS")
    assert [getattr(image, name) for name in names] == [getattr(shard, name) for name in names]


NONE = torch.empty(0)


@pytest.mark.parametrize(
    "tensors",
    [
        dict.fromkeys(map(str, range(image.MAX_TENSORS)), NONE),
        {f"{number:01000}": NONE for number in range(image.MAX_HEADER_BYTES // 1000)},
        {"x" * (image.MAX_NAME_CHARACTERS + 1): NONE},
        {"deep": torch.empty((1,) * (image.MAX_DIMENSIONS + 1))},
        {"deep": torch.empty((1,) * image.MAX_DIMENSIONS, dtype=torch.complex128)},
    ],
    ids=["tensors", "header", "name", "dimensions", "dimensions as bytes"],
)
def test_an_image_that_no_reader_would_accept_is_not_planned(tensors: dict[str, torch.Tensor]) -> None:
    with pytest.raises(UnsupportedLeafError, match="can be kept"):
        plan_image(tensors, METADATA)


def test_an_image_at_the_limits_is_accepted(tmp_path: Path) -> None:
    tensors = dict.fromkeys(map(str, range(image.MAX_TENSORS - 2)), NONE)
    tensors["x" * image.MAX_NAME_CHARACTERS] = torch.ones((1,) * image.MAX_DIMENSIONS)
    body = snapshot_file(tmp_path / "i", tensors).read_bytes()
    assert len(parse_header(body, size=len(body), name="i").extents) == image.MAX_TENSORS
