"""Slots as files: their names, the control page of each, and the lock that says whether its owner lives.

A slot is three files in ``<memory-dir>/slots/rank-<r>/``: ``slot-<n>.data`` (the image, mapped by both sides),
``slot-<n>.page`` (a control page, read after a crash) and ``slot-<n>.lock``. The owner of the slot holds a POSIX
record lock (``fcntl.lockf``) on the lock file: it is not inherited by fork and is gone with the process, but it is
also lost as soon as any other descriptor of the same file is closed in that process. So the lock file is opened once
and never touched again, and the data file itself is never locked.

The page is two cells of ``CELL_BYTES`` written in turn, each with a count and a CRC-32: a write cut short by a kill
leaves the other cell, which is the state before it.
"""

from __future__ import annotations

import enum
import fcntl
import json
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

CELL_BYTES = 1024
PAGE_BYTES = 2 * CELL_BYTES
_HEAD = struct.Struct("<IIQ")  # crc32 of all that follows, length of the JSON, count
_FLOCK = struct.Struct("@hhqqi")


class SlotState(enum.StrEnum):
    """What a slot holds: EMPTY > WRITING > SEALED > HASHED > EMPTY. WRITING under a dead owner is a torn snapshot."""

    EMPTY = "EMPTY"
    WRITING = "WRITING"
    SEALED = "SEALED"
    HASHED = "HASHED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The content of a control page. ``bytes`` is the image's length, ``digest`` its XXH3-128 once it was hashed.

    ``asked``: the trainer asked for this step by name, so each tier takes it, whatever its cadence.
    """

    state: SlotState = SlotState.EMPTY
    seq: int = 0
    launch_id: str = ""
    rank: int = 0
    world: int = 0
    attempt: int = 0
    attempt_uid: str = ""
    step: int = 0
    bytes: int = 0
    digest: str = ""
    asked: bool = False


_FIELDS = tuple(one.name for one in fields(Page))
_encode = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPaths:
    """The three files of one slot."""

    data: Path
    page: Path
    lock: Path


def slot_paths(directory: Path, slot: int) -> SlotPaths:
    """Return the files of slot number ``slot`` in a rank's directory."""
    return SlotPaths(
        data=directory / f"slot-{slot}.data", page=directory / f"slot-{slot}.page", lock=directory / f"slot-{slot}.lock"
    )


def read_page(path: Path) -> Page:
    """Return the newest whole cell of the page; an empty page when none is whole.

    Raises:
        OSError: the file can't be read.
    """
    found = [(count, page) for count, body in _whole_cells(path.read_bytes()) if (page := _decoded(body)) is not None]
    return max(found, key=lambda one: one[0], default=(0, Page()))[1]


def write_page(path: str | Path, page: Page) -> None:
    """Write the page into the older of its two cells.

    Raises:
        OSError: the file can't be written.
    """
    body = _encode({name: getattr(page, name) for name in _FIELDS}).encode()
    assert len(body) <= CELL_BYTES - _HEAD.size, f"page of {len(body)} bytes"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        count = max((count for count, _ in _whole_cells(os.pread(descriptor, PAGE_BYTES, 0))), default=0)
        counted = struct.pack("<IQ", len(body), count + 1) + body
        cell = struct.pack("<I", zlib.crc32(counted)) + counted
        os.pwrite(descriptor, cell.ljust(CELL_BYTES, b"\0"), (count + 1) % 2 * CELL_BYTES)
    finally:
        os.close(descriptor)


def _whole_cells(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the count and the JSON of each cell that was written to its end."""
    for start in (0, CELL_BYTES):
        cell = raw[start : start + CELL_BYTES]
        if len(cell) < CELL_BYTES:
            continue
        crc, length, count = _HEAD.unpack_from(cell)
        if length <= CELL_BYTES - _HEAD.size and zlib.crc32(cell[4 : _HEAD.size + length]) == crc:
            yield count, cell[_HEAD.size : _HEAD.size + length]


def _decoded(body: bytes) -> Page | None:
    """Return the page, or None when another version wrote it: its lock still says whether its owner lives."""
    try:
        values = json.loads(body)
        return Page(**{**values, "state": SlotState(values["state"])})
    except (ValueError, KeyError, TypeError):
        return None


def lock_holder(path: Path) -> int | None:
    """Return the pid that holds the record lock (0 when it is of another pid namespace), or None when it is free.

    Raises:
        OSError: the file can't be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    finally:
        os.close(descriptor)
    kind, _, _, _, pid = _FLOCK.unpack(answer)
    return None if kind == fcntl.F_UNLCK else max(int(pid), 0)
