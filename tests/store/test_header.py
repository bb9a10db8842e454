"""The head of a safetensors file: what safetensors reads of it, and where the tensors begin."""

from __future__ import annotations

import pytest
from safetensors import deserialize

from toprope.store.checkpoint.header import Written, header_bytes


@pytest.mark.parametrize("name", ["a" * length for length in range(1, 18)])
def test_the_first_tensor_begins_where_any_dtype_may(name: str) -> None:
    assert len(header_bytes([Written(name, "F32", (2,), 8)], {"format": "pt"})) % 16 == 0


def test_safetensors_finds_each_tensor_in_its_place() -> None:
    tensors = [Written("wide", "F32", (2, 1), 8), Written("none", "I16", (0, 3), 0), Written("flag", "U8", (3,), 3)]
    image = header_bytes(tensors, {"step": "7"}) + b"aaaabbbb" + b"xyz"
    found = dict(deserialize(image))  # type: ignore[no-untyped-call]
    assert {name: (entry["dtype"], entry["shape"], bytes(entry["data"])) for name, entry in found.items()} == {
        "wide": ("F32", [2, 1], b"aaaabbbb"),
        "none": ("I16", [0, 3], b""),
        "flag": ("U8", [3], b"xyz"),
    }
