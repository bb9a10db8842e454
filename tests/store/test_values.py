"""How far two tensors are apart: numpy and the standard library agree, and with torch's own reading of each dtype."""

from __future__ import annotations

import importlib.util
import math
import struct

import numpy as np
import pytest

from toprope.store.look.values import Apart, comparison, plainly, with_numpy

DTYPES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4,
    "U32": 4, "F32": 4, "C64": 8, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_and_the_standard_library_say_the_same(dtype: str) -> None:
    draw = np.random.default_rng(7)
    one = draw.integers(0, 256, 4096, dtype=np.uint8)
    other = one.copy()
    other[draw.integers(0, 4096, 300)] = 0x7F
    found = with_numpy(dtype, one.tobytes(), other.tobytes())
    plain = plainly(dtype, one.tobytes(), other.tobytes())
    assert (found.elements, found.different, found.not_finite) == (plain.elements, plain.different, plain.not_finite)
    assert found.max_abs == pytest.approx(plain.max_abs, rel=1e-15)
    assert found.elements == 4096 // DTYPES[dtype]
    assert 0 < found.different <= 300
    assert with_numpy(dtype, one.tobytes(), one.tobytes()) == plainly(dtype, one.tobytes(), one.tobytes())
    assert with_numpy(dtype, b"", b"") == plainly(dtype, b"", b"") == Apart()


@pytest.mark.parametrize("compare", [plainly, with_numpy])
@pytest.mark.parametrize(
    ("dtype", "form", "one", "other", "apart"),
    [
        ("F32", "4f", (1, 2, 3, 4), (1, 2.5, 3, 3), (2, 1.0, 0)),
        ("F64", "3d", (math.nan, math.inf, 0.0), (math.nan, 1.0, -0.0), (2, 0, 1)),
        ("F64", "2d", (math.nan, 8.0), (1.0, 8.0), (1, 0, 1)),
        ("F16", "2e", (0.5, 1.0), (0.25, 1.0), (1, 0.25, 0)),
        ("BF16", "2H", (0x3F80, 0x4000), (0x4000, 0x4000), (1, 1.0, 0)),
        ("F8_E4M3", "2B", (0x38, 0x7F), (0xB8, 0x7E), (2, 2.0, 1)),
        ("F8_E5M2", "2B", (0x3C, 0x7C), (0x40, 0x7B), (2, 1.0, 1)),
        ("C64", "2f", (3.0, 4.0), (0.0, 0.0), (1, 5.0, 0)),
        ("I64", "2q", (-(2**63), 5), (2**63 - 1, 5), (1, 2**64 - 1, 0)),
        ("U64", "1Q", (0,), (2**64 - 1,), (1, 2**64 - 1, 0)),
        ("I8", "2b", (-128, 1), (127, 0), (2, 255, 0)),
        ("BOOL", "2B", (0, 1), (1, 1), (1, 1, 0)),
    ],
)
def test_each_dtype_is_read_as_what_it_is(
    compare: object, dtype: str, form: str, one: tuple[float, ...], other: tuple[float, ...], apart: tuple[float, ...]
) -> None:
    assert callable(compare)
    found = compare(dtype, struct.pack(f"<{form}", *one), struct.pack(f"<{form}", *other))
    assert (found.different, found.max_abs, found.not_finite) == apart


def test_what_compares_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert comparison() == ("numpy", with_numpy)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert comparison() == ("the standard library", plainly)
