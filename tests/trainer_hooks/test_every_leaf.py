"""Every leaf: whatever nests in whatever comes back exactly, or is refused by its name."""

from __future__ import annotations

import dataclasses
import enum
import json
import struct
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.tiny_trainer import assert_same_tensor, load, raw, save
from torch import nn

from toprope.trainer_hooks.capture.state import Parts, capture
from toprope.trainer_hooks.errors import StateMismatchError, UnsupportedLeafError
from toprope.trainer_hooks.image.shard import _AS_BYTES, _SAFETENSORS, check_tensor
from toprope.trainer_hooks.image.tree import Decoder, Encoder

KEPT = [*_SAFETENSORS, *_AS_BYTES]
EVERY_DTYPE = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


@pytest.mark.fault("B19")
@pytest.mark.filterwarnings("ignore")  # torch warns of half of them
@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=str)
def test_each_dtype_of_torch_is_kept_or_refused_by_name(dtype: torch.dtype, tmp_path: Path) -> None:
    try:
        tensor = torch.empty(3, dtype=torch.uint8).new_empty(3, dtype=dtype)
    except (RuntimeError, TypeError, NotImplementedError):
        assert dtype not in KEPT  # there are no tensors of it
        return
    if dtype not in KEPT:
        with pytest.raises(UnsupportedLeafError, match=rf"extra\.x: a tensor of dtype {dtype}, which can't be kept"):
            check_tensor("extra.x", tensor)
        return
    tensor = torch.ones(3 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    found: dict[str, Any] = {}
    load(
        Parts(model=nn.Linear(1, 1), extra=found),
        save(Parts(model=nn.Linear(1, 1), extra={"x": tensor}), tmp_path / "i"),
    )
    assert_same_tensor(found["x"], tensor)


def _strided(tensor: torch.Tensor, way: str) -> torch.Tensor:
    """Return the tensor seen in another way, where it can be."""
    lazy = tensor.is_complex() and tensor.dtype is not torch.complex32
    seen = tensor
    match way:
        case "transposed" if tensor.dim() > 0:
            seen = tensor.transpose(0, -1)
        case "stepped" if tensor.dim() > 0:
            seen = tensor[::2]
        case "expanded" if tensor.dim() > 0 and tensor.shape[0] > 0:
            seen = tensor[:1].expand(3, *tensor.shape[1:])
        case "conjugate" if lazy:
            seen = tensor.conj()
        case "negated" if lazy:
            seen = tensor.conj().imag
    return seen


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(KEPT))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = dtype.itemsize
    for extent in shape:
        count *= extent
    pattern = draw(st.binary(min_size=count, max_size=count))
    if dtype is torch.bool:
        pattern = bytes(byte % 2 for byte in pattern)
    whole = (
        torch.frombuffer(bytearray(pattern), dtype=torch.uint8).view(dtype) if count else torch.empty(0, dtype=dtype)
    )
    ways = ["plain", "transposed", "stepped", "expanded", "conjugate", "negated"]
    return _strided(whole.reshape(shape), draw(st.sampled_from(ways)))


class Colour(enum.Enum):
    """An enumeration of the user's."""

    RED = 1
    BLUE = (2, "b")


class Level(enum.IntEnum):
    """One whose members are numbers, too."""

    LOW = 1


PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary()
    | st.builds(bytearray, st.binary())
    | st.complex_numbers()
    | st.sampled_from([Colour.RED, Colour.BLUE, Level.LOW, torch.float8_e5m2, torch.device("cpu"), torch.Size([1, 2])])
    | st.builds(np.float32, st.floats(width=32))
    | st.builds(np.int64, st.integers(-9, 9))
    | st.builds(np.bool_, st.booleans())
)
KEYS = st.text(max_size=4) | st.integers() | st.booleans() | st.none() | st.tuples(st.integers())
SETS = st.sets(KEYS, max_size=4) | st.frozensets(KEYS, max_size=4)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """An array of any kind that is kept, of either byte order, seen in another way."""
    dtype = np.dtype(draw(st.sampled_from(["?", "i1", ">i4", "<u8", "f2", ">f8", "c8", "U3", ">U2", "S2"])))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = int(np.prod(shape, dtype=int))
    if dtype.kind == "U":
        values = draw(st.lists(st.text("aé€", max_size=3), min_size=count, max_size=count))
        whole = np.array(values, dtype=dtype).reshape(shape)
    else:
        body = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
        body = bytes(byte % 2 for byte in body) if dtype.kind == "b" else body
        whole = np.frombuffer(body, dtype=dtype).reshape(shape)
    return whole.T if draw(st.booleans()) else whole[::-1] if whole.ndim else whole


@st.composite
def aliases(draw: st.DrawFn) -> list[torch.Tensor]:
    """Tensors that lie in one storage: itself twice, and views of it that overlap."""
    whole = draw(tensors())
    flat = whole.reshape(-1)
    return [whole, whole, whole.detach(), flat[:2], flat[1:], whole[None]]


TREES = st.recursive(
    PLAIN | tensors() | arrays() | SETS | aliases(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.builds(OrderedDict, st.dictionaries(st.text(max_size=4), inner, max_size=3))
        | st.builds(lambda items: deque(items, maxlen=5), st.lists(inner, max_size=3))
        | st.builds(lambda items: defaultdict(list, items), st.dictionaries(KEYS, inner, max_size=3))
        | st.builds(Counter, st.dictionaries(KEYS, st.integers(), max_size=3))
    ),
    max_leaves=12,
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@given(tree=TREES, shared=st.booleans())
def test_a_random_tree_comes_back_exactly(tmp_path: Path, tree: Any, *, shared: bool) -> None:  # noqa: ANN401 - any tree
    saved = {"tree": tree, "again": tree if shared else None}
    model = nn.Linear(1, 1)
    found: dict[str, Any] = {}
    load(Parts(model=model, extra=found), save(Parts(model=model, extra=saved), tmp_path / "i"))
    assert_same(found, saved)


@dataclasses.dataclass
class Point:
    """A value of the user's."""

    x: int = 1


class Sub(torch.Tensor):
    """A tensor class of the user's."""


class Number(int):
    """A number of the user's."""


def _odd_leaves() -> dict[str, object]:
    return {
        "object": object(),
        "function": print,
        "iterator": iter(()),
        "range": range(3),
        "class": Point,
        "dataclass": Point(),
        "mapping": UserDict({"a": 1}),
        "number of a class": Number(1),
        "surrogate": "\ud800",
        "bytes view": memoryview(b"ab"),
        "factory": defaultdict(Point),
        "sparse": torch.ones(1).to_sparse(),
        "tensor class": torch.ones(1).as_subclass(Sub),
        "meta": torch.empty(1, device="meta"),
        "objects": np.array([None]),
        "structured": np.zeros(1, dtype=[("a", "i4")]),
        "void": np.void(b"ab"),
        "date": np.datetime64("2026-11-30"),
        "masked": np.ma.masked_array([1], [True]),
        "record": np.rec.array([(1,)], dtype=[("a", "i4")]),
    }


@settings(max_examples=80, deadline=None)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@given(tree=TREES, odd=st.sampled_from(sorted(_odd_leaves())))
def test_a_random_tree_with_an_odd_leaf_is_refused_by_its_name(tree: Any, odd: str) -> None:  # noqa: ANN401 - any tree
    extra = {"tree": tree, "deep": [{"in": (1, _odd_leaves()[odd])}]}
    with pytest.raises(UnsupportedLeafError, match=r"^extra\.deep\.0\.in\.1: "):
        capture(Parts(model=nn.Linear(1, 1), extra=extra), rank=0, world=1)


def assert_same(found: Any, expected: Any) -> None:  # noqa: ANN401 - any tree
    assert type(found) is type(expected)
    match expected:
        case dict():
            assert list(found) == list(expected)
            assert [type(key) for key in found] == [type(key) for key in expected]
            assert getattr(found, "default_factory", None) is getattr(expected, "default_factory", None)
            for key, value in expected.items():
                assert_same(found[key], value)
        case list() | tuple() | deque() if type(expected) is not torch.Size:
            assert len(found) == len(expected)
            assert getattr(found, "maxlen", None) == getattr(expected, "maxlen", None)
            for one, other in zip(found, expected, strict=True):
                assert_same(one, other)
        case _:
            assert_same_leaf(found, expected)


def assert_same_leaf(found: Any, expected: Any) -> None:  # noqa: ANN401 - any leaf
    match expected:
        case torch.Tensor():
            assert_same_tensor(found, expected)
        case np.ndarray() | np.generic():
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            assert found.tobytes() == expected.tobytes()
        case float() | complex():
            pair = struct.Struct(">dd")
            assert pair.pack(found.real, found.imag) == pair.pack(expected.real, expected.imag)
        case set() | frozenset():
            assert {(type(one), one) for one in found} == {(type(one), one) for one in expected}
        case _:
            assert (repr(found), found) == (repr(expected), expected)


def test_an_enumeration_comes_back_as_itself() -> None:
    def refuse(name: str, _: torch.Tensor) -> str:
        raise AssertionError(name)

    encoded = Encoder(refuse).encode("x", Colour.BLUE)
    assert Decoder(lambda _: torch.ones(1)).decode(json.loads(encoded)) is Colour.BLUE


@pytest.mark.parametrize(
    "change", [{"v": "GREEN"}, {"of": "os:environ"}, {"of": "no.such.module:Colour"}, {"of": "torch:nn"}], ids=str
)
def test_an_enumeration_that_is_not_here_is_refused_and_nothing_is_imported(change: dict[str, str]) -> None:
    encoded = {"$": "enum", "of": f"{__name__}:Colour", "v": "RED"} | change
    with pytest.raises(StateMismatchError, match="can't read"):
        Decoder(lambda _: torch.ones(1)).decode(encoded)


class Rights(enum.Flag):
    """One whose members combine."""

    READ = 1
    WRITE = 2


def test_an_enumeration_that_nobody_could_find_again_is_refused() -> None:
    class Local(enum.Enum):
        A = 1

    for odd in (Local.A, Rights.READ | Rights.WRITE):
        with pytest.raises(UnsupportedLeafError, match=r"extra\.e: "):
            capture(Parts(model=nn.Linear(1, 1), extra={"e": odd}), rank=0, world=1)


def test_scalars_and_tensors_without_elements_come_back(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)
            self.scalar = nn.Parameter(torch.rand(()))
            self.empty = nn.ParameterList([torch.rand(shape) for shape in ((0,), (0, 5), (1, 0, 3))])

    saved, live = Odd(), Odd()
    saved.norm(torch.rand(4, 2))
    load(Parts(model=live, extra={"none": {}}), save(Parts(model=saved, extra={"none": {}}), tmp_path / "i"))
    assert [raw(tensor) for tensor in live.state_dict().values()] == [raw(t) for t in saved.state_dict().values()]
    load(Parts(model=nn.Identity()), save(Parts(model=nn.Identity()), tmp_path / "nothing"))
