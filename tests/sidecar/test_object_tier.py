"""What goes into the object store: what is new, straight from the slot or packed, and never what has changed since."""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections.abc import Callable, Generator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import ClassVar, NoReturn

import pytest
from tests.support.fake_store import FakeStore
from tests.support.stores import JobBuilder, adapter_image, safetensors_image

from toprope.coordinator.wire import Copy
from toprope.sidecar import object_tier
from toprope.sidecar.object_tier import DamagedError, ObjectTier
from toprope.sidecar.packing import Codec, Decision, Packer, Sample, decide, measure, pack_gently
from toprope.sidecar.values import Shard
from toprope.store.checkpoint.codec import FRAME_BYTES, PackedBody
from toprope.store.checkpoint.files import image_chunks, write_image
from toprope.store.checkpoint.incremental import PartFile
from toprope.store.checkpoint.manifest import Index
from toprope.store.checkpoint.ready import read_index_at
from toprope.store.checkpoint.shard import hash_image
from toprope.store.digest import READS_AT_ONCE, digest
from toprope.store.errors import CkptError, UnavailableError
from toprope.store.log.records import Taint
from toprope.store.names import Key
from toprope.store.objects.protocol import ObjectStore


def shard_of(image: bytes, *, step: int) -> Shard:
    return Shard(attempt=1, step=step, attempt_uid="01" * 16, rank=0, world=1, bytes=len(image), digest=digest(image))


def put(tier: ObjectTier, builder: JobBuilder, *, step: int) -> tuple[bytes, Copy]:
    image = adapter_image(step=step, rank=0, world=1, job_uid=builder.log.state.job_uid)
    return image, tier.put(shard_of(image, step=step), memoryview(image), nonce=f"{step:x}")


def begun(store: FakeStore | None = None, *, codec: Codec = "none") -> JobBuilder:
    builder = JobBuilder(store or FakeStore(), image=adapter_image, codec=codec, world=1).begin()
    builder.checkpoint(10)
    return builder


def written_image(store: ObjectStore, index: Index) -> bytes:
    into = bytearray(index.bytes)

    def write(at: int, body: memoryview) -> None:
        into[at : at + len(body)] = body

    write_image(store, index, write)
    return bytes(into)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_what_was_stored_in_parts_is_put_together_where_it_is_wanted(codec: Codec) -> None:
    builder = begun(codec=codec)
    image, receipt = put(ObjectTier(builder.store, "job", codec=codec), builder, step=20)
    index = read_index_at(builder.store, Key(receipt.index_key))
    assert (len(index.files), index.base) == (2, 4)
    assert b"".join(image_chunks(builder.store, index)) == image
    assert written_image(builder.store, index) == image
    assert (receipt.bytes, receipt.digest) == (len(image), digest(image))
    body = builder.store.read(Key(receipt.key))
    assert (receipt.stored_bytes, receipt.stored_digest) == (len(body), digest(body))
    assert len(body) < len(image) / 4


def test_a_large_image_is_read_by_several_threads_to_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = begun(codec="zstd")
    image, receipt = put(ObjectTier(builder.store, "job"), builder, step=20)
    monkeypatch.setattr("toprope.store.digest.CHUNK_BYTES", 1000)
    index = read_index_at(builder.store, Key(receipt.index_key))
    assert written_image(builder.store, index) == image


def test_what_is_not_large_is_asked_for_over_as_many_connections_as_what_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked(FakeStore):
        lengths: ClassVar[list[int]] = []

        def stream(self, key: Key, *, start: int, length: int) -> Generator[memoryview, None, None]:
            self.lengths.append(length)
            return super().stream(key, start=start, length=length)

    store = Asked()
    image = adapter_image(step=10, rank=0, world=1)
    receipt = ObjectTier(store, "job", codec="none").put(shard_of(image, step=10), memoryview(image), nonce="0a")
    index = read_index_at(store, Key(receipt.index_key))
    monkeypatch.setattr("toprope.store.digest.CHUNK_BYTES", 100)
    assert written_image(store, index) == image
    assert len(store.lengths) == READS_AT_ONCE
    assert max(store.lengths) - min(store.lengths) < READS_AT_ONCE
    store.lengths.clear()
    monkeypatch.setattr("toprope.store.digest.FILL_BYTES", 1000)
    assert written_image(store, index) == image
    assert max(store.lengths) == 1000


def test_a_range_that_fails_ends_those_that_are_still_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(FakeStore):
        first_pieces = threading.Barrier(READS_AT_ONCE, timeout=20)
        left_at: ClassVar[list[float]] = []

        def stream(self, key: Key, *, start: int, length: int) -> Generator[memoryview, None, None]:
            whole = memoryview(self.read(key, start=start, length=length))
            self.first_pieces.wait()
            if start + length == len(self.objects[key]):
                raise UnavailableError(f"{key}: no answer for the last range")
            end_s = time.monotonic() + 15
            try:
                while time.monotonic() < end_s:
                    yield whole[:1]
            finally:
                self.left_at.append(end_s - time.monotonic())

    store = Slow()
    image = adapter_image(step=10, rank=0, world=1)
    receipt = ObjectTier(store, "job", codec="none").put(shard_of(image, step=10), memoryview(image), nonce="0a")
    index = read_index_at(store, Key(receipt.index_key))
    monkeypatch.setattr("toprope.store.digest.CHUNK_BYTES", 100)
    with pytest.raises(UnavailableError, match="the last range"):
        written_image(store, index)
    assert len(store.left_at) == READS_AT_ONCE - 1
    assert min(store.left_at) > 0


def test_a_whole_image_goes_from_the_slot_without_a_copy() -> None:
    class Sink(FakeStore):
        peak = 0

        def create(self, key: Key, body: bytes | memoryview) -> None:
            if ".safetensors" in key:
                self.peak = tracemalloc.get_traced_memory()[1]
                body = memoryview(body)[:0]
            super().create(key, body)

    image = adapter_image(step=10, rank=0, world=1, frozen=1 << 20)
    store = Sink()
    tracemalloc.start()
    try:
        ObjectTier(store, "job").put(shard_of(image, step=10), memoryview(image), nonce="0a")
    finally:
        tracemalloc.stop()
    assert 0 < store.peak < len(image) / 4


@pytest.mark.parametrize("small_bytes", [0, 1 << 30])
def test_a_flip_while_the_new_part_is_put_together_is_found(small_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = begun()
    image = bytearray(adapter_image(step=20, rank=0, world=1))
    shard = shard_of(bytes(image), step=20)
    monkeypatch.setattr(object_tier, "SMALL_BYTES", small_bytes)
    before = dict(builder.store.objects) if isinstance(builder.store, FakeStore) else {}
    honest = object_tier._put_together

    def flipped(part: PartFile, room: ExitStack) -> memoryview | None:
        image[-3] ^= 1  # the document, after it was hashed
        return honest(part, room)

    monkeypatch.setattr(object_tier, "_put_together", flipped)
    with pytest.raises(DamagedError, match="changed while"):
        ObjectTier(builder.store, "job").put(shard, memoryview(image), nonce="0a")
    assert isinstance(builder.store, FakeStore)
    assert builder.store.objects == before


def test_a_flip_while_it_is_packed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore()
    image = bytearray(adapter_image(step=20, rank=0, world=1))
    shard = shard_of(bytes(image), step=20)
    honest = pack_gently

    def flipped(raw: memoryview, write: Callable[[bytes], object]) -> PackedBody:
        image[-3] ^= 1
        return honest(raw, write)

    monkeypatch.setattr(object_tier, "pack_gently", flipped)
    with pytest.raises(DamagedError, match="what was packed has digest"):
        ObjectTier(store, "job", codec="zstd").put(shard, memoryview(image), nonce="0a")
    assert store.objects == {}


def test_without_room_for_the_new_part_it_is_stored_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = begun()

    def full(needed_bytes: int) -> NoReturn:
        raise CkptError(f"no room for {needed_bytes}")

    monkeypatch.setattr(object_tier, "SMALL_BYTES", 0)
    monkeypatch.setattr(object_tier, "spool", full)
    image, receipt = put(ObjectTier(builder.store, "job"), builder, step=20)
    assert builder.store.read(Key(receipt.key)) == image


def test_a_large_new_part_is_spooled_and_gone_afterwards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    builder = begun()
    monkeypatch.setattr(object_tier, "SMALL_BYTES", 0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    image, receipt = put(ObjectTier(builder.store, "job"), builder, step=20)
    index = read_index_at(builder.store, Key(receipt.index_key))
    assert b"".join(image_chunks(builder.store, index)) == image
    assert list(tmp_path.iterdir()) == []


def test_a_large_packed_file_is_spooled_in_little_memory_and_gone_afterwards(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Sink(FakeStore):
        def create(self, key: Key, body: bytes | memoryview) -> None:
            if ".safetensors" in key:
                self.stored = digest(body), len(body)
                body = b""
            super().create(key, body)

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    header = hash_image(memoryview(adapter_image(step=10, rank=0, world=1)), name="plain").header
    large = Random(5).randbytes(5 * FRAME_BYTES)
    tensors = {"model.large": ("U8", [len(large)], large), "__document__": ("U8", [2], b"{}")}
    image = safetensors_image(tensors, header.metadata)
    store = Sink()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        receipt = ObjectTier(store, "job", codec="zstd").put(shard_of(image, step=10), memoryview(image), nonce="0a")
        extra = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert receipt.key.endswith(".zst")
    assert store.stored == (receipt.stored_digest, receipt.stored_bytes)
    assert receipt.stored_bytes > len(large)
    assert extra < 3 * FRAME_BYTES
    assert list(tmp_path.iterdir()) == []


def test_without_room_to_pack_it_is_stored_unpacked_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(needed_bytes: int) -> NoReturn:
        raise CkptError(f"no room for {needed_bytes}")

    monkeypatch.setattr(object_tier, "SMALL_BYTES", 0)
    monkeypatch.setattr(object_tier, "spool", full)
    store = FakeStore()
    image = adapter_image(step=10, rank=0, world=1)
    receipt = ObjectTier(store, "job", codec="zstd").put(shard_of(image, step=10), memoryview(image), nonce="0a")
    assert store.read(Key(receipt.key)) == image
    assert (receipt.stored_bytes, receipt.stored_digest) == (len(image), digest(image))
    assert "a file of rank 0 is stored unpacked: no room for" in caplog.text


@pytest.mark.parametrize("harm", ["missing", "cut"])
def test_what_was_in_a_file_that_is_not_whole_is_stored_anew(harm: str, caplog: pytest.LogCaptureFixture) -> None:
    store = FakeStore()
    builder = begun(store)
    _, first = put(ObjectTier(store, "job"), builder, step=20)
    old = Key(read_index_at(store, Key(first.index_key)).files[1].key)
    body = store.objects.pop(old)
    if harm == "cut":
        store.objects[old] = body[:-1]
    image, receipt = put(ObjectTier(store, "job"), builder, step=30)
    index = read_index_at(store, Key(receipt.index_key))
    assert (len(index.files), index.base) == (1, None)
    assert b"".join(image_chunks(store, index)) == image
    assert old in caplog.text
    assert "is stored anew" in caplog.text


def test_what_is_tainted_is_not_pointed_into_but_what_came_before_it_is() -> None:
    store = FakeStore()
    builder = begun(store)
    builder.checkpoint(20)
    _, receipt = put(ObjectTier(store, "job"), builder, step=30)
    assert read_index_at(store, Key(receipt.index_key)).base == 5
    builder.log.add(Taint(attempt=1, from_step=20, to_step=20, reason="it has rotted"))
    _, receipt = put(ObjectTier(store, "job"), builder, step=40)
    assert read_index_at(store, Key(receipt.index_key)).base == 4
    builder.log.add(Taint(attempt=1, from_step=10, to_step=20, reason="it has rotted"))
    image, receipt = put(ObjectTier(store, "job"), builder, step=50)
    assert store.read(Key(receipt.key)) == image


def test_a_fresh_sidecar_points_into_what_the_log_says_is_ready() -> None:
    builder = begun()
    tier = ObjectTier(builder.store, "job")
    for step in (20, 30):
        _, receipt = put(tier, builder, step=step)
        assert read_index_at(builder.store, Key(receipt.index_key)).base == 4
    seq = builder.checkpoint(40)
    for one in (tier, ObjectTier(builder.store, "job")):
        image = adapter_image(step=50, rank=0, world=1)
        receipt = one.put(shard_of(image, step=50), memoryview(image), nonce="5a" if one is tier else "5b")
        assert read_index_at(builder.store, Key(receipt.index_key)).base == seq


def test_a_log_that_is_not_what_it_was_is_read_anew() -> None:
    store = FakeStore()
    builder = begun(store)
    tier = ObjectTier(store, "job")
    put(tier, builder, step=20)
    tier._state = replace(tier._state, n=tier._state.n - 1, tail_sha256="77" * 32)
    _, receipt = put(tier, builder, step=30)
    assert read_index_at(store, Key(receipt.index_key)).base is None
    _, receipt = put(tier, builder, step=40)
    assert read_index_at(store, Key(receipt.index_key)).base == 4


def test_a_store_that_does_not_answer_is_asked_again_later() -> None:
    store = FakeStore()
    builder = begun(store)
    tier = ObjectTier(store, "job")
    store.reads_lost = 1
    with pytest.raises(UnavailableError):
        put(tier, builder, step=20)


# Whether it is packed


MB = 1e6


@pytest.mark.parametrize(
    ("ratio", "codec_mb", "link_mb", "pack", "why"),
    [
        (1.3, 500, 100, True, "the link takes 100 MB/s, and packing makes it 1.30 times smaller at 500 MB/s"),
        (1.3, 500, 2000, False, "the link takes 2000 MB/s, and packing would make it 1.30 times smaller"),
        (1.02, 5000, 1, False, "it shrinks 1.02 times only"),
        (1.1, 100, 10, False, "packing would make it 1.10 times smaller at 100 MB/s"),
        (1.1, 100, 5, True, "packing makes it 1.10 times smaller at 100 MB/s"),
    ],
)
def test_packing_is_on_when_it_takes_less_time_than_it_saves(
    ratio: float,
    codec_mb: float,
    link_mb: float,
    pack: bool,  # noqa: FBT001 - a column of the table
    why: str,
) -> None:
    found = decide(Sample(ratio=ratio, bytes_per_s=codec_mb * MB), link_bytes_per_s=link_mb * MB)
    assert found.pack is pack
    assert why in found.reason


def test_a_packer_goes_by_what_its_uploads_have_shown() -> None:
    raw = memoryview(bytes(range(256)) * 4096)
    packer = Packer("auto")
    assert packer.decide(raw) == Decision(pack=False, reason="the link has not been measured yet")
    packer.uploaded(1000, seconds=100)
    assert not packer.decide(raw).pack
    packer.uploaded(8 << 20, seconds=80)
    assert packer.decide(raw).pack
    packer.uploaded(8 << 20, seconds=0)
    assert not packer.decide(raw).pack
    assert Packer("zstd").decide(raw).pack
    assert not Packer("none").decide(raw).pack


def test_a_sample_is_taken_from_all_of_a_file() -> None:
    assert measure(memoryview(bytes(32 << 20))).ratio > 1000
    assert measure(memoryview(b"x")).ratio < 1
    half = bytes(16 << 20) + Random(5).randbytes(16 << 20)
    assert 1.5 < measure(memoryview(half)).ratio < 2.5
