"""Packed files: zstd's seekable format, frames of at most 16 MiB and a table of them at the end. Pure.

``zstd -d`` gives the file back. A range is read with the frames that hold it. Nothing that a table or a frame says of
lengths is believed before it agrees with what the index says of the whole: no more is ever built than one frame.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import zstandard

from toprope.store.digest import Hasher
from toprope.store.errors import CorruptObjectError

LEVEL = 1
FRAME_BYTES = 8 * 1024 * 1024
"""How much of a file goes into one frame."""
MAX_FRAME_BYTES = 16 * 1024 * 1024
MAX_FRAMES = 1024 * 1024
MAX_RATIO = 1 << 15
"""How much zstd can shrink anything: a block of 128 KiB takes four bytes at least."""

_SKIPPABLE = 0x184D2A5E
_SEEKABLE = 0x8F92EAB1
_OPENING = struct.Struct("<II")
_ENTRY = struct.Struct("<II")
_FOOTER = struct.Struct("<IBI")

ReadRange = Callable[[int, int], bytes]
"""Returns the bytes of an object from one place up to another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A frame: bytes ``begin`` to ``end`` of the file are bytes ``packed_begin`` to ``packed_end`` of its object."""

    begin: int
    end: int
    packed_begin: int
    packed_end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBody:
    """What was written of a packed file: its length and digest, and the digest of what unpacking it has given."""

    bytes: int
    digest: str
    raw_digest: str


def pack(raw: memoryview, write: Callable[[bytes], object], *, frame_bytes: int = FRAME_BYTES) -> PackedBody:
    """Write a file packed, a frame at a time. Each was unpacked again: what is stored is known to give the digest."""
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True, write_content_size=True)
    table, raw_hasher, hasher = bytearray(), Hasher(), Hasher()
    size = 0
    for begin in range(0, len(raw), frame_bytes):
        chunk = raw[begin : begin + frame_bytes]
        frame = compressor.compress(chunk)
        raw_hasher.update(unpack_frame(frame, size=len(chunk), name="what was just packed"))
        hasher.update(frame)
        write(frame)
        size += len(frame)
        table += _ENTRY.pack(len(frame), len(chunk))
    footer = _FOOTER.pack(len(table) // _ENTRY.size, 0, _SEEKABLE)
    last = _OPENING.pack(_SKIPPABLE, len(table) + len(footer)) + table + footer
    hasher.update(last)
    write(last)
    return PackedBody(bytes=size + len(last), digest=hasher.hexdigest(), raw_digest=raw_hasher.hexdigest())


def most_packed_bytes(raw_bytes: int) -> int:
    """Return how long a packed file of so many bytes can become at the very most, if nothing of it shrinks."""
    frames = -(-raw_bytes // FRAME_BYTES)
    return raw_bytes + raw_bytes // 256 + 1024 * (frames + 1)


def frames_of(read: ReadRange, *, packed_bytes: int, raw_bytes: int, name: str) -> tuple[Frame, ...]:
    """Return the frames of an object of ``packed_bytes`` that is a file of ``raw_bytes``. ``name`` is for messages.

    Raises:
        CorruptObjectError: it has no table at its end, or one that does not agree with these lengths.
    """
    if packed_bytes < _OPENING.size + _FOOTER.size:
        raise _damaged(name, f"{packed_bytes} bytes, too few for a seek table")
    count, descriptor, magic = _FOOTER.unpack(read(packed_bytes - _FOOTER.size, packed_bytes))
    table_bytes = _OPENING.size + count * _ENTRY.size + _FOOTER.size
    if magic != _SEEKABLE or descriptor != 0 or count > MAX_FRAMES or table_bytes > packed_bytes:
        raise _damaged(name, "it does not end with a seek table")
    table = read(packed_bytes - table_bytes, packed_bytes - _FOOTER.size)
    if _OPENING.unpack_from(table) != (_SKIPPABLE, table_bytes - _OPENING.size):
        raise _damaged(name, "its seek table has no beginning")
    frames = []
    at = packed_at = 0
    for packed, raw in _ENTRY.iter_unpack(table[_OPENING.size :]):
        if not 0 < raw <= MAX_FRAME_BYTES or packed == 0:
            raise _damaged(name, f"a frame of {raw} bytes, packed {packed}; at most {MAX_FRAME_BYTES}")
        frames.append(Frame(begin=at, end=at + raw, packed_begin=packed_at, packed_end=packed_at + packed))
        at, packed_at = at + raw, packed_at + packed
    if (at, packed_at) != (raw_bytes, packed_bytes - table_bytes):
        raise _damaged(name, f"its frames hold {at} bytes, packed {packed_at}; expected {raw_bytes}")
    return tuple(frames)


def unpack_frame(body: bytes, *, size: int, name: str) -> bytes:
    """Return the ``size`` bytes that a frame holds.

    Raises:
        CorruptObjectError: it is damaged, or holds more or less.
    """
    try:
        said = zstandard.get_frame_parameters(body).content_size
        if said != size:  # zstd sees to it that a frame holds what it says, and no more is built
            raise _damaged(name, f"a frame says that it holds {said} bytes; expected {size}")
        return zstandard.ZstdDecompressor().decompress(body, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _damaged(name, f"a frame can't be unpacked: {error}") from error


def _damaged(name: str, why: str) -> CorruptObjectError:
    return CorruptObjectError(f"{name}: not a packed file: {why}")
