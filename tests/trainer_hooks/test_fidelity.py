"""Tensors keep dtype, shape, bytes and strides on the way through a store and back into a trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.stored_state import restored, stored, verified_images
from tests.support.tiny_trainer import assert_same_tensor, checked, load, raw, save
from torch import nn

from toprope.store.checkpoint.ready import read_index, read_manifest
from toprope.store.log.chain import read_log
from toprope.store.look.verify import plan
from toprope.store.names import Key
from toprope.trainer_hooks.capture.state import Parts, capture
from toprope.trainer_hooks.errors import StateMismatchError, UnsupportedLeafError
from toprope.trainer_hooks.image.inplace import can_hold

KIB = 1024
REAL_OF = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
LISTED = [
    torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.complex32, torch.complex64, torch.complex128, torch.bool,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.float32, torch.float64,
]  # fmt: skip


def _special(dtype: torch.dtype) -> torch.Tensor:
    """Every byte where an element is one; else signed zeros, infinities and NaNs with payloads, or large numbers."""
    if dtype is torch.bool:
        return torch.tensor([True, False])
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype)
    real = REAL_OF.get(dtype, dtype)
    bits = torch.tensor([0xFF, 0x7F, 0x80, 0xFE], dtype=torch.uint8).repeat_interleave(real.itemsize).view(real)
    if not real.is_floating_point:
        return bits
    named = torch.tensor([-0.0, 0.0, float("inf"), -float("inf"), float("nan"), 1.5], dtype=real)
    return torch.cat([named, bits]).view(dtype)


class Buffers(nn.Module):
    """A model of nothing but these tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


@pytest.mark.fault("B19")
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_special_values_of_each_dtype_survive_a_store(tmp_path: Path) -> None:
    special = {f"of_{dtype}".replace("torch.", ""): _special(dtype) for dtype in LISTED}
    assert raw(special["of_float32"])[:4] == b"\0\0\0\x80"
    assert special["of_float64"].isnan().sum() == 2
    saved = Parts(model=Buffers(special), extra=dict(special))
    live = Parts(model=Buffers({name: torch.zeros_like(t) for name, t in special.items()}), extra={})
    restored([live], verified_images(stored([saved], tmp_path), tmp_path, world=1))
    assert isinstance(live.model, nn.Module)
    found = dict(live.model.named_buffers())
    for name, expected in special.items():
        assert_same_tensor(found[name], expected)
        assert_same_tensor(live.extra[name], expected)  # type: ignore[index]


@pytest.mark.fault("B19")
@pytest.mark.filterwarnings("ignore:.*quantized tensor creation.*")
@pytest.mark.parametrize("where", ["model", "extra"])
def test_a_quantized_tensor_is_refused_at_the_call_by_its_name(where: str) -> None:
    odd = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)
    parts = Parts(model=Buffers({"x": odd}) if where == "model" else nn.Identity(), extra={"x": odd})
    with pytest.raises(UnsupportedLeafError, match=rf"^{where}\.x: a tensor of dtype torch\.quint8"):
        capture(parts, rank=0, world=1)


class Sub(torch.Tensor):
    """A subclass of the user's."""


def test_a_tensor_of_a_class_that_is_not_known_is_refused_by_its_name() -> None:
    odd = torch.ones(2).as_subclass(Sub)
    for parts in (Parts(model=Buffers({"x": odd})), Parts(model=nn.Identity(), extra={"x": odd})):
        with pytest.raises(
            UnsupportedLeafError, match=r"^(model|extra)\.x: a tensor of class .*\.Sub is not supported"
        ):
            capture(parts, rank=0, world=1)


@pytest.mark.fault("B12")
@pytest.mark.parametrize("what", ["a slice", "chunks", "expanded"])
def test_a_view_costs_its_own_bytes_in_the_manifest_and_in_the_store(tmp_path: Path, what: str) -> None:
    mib = torch.arange(1 << 21, dtype=torch.float32)  # 8 MiB
    leaves = {
        "a slice": {"x": torch.arange(1_000_000.0)[:10]},
        "chunks": dict(zip("abcdefgh", mib.chunk(8), strict=True)),
        "expanded": {"x": torch.arange(3.0).expand(4096, 3)},
    }[what]
    logical = sum(leaf.numel() * leaf.dtype.itemsize for leaf in leaves.values())
    store = stored([Parts(model=nn.Identity(), extra=dict(leaves))], tmp_path)
    state = read_log(store, "job")
    manifest, _ = read_manifest(store, state, plan(state)[0])
    (shard,) = manifest.shards
    (file,) = read_index(store, manifest, shard).files
    sizes = {shard.bytes, file.bytes, len(store.objects[Key(file.key)])}
    assert all(logical < size <= logical + 64 * KIB for size in sizes), sizes
    found: dict[str, Any] = {}
    restored([Parts(model=nn.Identity(), extra=found)], verified_images(store, tmp_path, world=1))
    for name, leaf in leaves.items():
        assert_same_tensor(found[name], leaf)


def _view(what: str, base: torch.Tensor) -> torch.Tensor:
    match what:
        case "transposed":
            return base.reshape(6, 20).t()
        case "channels last":
            return base.reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
        case "every other":
            return base.reshape(20, 6)[::2]
        case "overlapping":
            return torch.as_strided(base, (4, 5), (2, 1), 3)
        case _:
            return base[:3].expand(7, 3)


@pytest.mark.fault("B13")
@pytest.mark.parametrize("what", ["transposed", "channels last", "every other", "overlapping", "expanded"])
@pytest.mark.parametrize("alike", [True, False], ids=["same strides", "contiguous"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.complex128, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2], ids=str
)
def test_a_strided_tensor_is_restored_in_place_by_its_values(
    tmp_path: Path, what: str, dtype: torch.dtype, *, alike: bool
) -> None:
    def build(start: int) -> torch.Tensor:
        pattern = (torch.arange(120 * dtype.itemsize) * 7 + start) % 251
        return _view(what, pattern.to(torch.uint8).view(dtype))

    saved = build(1)
    for place in ("model", "extra"):
        live = build(100)
        live = (
            live
            if alike
            else torch.zeros(live.shape, dtype=torch.float32)
            .to(torch.uint8)
            .new_zeros((*live.shape, dtype.itemsize))
            .view(dtype)
            .reshape(live.shape)
        )
        before = (live.stride(), live.data_ptr())
        made = [
            Parts(model=Buffers({"x": one})) if place == "model" else Parts(model=nn.Identity(), extra={"x": one})
            for one in (saved, live)
        ]
        load(made[1], save(made[0], tmp_path / place))
        assert_same_tensor(live, saved)
        assert (live.stride(), live.data_ptr()) == before
        if place == "extra":
            assert made[1].extra["x"] is live  # type: ignore[index]


def test_elements_that_share_a_place_and_should_differ_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    path = save(Parts(model=Buffers({"a": torch.ones(2), "x": torch.arange(6.0).reshape(2, 3)})), tmp_path / "i")
    live = {"a": torch.zeros(2), "x": torch.zeros(3).expand(2, 3)}
    with pytest.raises(
        StateMismatchError, match=r"model\.x: elements that share their memory here have several values"
    ):
        checked(Parts(model=Buffers(live)), path)
    assert live["a"].tolist() == [0.0, 0.0]
    own: dict[str, Any] = {"x": live["x"]}
    load(
        Parts(model=nn.Identity(), extra=own),
        save(Parts(model=nn.Identity(), extra={"x": torch.arange(6.0).reshape(2, 3)}), path),
    )
    assert own["x"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]  # a place of its own
    assert own["x"] is not live["x"]


@pytest.mark.parametrize(
    ("shape", "stride"), [((3, 3), (1, 1)), ((4, 5), (2, 1)), ((2, 3), (0, 1)), ((2, 2, 2), (3, 1, 2))], ids=str
)
def test_what_overlaps_is_found_by_writing_it(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    live = torch.zeros(32).as_strided(shape, stride)
    places = torch.arange(32.0).as_strided(shape, stride)
    alone = len(set(places.reshape(-1).tolist())) == places.numel()
    assert can_hold(live, places.contiguous())
    assert can_hold(live, torch.arange(float(places.numel())).reshape(shape)) is alone


@pytest.mark.fault("B23")
@pytest.mark.parametrize("shape", [(3, 4), (12,), (4, 4)], ids=str)
def test_another_shape_is_refused_with_both_and_nothing_is_written(tmp_path: Path, shape: tuple[int, ...]) -> None:
    def build(x: torch.Tensor, value: float) -> nn.Module:
        model = nn.Module()
        model.a, model.x, model.z = (nn.Parameter(t) for t in (torch.full((2,), value), x, torch.full((2,), value)))
        return model

    path = save(Parts(model=build(torch.ones(4, 3), 1.0)), tmp_path / "i")
    live = build(torch.zeros(shape), 0.0)
    with pytest.raises(StateMismatchError) as caught:
        checked(Parts(model=live), path)
    assert f"model.x: shape (4, 3) in the checkpoint, {shape} here" in str(caught.value)
    assert not any(parameter.any() for parameter in live.parameters())


class LowMoments(torch.optim.Optimizer):
    """Keeps its moments in bfloat16, as low-memory optimizers do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:  # noqa: ANN401 - as torch types it
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ANN401 - as torch types it
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                state["step"] += 1
                state["exp_avg"] += parameter.grad.bfloat16() / state["step"]
                parameter.sub_(group["lr"] * state["exp_avg"].float())
        return closure


def _optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    match kind:
        case "bfloat16 moments":
            return LowMoments(model.parameters())
        case "default":
            return torch.optim.Adam(model.parameters())
        case _:
            chosen: dict[str, Any] = {kind: True}
            return torch.optim.Adam(model.parameters(), **chosen)


@pytest.mark.fault("B24")
@pytest.mark.parametrize(
    "kind",
    [
        "bfloat16 moments",
        "default",
        "foreach",
        "fused",
        pytest.param("capturable", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")),
    ],
)
def test_optimizer_state_keeps_its_own_dtype_and_device_and_the_next_step_is_the_same(
    tmp_path: Path, kind: str
) -> None:
    device = "cuda" if kind == "capturable" else "cpu"

    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Linear(4, 4).to(device)
        return model, _optimizer(kind, model)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, 0.3 + number)
        optimizer.step()
        return [raw(parameter) for parameter in model.parameters()]

    model, optimizer = build(3)
    step(model, optimizer)
    path = save(Parts(model=model, optimizer=optimizer), tmp_path / "i")
    live_model, live = build(4)
    load(Parts(model=live_model, optimizer=live), path)
    before, after = list(optimizer.state.values()), list(live.state.values())
    assert len(before) == len(after) == 2
    for one, other in zip(before, after, strict=True):
        assert list(one) == list(other)
        for key, value in one.items():
            assert_same_tensor(other[key], value)
            assert other[key].device == value.device
    assert step(live_model, live) == step(model, optimizer)
