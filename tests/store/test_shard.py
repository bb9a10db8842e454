"""Shard images: what a good one gives, and hostile headers."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tests.support.logs import JOB_UID, uid
from tests.support.stores import safetensors_image, shard_image

from toprope.store.checkpoint import shard
from toprope.store.checkpoint.shard import hash_image, header_length, identity_of, index_of, parse_header
from toprope.store.digest import digest
from toprope.store.errors import CorruptObjectError
from toprope.store.names import Key

GOOD = shard_image(step=7, rank=1)
KEY = Key("job/shards/x.safetensors")


def parsed(body: bytes) -> shard.Header:
    return parse_header(body, size=len(body), name="image")


def with_header(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(begin: int, end: int, *, dtype: str = "U8", shape: list[int] | None = None) -> dict[str, object]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def test_a_good_image_says_whose_it_is_and_what_it_holds() -> None:
    image = hash_image(memoryview(GOOD), name="image")
    assert image.identity == shard.Identity(job_uid=JOB_UID, attempt=1, attempt_uid=uid(1), step=7, rank=1, world=2)
    assert [extent.name for extent in image.header.extents] == [
        "optimizer.state.weight.exp_avg",
        "model.weight",
        "model.empty",
        "__document__",
    ]
    assert (image.bytes, image.digest) == (len(GOOD), digest(GOOD))
    for extent, found in zip(image.header.extents, image.tensor_digests, strict=True):
        assert found == digest(GOOD[extent.begin : extent.end])
    assert image.header.extents[-1].end == len(GOOD)


def test_the_index_names_each_tensor_where_it_lies() -> None:
    index = index_of(hash_image(memoryview(GOOD), name="image"), key=KEY)
    assert (index.step, index.rank, index.world, index.attempt_uid) == (7, 1, 2, uid(1))
    assert [(file.key, file.bytes, file.digest) for file in index.files] == [(KEY, len(GOOD), digest(GOOD))]
    weight = next(tensor for tensor in index.tensors if tensor.name == "model.weight")
    assert (weight.dtype, weight.shape, weight.global_shape, weight.offsets) == ("F32", (2, 3), (2, 3), (0, 0))
    assert struct.unpack("<6f", GOOD[weight.begin : weight.end])[0] == 8.0


def test_a_piece_gives_its_place_in_the_whole() -> None:
    metadata = {
        "format": "1", "job_uid": JOB_UID, "attempt": "1", "attempt_uid": uid(1), "step": "1", "rank": "0",
        "world": "1", "document": "d",
    }  # fmt: skip
    tensors = {"w": ("U8", [2, 2], b"1234"), "d": ("U8", [0], b"")}

    def index_with(piece: str) -> object:
        body = safetensors_image(tensors, metadata | {"piece:w": piece})
        return index_of(hash_image(memoryview(body), name="image"), key=KEY).tensors[0]

    tensor = index_with('{"global_shape":[4,2],"offsets":[2,0]}')
    assert (tensor.global_shape, tensor.offsets) == ((4, 2), (2, 0))  # type: ignore[attr-defined]
    for wrong in ("{}", "no", '{"global_shape":[4,2],"offsets":[3,0]}', '{"global_shape":[4],"offsets":[0]}',
                  '{"global_shape":[4,2],"offsets":[-1,0]}'):  # fmt: skip
        with pytest.raises(CorruptObjectError, match="piece:w"):
            index_with(wrong)


def test_safetensors_opens_what_we_call_good(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(GOOD)
    with safe_open(tmp_path / "x.safetensors", framework="np") as opened:
        assert opened.metadata()["step"] == "7"
        assert opened.get_tensor("model.weight").shape == (2, 3)


HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "seven bytes": b"1234567",
    "a length without a header": struct.pack("<Q", 8),
    "a huge length": struct.pack("<Q", 2**63) + b"{}",
    "a length one past the end": struct.pack("<Q", 3) + b"{}",
    "a header over the limit": struct.pack("<Q", shard.MAX_HEADER_BYTES + 1) + b"{}",
    "an empty header": with_header(b""),
    "no JSON": with_header(b"{nope}"),
    "no UTF-8": with_header(b'{"\xff": 1}'),
    "a list": with_header([]),
    "a number": with_header(3),
    "metadata that is no table": with_header({"__metadata__": 3}),
    "metadata of numbers": with_header({"__metadata__": {"step": 3}}),
    "a name twice": with_header(b'{"__metadata__":{},"a":1,"a":2}'),
    "an entry that is no table": with_header({"__metadata__": {}, "a": 3}),
    "an unknown field": with_header({"__metadata__": {}, "a": entry(0, 1) | {"strides": [1]}}, b"1"),
    "an unknown dtype": with_header({"__metadata__": {}, "a": entry(0, 1, dtype="PICKLE")}, b"1"),
    "a negative extent": with_header({"__metadata__": {}, "a": entry(0, 1, shape=[-1, -1])}, b"1"),
    "a fractional extent": with_header(b'{"__metadata__":{},"a":{"dtype":"U8","shape":[1.5],"data_offsets":[0,1]}}'),
    "an extent past 64 bits": with_header({"__metadata__": {}, "a": entry(0, 0, shape=[2**63, 0])}),
    "a number of many digits": with_header(b'{"__metadata__":{},"a":' + b"9" * 10_000 + b"}"),
    "a product past 64 bits": with_header({"__metadata__": {}, "a": entry(0, 16, shape=[2**62, 2**62, 2**62])}),
    "too many dimensions": with_header({"__metadata__": {}, "a": entry(0, 1, shape=[1] * 33)}, b"1"),
    "one offset": with_header({"__metadata__": {}, "a": entry(0, 1) | {"data_offsets": [0]}}, b"1"),
    "offsets backwards": with_header({"__metadata__": {}, "a": entry(1, 0, shape=[0])}, b"1"),
    "offsets before the data": with_header({"__metadata__": {}, "a": entry(-1, 0)}, b""),
    "more bytes than its shape": with_header({"__metadata__": {}, "a": entry(0, 2, shape=[1])}, b"12"),
    "a tensor past the end": with_header({"__metadata__": {}, "a": entry(0, 2)}, b"1"),
    "a terabyte in a small file": with_header({"__metadata__": {}, "a": entry(0, 2**40)}, b"1"),
    "slack after the last": with_header({"__metadata__": {}, "a": entry(0, 1)}, b"12"),
    "a hole": with_header({"__metadata__": {}, "a": entry(0, 1), "b": entry(2, 3)}, b"123"),
    "an overlap": with_header({"__metadata__": {}, "a": entry(0, 2), "b": entry(1, 3)}, b"123"),
    "two in one place": with_header({"__metadata__": {}, "a": entry(0, 1), "b": entry(0, 1)}, b"1"),
    "a long name": with_header({"__metadata__": {}, "a" * 1025: entry(0, 1)}, b"1"),
    "too many tensors": with_header({"__metadata__": {}} | {str(at): 0 for at in range(shard.MAX_TENSORS + 1)}),
    "deep nesting": with_header(b'{"__metadata__":{},"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
}


def test_a_file_that_says_nothing_of_itself_is_plain_safetensors_and_no_shard() -> None:
    header = parsed(with_header({"a": entry(0, 1)}, b"1"))
    assert (header.metadata, [extent.name for extent in header.extents]) == ({}, ["a"])
    with pytest.raises(CorruptObjectError):
        identity_of(header, name="image")


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_header_is_refused(what: str) -> None:
    with pytest.raises(CorruptObjectError, match="image: not a shard image"):
        parsed(HOSTILE[what])


def test_a_limit_is_named_before_anything_of_that_size_is_read() -> None:
    first = struct.pack("<Q", shard.MAX_HEADER_BYTES + 1)
    with pytest.raises(CorruptObjectError, match=r"a header of 16777217 bytes; at most 16777216"):
        header_length(first, size=2**40, name="image")
    with pytest.raises(CorruptObjectError, match="65537 tensors; at most 65536"):
        parsed(HOSTILE["too many tensors"])
    with pytest.raises(CorruptObjectError, match="a name occurs twice"):
        parsed(HOSTILE["a name twice"])


def test_a_header_that_is_cut_off_is_refused() -> None:
    for length in range(parsed(GOOD).bytes):
        with pytest.raises(CorruptObjectError):
            parse_header(GOOD[:length], size=len(GOOD), name="image")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", "2"), ("format", None), ("attempt", "x"), ("step", "-1"), ("step", "01"), ("step", "9" * 19),
        ("step", None), ("rank", "2"), ("world", "0"), ("document", "model.weight"), ("document", None),
    ],
)  # fmt: skip
def test_metadata_that_does_not_say_whose_image_it_is_is_refused(field: str, value: str | None) -> None:
    header = parsed(GOOD)
    header.metadata.pop(field)
    if value is not None:
        header.metadata[field] = value
    with pytest.raises(CorruptObjectError, match="image: not a shard image"):
        identity_of(header, name="image")


@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255))
def test_a_changed_byte_changes_the_digest_or_is_refused(at: int, mask: int) -> None:
    body = GOOD[:at] + bytes([GOOD[at] ^ mask]) + GOOD[at + 1 :]
    try:
        image = hash_image(memoryview(body), name="image")
    except CorruptObjectError:
        return
    assert image.digest != digest(GOOD)


@given(st.binary(max_size=300))
def test_random_bytes_are_refused_and_nothing_else_is_raised(body: bytes) -> None:
    with pytest.raises(CorruptObjectError):
        parsed(with_header(body))


def test_the_largest_header_that_is_believed_takes_little_memory() -> None:
    program = """
import json, pathlib, re, struct
from toprope.store.checkpoint import shard
entries = {f"t{at:05d}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for at in range(shard.MAX_TENSORS)}
text = json.dumps({"__metadata__": {}, **entries}).encode().ljust(shard.MAX_HEADER_BYTES)
del entries
def peak_kib():  # ru_maxrss would count that of the process it was forked from
    return int(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])
before = peak_kib()
header = shard.parse_header(struct.pack("<Q", len(text)) + text, size=8 + len(text), name="x")
assert len(header.extents) == shard.MAX_TENSORS
print((peak_kib() - before) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 256
