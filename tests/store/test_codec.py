"""Packed files: ``zstd -d`` gives them back, ranges are read by frames, and lies about lengths cost nothing."""

from __future__ import annotations

import struct
import subprocess
import tracemalloc
from pathlib import Path
from random import Random

import pytest
import zstandard
from tests.support.fake_store import FakeStore

from toprope.store.checkpoint import codec
from toprope.store.checkpoint.codec import FRAME_BYTES, MAX_FRAME_BYTES, frames_of, pack, unpack_frame
from toprope.store.checkpoint.files import FileReader
from toprope.store.checkpoint.manifest import File, Packed
from toprope.store.digest import digest
from toprope.store.errors import CorruptObjectError
from toprope.store.names import Key

RAW = Random(7).randbytes(700) + bytes(2000) + b"toprope " * 300
KEY = Key("job/shards/a1/s000000010/rank-00000-of-00001-0a.safetensors.zst")


def packed(raw: bytes, frame_bytes: int) -> bytes:
    body = bytearray()
    pack(memoryview(raw), body.extend, frame_bytes=frame_bytes)
    return bytes(body)


def packed_file(body: bytes, raw: bytes = RAW) -> File:
    stored = Packed(codec="zstd", bytes=len(body), digest=digest(body))
    return File(key=KEY, bytes=len(raw), digest=digest(raw), packed=stored)


def reader(body: bytes, raw: bytes = RAW) -> FileReader:
    store = FakeStore()
    store.create(KEY, body)
    return FileReader(store, packed_file(body, raw))


def test_zstd_gives_back_the_exact_file(tmp_path: Path) -> None:
    body = bytearray()
    made = pack(memoryview(RAW), body.extend, frame_bytes=512)
    assert (made.bytes, made.digest, made.raw_digest) == (len(body), digest(body), digest(RAW))
    (tmp_path / "image.zst").write_bytes(body)
    subprocess.run(["zstd", "-q", "-d", "image.zst"], cwd=tmp_path, check=True)
    assert (tmp_path / "image").read_bytes() == RAW


@pytest.mark.parametrize("frame_bytes", [1000, len(RAW), FRAME_BYTES])
def test_each_range_of_a_packed_file_is_read_by_its_frames(frame_bytes: int) -> None:
    one = reader(packed(RAW, frame_bytes))
    for begin in range(0, len(RAW), 331):
        for end in (begin, begin + 1, min(begin + 1700, len(RAW)), len(RAW)):
            assert one.read(begin, end) == RAW[begin:end]


def test_a_range_asks_for_no_more_than_its_frames_and_the_table() -> None:
    class Counting(FakeStore):
        asked = 0

        def read(self, key: Key, *, start: int = 0, length: int | None = None, uncached: bool = False) -> bytes:
            self.asked += length or 0
            return super().read(key, start=start, length=length, uncached=uncached)

    raw = Random(1).randbytes(100_000)
    body = packed(raw, 1000)
    store = Counting()
    store.create(KEY, body)
    assert FileReader(store, packed_file(body, raw)).read(50_500, 50_600) == raw[50_500:50_600]
    assert store.asked < 3000


def test_every_flipped_byte_of_a_packed_file_changes_its_digest_or_is_refused() -> None:
    raw = RAW[:1500]
    good = packed(raw, 512)
    for at in range(len(good)):
        bad = good[:at] + bytes([good[at] ^ (1 << at % 8)]) + good[at + 1 :]
        assert digest(bad) != digest(good)
        try:
            assert reader(bad, raw).read(0, len(raw)) == raw, at
        except CorruptObjectError:
            continue


def entries_of(body: bytes) -> int:
    return struct.unpack("<I", body[-9:-5])[0]  # type: ignore[no-any-return] # a number


def with_table(body: bytes, entries: list[tuple[int, int]]) -> bytes:
    """Another table at the end of the same frames."""
    frames = body[: -(8 + 8 * entries_of(body) + 9)]
    table = b"".join(struct.pack("<II", *entry) for entry in entries)
    footer = struct.pack("<IBI", len(entries), 0, 0x8F92EAB1)
    return frames + struct.pack("<II", 0x184D2A5E, len(table) + 9) + table + footer


GOOD = packed(RAW, len(RAW))
FRAME = len(GOOD) - 25
TABLES = {
    "a frame too long": [(FRAME, MAX_FRAME_BYTES + 1)],
    "an empty frame": [(FRAME, len(RAW)), (0, 0)],
    "more than there is": [(FRAME, len(RAW) + 1)],
    "less than there is": [(FRAME, len(RAW) - 1)],
    "past the end": [(FRAME + 100, len(RAW))],
    "none": [],
}


def frames_in(body: bytes, *, raw_bytes: int = len(RAW)) -> tuple[codec.Frame, ...]:
    def read(begin: int, end: int) -> bytes:
        assert 0 <= begin <= end <= len(body), f"bytes {begin} to {end} of {len(body)} were asked for"
        return body[begin:end]

    return frames_of(read, packed_bytes=len(body), raw_bytes=raw_bytes, name="it")


@pytest.mark.parametrize("what", TABLES)
def test_a_table_that_lies_is_refused_before_a_frame_is_read(what: str) -> None:
    with pytest.raises(CorruptObjectError, match="not a packed file"):
        frames_in(with_table(GOOD, TABLES[what]))


def test_a_frame_of_more_than_the_limit_is_refused_even_if_all_adds_up() -> None:
    assert len(frames_in(with_table(GOOD, [(FRAME, MAX_FRAME_BYTES)]), raw_bytes=MAX_FRAME_BYTES)) == 1
    with pytest.raises(CorruptObjectError, match=f"a frame of {MAX_FRAME_BYTES + 1} bytes"):
        frames_in(with_table(GOOD, [(FRAME, MAX_FRAME_BYTES + 1)]), raw_bytes=MAX_FRAME_BYTES + 1)


def test_a_table_of_more_entries_than_the_limit_or_than_there_is_room_for_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = packed(RAW, 512)
    for footer in (struct.pack("<IBI", 1 << 20, 0, 0x8F92EAB1), struct.pack("<IBI", entries_of(body), 1, 0x8F92EAB1)):
        with pytest.raises(CorruptObjectError, match="does not end with a seek table"):
            frames_in(body[:-9] + footer)
    monkeypatch.setattr(codec, "MAX_FRAMES", entries_of(body))
    assert len(frames_in(body)) == entries_of(body)
    monkeypatch.setattr(codec, "MAX_FRAMES", entries_of(body) - 1)
    with pytest.raises(CorruptObjectError, match="does not end with a seek table"):
        frames_in(body)


@pytest.mark.parametrize("at", [-25, -21])
def test_a_table_without_its_beginning_is_refused(at: int) -> None:
    body = bytearray(GOOD)
    body[at] ^= 1
    with pytest.raises(CorruptObjectError, match="its seek table has no beginning"):
        frames_in(bytes(body))


def frame(*, dictionary: bytes = b"", says: int = 5, after: bytes = b"") -> bytes:
    """A frame that holds ``hello`` as it is, and says what it is told to."""
    descriptor = 0x80 | len(dictionary)  # four bytes for its length; 1: a dictionary of one byte's number
    head = struct.pack("<IBB", 0xFD2FB528, descriptor, 10 << 3) + dictionary + struct.pack("<I", says)
    return head + (1 | 5 << 3).to_bytes(3, "little") + b"hello" + after


def test_a_frame_is_unpacked_only_if_all_that_it_says_of_itself_holds() -> None:
    assert unpack_frame(frame(), size=5, name="it") == b"hello"
    lies = {
        "a dictionary": frame(dictionary=b"\x07"),
        "less than it says": frame(says=6),
        "more than it says": frame(says=4),
        "something after it": frame(after=b"x"),
        "a frame after it": frame(after=frame()),
    }
    for what, lie in lies.items():
        for size in (4, 5, 6):
            with pytest.raises(CorruptObjectError, match="a frame"):
                pytest.fail(f"{what}: {unpack_frame(lie, size=size, name='it')!r}")


@pytest.mark.parametrize("length", [0, 5, 16, 17, len(GOOD) - 1])
def test_what_is_cut_off_is_no_packed_file(length: int) -> None:
    with pytest.raises(CorruptObjectError):
        reader(GOOD[:length]).read(0, 10)


def test_a_bomb_stops_at_what_the_table_says_and_costs_no_memory() -> None:
    size = 1 << 28
    unit = zstandard.ZstdCompressor(level=1, write_content_size=False).compressobj()
    bomb = b"".join([unit.compress(bytes(1 << 20)) for _ in range(size >> 20)]) + unit.flush()
    said = zstandard.ZstdCompressor(level=1).compressobj(size=size)
    frank = b"".join([said.compress(bytes(1 << 20)) for _ in range(size >> 20)]) + said.flush()
    tracemalloc.start()
    try:
        for body in (bomb, frank):
            with pytest.raises(CorruptObjectError, match="a frame"):
                unpack_frame(body, size=1000, name="bomb")
            with pytest.raises(CorruptObjectError, match="a frame"):
                reader(with_table(body + with_table(GOOD, [])[FRAME:], [(len(body), 1000)]), bytes(1000)).read(0, 1000)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
        zstandard.ZstdDecompressor().decompress(frank)
        assert tracemalloc.get_traced_memory()[1] >= size, "what is unpacked is not counted"
    finally:
        tracemalloc.stop()


def test_what_packing_gave_is_the_digest_of_what_unpacking_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(body: bytes, *, size: int, name: str) -> bytes:
        return bytes(reversed(unpack_frame(body, size=size, name=name)))

    monkeypatch.setattr(codec, "unpack_frame", wrong)
    assert pack(memoryview(RAW), bytearray().extend).raw_digest != digest(RAW)
