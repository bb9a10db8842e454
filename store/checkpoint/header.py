"""The head of a safetensors file, as all who write one here write it. Pure."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_LENGTH = struct.Struct("<Q")
_ALIGNED = 16
"""The first tensor begins at a multiple of this, as the largest element of any dtype wants it."""


@dataclass(frozen=True, slots=True)
class Written:
    """A tensor that is to be written: its name, safetensors' name of its dtype, its shape, and its length in bytes."""

    name: str
    dtype: str
    shape: Sequence[int]
    bytes: int


def header_bytes(tensors: Iterable[Written], metadata: Mapping[str, str]) -> bytes:
    """Return length and header of a file in which these tensors lie one after the other, in this order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for tensor in tensors:
        end = at + tensor.bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    length = -(-(_LENGTH.size + len(text)) // _ALIGNED) * _ALIGNED - _LENGTH.size
    return _LENGTH.pack(length) + text.ljust(length)
