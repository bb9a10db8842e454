"""The attempts that this node has adopted, each a file on its disk, synced before anybody is told. All calls block."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import msgspec

from toprope.coordinator.wire import Provisional
from toprope.sidecar.ports import DiskPort

_NAME = re.compile(r"adopted-\d+\.json")
_MAX_BYTES = 64 * 1024 * 1024


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
        body = msgspec.json.encode(adopted)
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

    def read(self) -> tuple[tuple[Provisional, ...], tuple[str, ...]]:
        """Return the adoptions that are whole, and a line for each other."""
        found: list[Provisional] = []
        damaged: list[str] = []
        for path in sorted(self._directory.iterdir()):
            if _NAME.fullmatch(path.name) is not None:
                try:
                    found.append(_read(path))
                except (OSError, ValueError, msgspec.DecodeError) as error:
                    damaged.append(f"{path} is not used: {error}")
        return tuple(found), tuple(damaged)


def _read(path: Path) -> Provisional:
    with path.open("rb") as file:
        crc, _, body = file.read(_MAX_BYTES).partition(b" ")
    if f"{zlib.crc32(body):08x}".encode() != crc:
        raise ValueError("it is damaged")
    return msgspec.json.decode(body, type=Provisional)
