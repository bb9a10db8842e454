"""The typed document: every value comes back with its exact type, or is refused by name."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from toprope.trainer_hooks.errors import StateMismatchError, UnsupportedLeafError
from toprope.trainer_hooks.image.tree import MAX_DEPTH, Decoder, Encoder


def _no_tensor(name: str, tensor: torch.Tensor) -> str:
    raise AssertionError(name)


def _there_and_back(value: object) -> Any:  # noqa: ANN401 - whatever was given
    return Decoder(lambda _: torch.zeros(0)).decode(json.loads(Encoder(_no_tensor).encode("x", value)))


VALUES = [
    None,
    True,
    7,
    -(2**63),
    2**200,
    -(2**200),
    1.5,
    -0.0,
    5e-324,
    math.inf,
    -math.inf,
    "naïve \u2028 text",
    b"\0\xff",
    bytearray(b"ab"),
    1 + 2j,
    (1, 2),
    (),
    [1, [2, (3, None)]],
    {"a": {"b": [1]}},
    {1: "int key", "1": "text key", (1, 2): "tuple key", None: 0},
    {"$": "looks like a tag"},
    {3, 1, 2},
    frozenset({1}),
    deque([1, 2], maxlen=5),
    deque([1]),
    OrderedDict([("b", 1), ("a", 2)]),
    defaultdict(list, {"a": [1]}),
    defaultdict(None, {"a": 1}),
    Counter({"a": 3}),
    torch.Size([1, 2]),
    torch.bfloat16,
    torch.device("cuda", 1),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_equal_and_of_its_type(value: object) -> None:
    found = _there_and_back(value)
    assert found == value
    assert type(found) is type(value)
    assert repr(found) == repr(value)  # the order of keys, the sign of zero, a deque's maxlen


def test_a_dict_keeps_the_types_of_its_values_at_any_depth() -> None:
    found = _there_and_back({"t": [({"x": (True, 1, 1.0)},)]})
    inner = found["t"][0][0]["x"]
    assert type(found["t"][0]) is tuple
    assert [type(item) for item in inner] == [bool, int, float]


def test_a_nan_keeps_its_payload() -> None:
    (odd,) = struct.unpack(">d", bytes.fromhex("7ff8000000abcdef"))
    assert struct.pack(">d", _there_and_back(odd)).hex() == "7ff8000000abcdef"


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(3.5),
        np.zeros((0, 4), dtype=bool),
        np.array([1 + 2j]),
        np.array(["ab", "c"]),
        np.array([b"ab"]),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_a_numpy_array_comes_back_writable_with_dtype_and_shape(array: np.ndarray[Any, Any]) -> None:
    found = _there_and_back({"a": array})["a"]
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()
    assert found.flags.writeable


@pytest.mark.parametrize("scalar", [np.float32(1.5), np.float64(2.5), np.int64(3), np.bool_(1)], ids=repr)
def test_a_numpy_scalar_stays_one(scalar: np.generic) -> None:
    found = _there_and_back(scalar)
    assert found == scalar
    assert type(found) is type(scalar)


class _Sub(dict[str, int]):
    pass


_Pair = namedtuple("_Pair", "a b")  # noqa: PYI024 - the untyped kind is what users have

REFUSED = {
    "a function": len,
    "a subclass of dict": _Sub(a=1),
    "a named tuple": _Pair(1, 2),
    "a path": PurePosixPath("a"),
    "an array of objects": np.array([object()]),
    "a structured array": np.zeros(1, dtype=[("a", "i4")]),
    "a masked array": np.ma.masked_array([1], [True]),
    "a lone surrogate": "\ud800",
    "a factory of the user's": defaultdict(lambda: 3),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_kept_is_refused_by_its_path(what: str) -> None:
    with pytest.raises(UnsupportedLeafError, match=r"^extra\.deep\.1\.key: "):
        Encoder(_no_tensor).encode("extra", {"deep": [0, {"key": REFUSED[what]}]})


def test_a_value_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UnsupportedLeafError, match=f"deeper than {MAX_DEPTH}"):
        Encoder(_no_tensor).encode("extra", loop)


@pytest.mark.parametrize("text", ['{"$":"os.system","v":[]}', '{"$":"bytes"}', '{"$":"torch.dtype","v":"save"}'])
def test_a_tag_that_is_not_ours_is_refused_and_nothing_is_called(text: str) -> None:
    with pytest.raises(StateMismatchError, match="can't read"):
        Decoder(lambda _: torch.zeros(0)).decode(json.loads(text))


_scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=5)
)
_keys = st.integers() | st.text(max_size=3) | st.booleans() | st.none()


@given(
    st.recursive(
        _scalars,
        lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(_keys, inner, max_size=3),
        max_leaves=12,
    )
)
def test_any_nesting_comes_back_exactly(value: object) -> None:
    assert repr(_there_and_back(value)) == repr(value)
