"""The attempts that this node has adopted, each a file on its disk, synced before anybody is told. All calls block."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import msgspec

from toprope.coordinator.wire import Provisional
from toprope.sidecar.events import AdoptionsRead
from toprope.sidecar.ports import DiskPort

FORMAT = 1
_NAME = re.compile(r"adopted-\d+\.json")
_MAX_BYTES = 64 * 1024 * 1024


class _Format(msgspec.Struct, frozen=True, kw_only=True):
    format: int


class _File(_Format, frozen=True, kw_only=True):
    """What a file says after its CRC-32."""

    adopted: Provisional


class AdoptionFiles:
    """The files of one job, in the directory of its local tier."""

    def __init__(self, directory: Path, disk: DiskPort) -> None:
        self._directory = directory
        self._disk = disk

    def write(self, adopted: Provisional, *, nonce: str) -> None:
        """Write an adoption down, in the place of one of the same number.

        Raises:
            OSError: it may not have been.
        """
        body = msgspec.json.encode(_File(format=FORMAT, adopted=adopted))
        temporary = self._directory / f"tmp.{nonce}"
        try:
            self._disk.write(temporary, memoryview(f"{zlib.crc32(body):08x} ".encode() + body))
            self._disk.rename(temporary, self._directory / f"adopted-{adopted.number}.json")
        except OSError:
            self._disk.remove(temporary)
            raise
        self._disk.sync_directory(self._directory)

    def forget(self, number: int) -> None:
        """Delete an adoption that is of no use any more."""
        self._disk.remove(self._directory / f"adopted-{number}.json")

    def read(self) -> AdoptionsRead:
        """Return what an earlier life has adopted, made durable now: that one may have been told of an error."""
        found: list[Provisional] = []
        lost: dict[int, str] = {}
        try:
            paths = sorted(path for path in self._directory.iterdir() if _NAME.fullmatch(path.name) is not None)
            if paths:
                self._disk.sync_directory(self._directory)
        except OSError as error:
            return AdoptionsRead(unread=f"{self._directory}: {error.strerror}")
        for path in paths:
            number = int(path.name.removeprefix("adopted-").removesuffix(".json"))
            try:
                found.append(_read(path, number=number))
            except (OSError, ValueError, msgspec.DecodeError) as error:
                lost[number] = f"{path}: {error}"
        return AdoptionsRead(found=tuple(found), lost=lost)


def _read(path: Path, *, number: int) -> Provisional:
    with path.open("rb") as file:
        crc, _, body = file.read(_MAX_BYTES).partition(b" ")
    if f"{zlib.crc32(body):08x}".encode() != crc:
        raise ValueError("it is damaged")
    said = msgspec.json.decode(body, type=_Format).format
    if said != FORMAT:
        raise ValueError(f"format {said}; this version reads format {FORMAT}")
    adopted = msgspec.json.decode(body, type=_File).adopted
    if adopted.number != number:
        raise ValueError(f"it is of attempt {adopted.number}")
    return adopted
