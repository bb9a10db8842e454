"""How far two tensors are apart, element by element: with numpy if it is installed, else with the standard library."""

from __future__ import annotations

import importlib
import importlib.util
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

Body: TypeAlias = bytes | bytearray | memoryview

_CODES = {
    "BOOL": "B",
    "U8": "B",
    "I8": "b",
    "I16": "h",
    "U16": "H",
    "F16": "e",
    "I32": "i",
    "U32": "I",
    "F32": "f",
    "C64": "f",
    "I64": "q",
    "U64": "Q",
    "F64": "d",
}
_NUMPY_CODES = {"F16": "f2", "F32": "f4", "F64": "f8", "C64": "c8"}
_FLOAT8 = {"F8_E4M3": (3, 7), "F8_E5M2": (2, 15)}
_AT_ONCE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """How many elements differ, in any bit, and by how much at most.

    ``max_abs`` is over those that are finite on both sides, ``not_finite`` counts the others that differ.
    """

    elements: int = 0
    different: int = 0
    max_abs: float = 0
    not_finite: int = 0

    def __add__(self, other: Apart) -> Apart:
        """Return what both say together."""
        return Apart(
            elements=self.elements + other.elements,
            different=self.different + other.different,
            max_abs=max(self.max_abs, other.max_abs),
            not_finite=self.not_finite + other.not_finite,
        )


Comparison: TypeAlias = Callable[[str, Body, Body], Apart]
"""Takes a dtype, and the bytes of as many elements of it on either side."""


def comparison() -> tuple[str, Comparison]:
    """Return what compares here, by its name, and how it does."""
    if importlib.util.find_spec("numpy") is None:
        return "the standard library", plainly
    return "numpy", with_numpy


def plainly(dtype: str, before: Body, after: Body) -> Apart:
    """Compare with the standard library."""
    total = Apart()
    for begin in range(0, len(before), _AT_ONCE_BYTES):
        end = begin + _AT_ONCE_BYTES
        total += _compared(dtype, bytes(before[begin:end]), bytes(after[begin:end]))
    return total


def _compared(dtype: str, before: bytes, after: bytes) -> Apart:
    one, other = _numbers(dtype, before), _numbers(dtype, after)
    item_bytes = len(before) // len(one) if one else 1
    if before == after:
        return Apart(elements=len(one))
    different = [
        (a, b)
        for at, (a, b) in enumerate(zip(one, other, strict=True))
        if before[at * item_bytes : (at + 1) * item_bytes] != after[at * item_bytes : (at + 1) * item_bytes]
    ]
    finite = [abs(a - b) for a, b in different if _is_finite(a) and _is_finite(b)]
    return Apart(
        elements=len(one),
        different=len(different),
        max_abs=max(finite, default=0),
        not_finite=len(different) - len(finite),
    )


def _is_finite(number: complex) -> bool:
    return math.isfinite(number.real) and math.isfinite(number.imag)


def _numbers(dtype: str, body: bytes) -> list[Any]:
    if dtype in _FLOAT8:
        table = _float8_table(dtype)
        return [table[byte] for byte in body]
    if dtype == "BF16":
        wide = bytearray(2 * len(body))  # the first half of a float32, which is the second here
        wide[2::4], wide[3::4] = body[0::2], body[1::2]
        return list(struct.unpack(f"<{len(body) // 2}f", wide))
    code = _CODES[dtype]
    flat = list(struct.unpack(f"<{len(body) // struct.calcsize(code)}{code}", body))
    return [complex(*pair) for pair in zip(flat[::2], flat[1::2], strict=True)] if dtype == "C64" else flat


def _float8_table(dtype: str) -> list[float]:
    """Return the value of each byte: OCP's E4M3 without infinities, or E5M2."""
    mantissa_bits, bias = _FLOAT8[dtype]
    return [_float8(byte, mantissa_bits, bias) for byte in range(256)]


def _float8(byte: int, mantissa_bits: int, bias: int) -> float:
    sign, rest = (-1.0 if byte & 0x80 else 1.0), byte & 0x7F
    exponent, mantissa = rest >> mantissa_bits, rest & ((1 << mantissa_bits) - 1)
    if bias == 7 and rest == 0x7F:  # noqa: PLR2004 - E4M3 has one pattern that is not a number
        return math.nan
    if bias != 7 and exponent == 0x1F:  # noqa: PLR2004 - E5M2 is as IEEE 754 has it
        return math.nan if mantissa else sign * math.inf
    scale = 1 << mantissa_bits
    if exponent == 0:
        return float(sign * mantissa / scale * 2.0 ** (1 - bias))
    return float(sign * (1 + mantissa / scale) * 2.0 ** (exponent - bias))


def with_numpy(dtype: str, before: Body, after: Body) -> Apart:
    """Compare with numpy."""
    np: Any = importlib.import_module("numpy")
    with np.errstate(invalid="ignore"):  # what is not a number may be cast
        one, other = _array(np, dtype, before), _array(np, dtype, after)
    item_bytes = len(before) // len(one) if len(one) else 1
    rows = (np.frombuffer(body, np.uint8).reshape(-1, item_bytes) for body in (before, after))
    where = np.flatnonzero(np.not_equal(*rows).any(axis=1))
    one, other = one[where], other[where]
    if one.dtype.kind in "iu":  # an unsigned difference has room for each
        wide = np.uint64
        largest = np.maximum(one, other).astype(wide) - np.minimum(one, other).astype(wide)
        return Apart(elements=len(before) // item_bytes, different=len(where), max_abs=int(largest.max(initial=0)))
    finite = np.isfinite(one) & np.isfinite(other)
    with np.errstate(over="ignore"):
        apart = np.abs(one[finite] - other[finite])
    return Apart(
        elements=len(before) // item_bytes,
        different=len(where),
        max_abs=float(apart.max(initial=0)),
        not_finite=len(where) - int(finite.sum()),
    )


def _array(np: Any, dtype: str, body: Body) -> Any:  # noqa: ANN401 - numpy may not be there to name its types
    if dtype in _FLOAT8:
        return np.array(_float8_table(dtype))[np.frombuffer(body, np.uint8)]
    if dtype == "BF16":
        return (np.frombuffer(body, "<u2").astype("<u4") << 16).view("<f4").astype("f8")
    if dtype == "C64":
        return np.frombuffer(body, "<c8").astype("c16")
    if dtype in _NUMPY_CODES:
        return np.frombuffer(body, f"<{_NUMPY_CODES[dtype]}").astype("f8")
    return np.frombuffer(body, np.dtype(f"<{_CODES[dtype]}"))
