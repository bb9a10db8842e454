"""What a hostile store can do to a reader: cost it a typed error, and 256 MiB of memory at most."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from tests.support import hostile_reader
from tests.support.stores import JobBuilder, small_store

from toprope.store.checkpoint.codec import MAX_FRAME_BYTES
from toprope.store.checkpoint.manifest import File, Index, Manifest, Packed
from toprope.store.checkpoint.shard import MAX_HEADER_BYTES, MAX_MARKS, MAX_TENSORS, parse_header
from toprope.store.digest import digest
from toprope.store.errors import CkptError, CorruptObjectError, UsageError
from toprope.store.log.chain import apply
from toprope.store.log.fold import JobState
from toprope.store.names import Key
from toprope.store.objects.directory import DirectoryStore
from toprope.store.objects.protocol import MAX_WHOLE_BYTES, ObjectStore

GIB = 1024**3
LIMIT_MIB = 256
PICKLE = b"cposix\nsystem\n(S'touch executed'\ntR."
"""Would run a command if anybody unpickled it."""


def one(root: Path, pattern: str) -> Path:
    return max(root.glob(pattern))


def grow(pattern: str, size: int) -> Callable[[Path], None]:
    """Let an object seem to have this size; it takes no room on the disk."""
    return lambda root: os.truncate(one(root, pattern), size)


def put(pattern: str, body: bytes) -> Callable[[Path], None]:
    """Let an object have this content."""

    def change(root: Path) -> None:
        one(root, pattern).write_bytes(body)

    return change


def link_away(pattern: str) -> Callable[[Path], None]:
    """Let an object be a symbolic link out of the store."""

    def change(root: Path) -> None:
        path = one(root, pattern)
        outside = root.with_name(root.name + "-outside")
        outside.write_bytes(path.read_bytes())
        path.unlink()
        path.symlink_to(outside)

    return change


def record_of(size: int) -> Callable[[Path], None]:
    """Let there be a next record of this size."""

    def change(root: Path) -> None:
        number = len(list(root.glob("job/log/*.json")))
        path = root / "job" / "log" / f"{number:020d}.json"
        path.touch()
        os.truncate(path, size)

    return change


def header(text: bytes, *, length: int | None = None) -> Callable[[Path], None]:
    """Let a shard begin with this header; it is parsed as if all digests were right."""

    def change(root: Path) -> None:
        (root / "header").write_bytes(struct.pack("<Q", len(text) if length is None else length) + text)

    return change


def bomb(*, each: bytes, marks: int) -> bytes:
    """A header of as many values as the limit lets through, or as its length does."""
    count = min((MAX_MARKS - 100) // marks, (MAX_HEADER_BYTES - 100) // len(each))
    return b'{"__metadata__":{},"a":[' + each * count + b"0]}"


def entries(count: int) -> bytes:
    named = (b'"%x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % number for number in range(count))
    return b'{"__metadata__":{},' + b",".join(named) + b"}"


STEP = "job/shards/a1/s000000020"
HOSTILE: dict[str, Callable[[Path], None]] = {
    "a record of 1 GiB": record_of(GIB),
    "a record over the limit": record_of(64 * 1024 + 1),
    "a record of nested lists": put("job/log/*4.json", b"[" * 60_000),
    "a record that is a pickle": put("job/log/*4.json", PICKLE),
    "facts of 1 GiB": grow("job/facts/*.json", GIB),
    "a manifest of 1 GiB": grow("job/manifests/*s000000020*", GIB),
    "a manifest of 64 MiB": grow("job/manifests/*s000000020*", MAX_WHOLE_BYTES),
    "a manifest that is a pickle": put("job/manifests/*s000000020*", PICKLE),
    "a manifest of nested lists": put("job/manifests/*s000000020*", b"[" * 1_000_000),
    "an index of 1 GiB": grow(f"{STEP}/*.index.json", GIB),
    "an index that is a pickle": put(f"{STEP}/*.index.json", PICKLE),
    "a shard of 1 TiB": grow(f"{STEP}/*.safetensors", 1024 * GIB),
    "a shard that is a pickle": put(f"{STEP}/*.safetensors", PICKLE),
    "a shard that is a link": link_away(f"{STEP}/*.safetensors"),
    "a manifest that is a link": link_away("job/manifests/*s000000020*"),
    "a record that is a link": link_away("job/log/*4.json"),
    "a header of 2^63 bytes": header(b"{}", length=2**63),
    "a header longer than its file": header(b"{}", length=MAX_HEADER_BYTES),
    "a header of 100k entries": header(entries(100_000)),
    "a header of too many entries": header(entries(MAX_TENSORS + 1)),
    "a header of nested lists": header(b'{"a":' + b"[" * (MAX_HEADER_BYTES - 100)),
    "a header of lists": header(bomb(each=b"[],", marks=2)),
    "a header of objects": header(bomb(each=b'{"":0},', marks=3)),
    "a header of strings": header(bomb(each=b'"ab",', marks=1)),
    "a header of a long number": header(b'{"a":' + b"9" * (MAX_HEADER_BYTES - 100) + b"}"),
    "a header that is a pickle": header(PICKLE),
}


def many_ranks(manifest: Manifest) -> Manifest:
    """As many ranks as a manifest has room for; the attempt has as many."""
    last = manifest.shards[-1]
    shards = tuple(msgspec.structs.replace(last, rank=rank, bytes=0) for rank in range(2, RANKS))
    return msgspec.structs.replace(manifest, world=RANKS, shards=(*manifest.shards, *shards))


RANKS = 100_000


def of_many_ranks(job: JobBuilder) -> JobBuilder:
    """Let the attempt have so many ranks, of which two will store anything."""
    job.world = RANKS
    job.open_attempt()
    job.world = 2
    return job


def many_tensors(dimensions: int, count: int) -> Callable[[Index], Index]:
    """So many tensors, all empty, of so many dimensions."""

    def change(index: Index) -> Index:
        end, shape = index.tensors[-1].end, (0, *range(1000, 999 + dimensions))
        last = msgspec.structs.replace(
            index.tensors[-1], begin=end, end=end, shape=shape, global_shape=shape, offsets=shape
        )
        added = (msgspec.structs.replace(last, name=f"{number:06x}") for number in range(count))
        return msgspec.structs.replace(index, tensors=(*index.tensors, *added)) if index.rank == 0 else index

    return change


def packed_bomb(store: ObjectStore, *, holds: int, says: bool) -> Callable[[Index], Index]:
    """A packed file whose one frame holds much more than the table tells; ``says``: the frame itself says how much."""
    size = {"size": holds} if says else {}
    compressor = zstandard.ZstdCompressor(level=1, write_content_size=says).compressobj(**size)
    frame = b"".join([compressor.compress(bytes(1 << 24)) for _ in range(holds >> 24)]) + compressor.flush()
    table = struct.pack("<II", len(frame), MAX_FRAME_BYTES) + struct.pack("<IBI", 1, 0, 0x8F92EAB1)
    body = frame + struct.pack("<II", 0x184D2A5E, len(table)) + table

    def change(index: Index) -> Index:
        key = index.files[0].key + ".zst"
        store.create(Key(key), body)
        lies = Packed(codec="zstd", bytes=len(body), digest=digest(body))
        file = File(key=key, bytes=MAX_FRAME_BYTES, digest=index.digest, packed=lies)
        return msgspec.structs.replace(index, files=(file,))

    return change


LYING: dict[str, Callable[[JobBuilder], object]] = {
    "a manifest of 100k ranks": lambda job: of_many_ranks(job).checkpoint(20, change_manifest=many_ranks),
    "an index of 65k tensors": lambda job: job.checkpoint(20, change_index=many_tensors(1, MAX_TENSORS)),
    "an index of as many numbers as may be": lambda job: job.checkpoint(20, change_index=many_tensors(1000, 1040)),
    "an index of too many numbers": lambda job: job.checkpoint(20, change_index=many_tensors(1000, 1050)),
    "a frame that holds 1 GiB": lambda job: job.checkpoint(
        20, change_index=packed_bomb(job.store, holds=GIB, says=True)
    ),
    "a frame of 1 GiB that says nothing": lambda job: job.checkpoint(
        20, change_index=packed_bomb(job.store, holds=GIB, says=False)
    ),
}
"""What a store's writer that lies has READY, with each digest right that a reader can compare before it is read."""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_whatever_a_store_holds_a_reader_gets_a_typed_error_within_its_memory(tmp_path: Path) -> None:
    roots = [tmp_path / f"case-{number}" for number in range(len(HOSTILE) + len(LYING))]
    for root, hostile in zip(roots, HOSTILE.values(), strict=False):
        root.mkdir()
        small_store(DirectoryStore(root))
        hostile(root)
    for root, lie in zip(roots[len(HOSTILE) :], LYING.values(), strict=True):
        root.mkdir()
        lie(JobBuilder(DirectoryStore(root)).begin())
    before = sorted(path.name for path in tmp_path.iterdir())
    command = [sys.executable, hostile_reader.__file__, *map(str, roots)]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    names = [*HOSTILE, *LYING]
    assert len(told) == len(names)
    for name, case in zip(names, told, strict=True):
        assert case["verify"], f"{name}: nothing was found"
        assert case["restore"] or "header" in name or "facts" in name, f"{name}: it was restored"
        assert case["peak_mib"] <= LIMIT_MIB, f"{name}: {case['peak_mib']} MiB"
    restored = [f"case-{number}-restored" for number, name in enumerate(names) if "facts" in name]  # it needs none
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(before + restored)  # nothing was executed


@given(body=st.binary(max_size=400), length=st.integers(0, 2**64 - 1))
def test_no_bytes_make_a_header_reader_fail_otherwise(body: bytes, length: int) -> None:
    image = struct.pack("<Q", min(length, len(body)) if length % 2 else length) + body
    with pytest.raises(CorruptObjectError):
        parse_header(image, size=len(image), name="x")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(fields=st.dictionaries(st.sampled_from(["__metadata__", "a", "b"]), JSON, max_size=3))
def test_no_json_makes_a_header_reader_fail_otherwise(fields: dict[str, object]) -> None:
    text = json.dumps(fields).encode()
    image = struct.pack("<Q", len(text)) + text
    try:
        parsed = parse_header(image, size=len(image), name="x")
    except CorruptObjectError:
        return
    assert set(fields) <= {"__metadata__"} | {extent.name for extent in parsed.extents}


@given(fields=JSON)
def test_no_json_makes_a_record_reader_fail_otherwise(fields: object) -> None:
    with pytest.raises(CkptError):
        apply(JobState(job="job"), json.dumps(fields).encode())


NAMES = (
    "..",
    ".",
    "",
    "a/../b",
    "../a",
    "/etc/passwd",
    "a//b",
    "%2e%2e/a",
    "a\0b",
    "a\n",
    "x" * 10_240,
    "\\..\\a",
    "~/a",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_key_that_leads_elsewhere_is_refused_before_anything_is_touched(tmp_path: Path, name: str) -> None:
    root = tmp_path / "store"
    root.mkdir()
    store = DirectoryStore(root)
    for key in (Key(name), Key(f"job/{name}"), Key(f"job/{name}/x")):
        with pytest.raises(UsageError):
            store.create(key, b"x")
        with pytest.raises(UsageError):
            store.read(key)
    assert [path for path in tmp_path.rglob("*") if path != root] == []
