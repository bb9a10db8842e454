"""A node's disk: file data and directory entries become durable apart, and a power cut keeps any subset of the rest.

The real ``LocalTier`` stands on it: it is a ``DiskPort``, and ``root`` behaves as far as that class asks as the
``Path`` of its directory.
"""

from __future__ import annotations

import errno
import functools
import io
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, cast

from toprope.sidecar.ports import SyncError

_WRITE_ERRORS = {"full": errno.ENOSPC, "io": errno.EIO}


@functools.cache
def _some_descriptor() -> int:
    return os.memfd_create("simulated")


class _Opened(io.BytesIO):
    """An open file. Its descriptor is one on which advice is taken and nothing else."""

    def fileno(self) -> int:
        return _some_descriptor()


@dataclass(slots=True, eq=False)
class _Body:
    data: bytes
    synced: bool = False


class _DiskPath(PurePosixPath):
    """A path on one simulated disk: each disk has a class of its own, so that derived paths stay on it."""

    __slots__ = ()
    disk: SimDisk

    def iterdir(self) -> Iterator[_DiskPath]:
        yield from (self / name for name in self.disk.listing())

    def stat(self) -> Any:  # noqa: ANN401 - what os.stat gives, as far as it is asked
        return SimpleNamespace(st_size=self.disk.size(self.name))

    def exists(self) -> bool:
        return self.name in self.disk.names

    def open(self, *_args: object, **_kwargs: object) -> io.BytesIO:
        self.disk.check_readable(self.name)
        return _Opened(self.disk.read(self.name))


class DiedError(Exception):
    """The process that called is dead; nothing that it would do now counts."""


class SimDisk:
    """One directory. ``trouble`` is what its next calls meet with; ``flipped`` are the files changed on purpose.

    ``slow_s``: how much longer a write takes. ``keeps``: how likely a power cut leaves what was not made durable.
    """

    def __init__(self, rng: random.Random) -> None:
        self.names: dict[str, _Body] = {}
        self.durable_names: dict[str, _Body] = {}
        self.trouble = ""
        self.slow_s = 0.0
        self.keeps = 0.5
        self.flipped: set[str] = set()
        self.dies_in = 0
        self.on_death: Callable[[], None] = lambda: None
        self._rng = rng
        path = type("_Path", (_DiskPath,), {"__slots__": (), "disk": self})
        self.root = cast("Path", path("/local"))

    # DiskPort

    def write(self, path: Path, body: memoryview) -> None:
        """Write a new file and sync it."""
        self._live()
        if self.trouble in _WRITE_ERRORS:
            raise OSError(_WRITE_ERRORS[self.trouble], os.strerror(_WRITE_ERRORS[self.trouble]))
        self.names[path.name] = entry = _Body(bytes(body))
        self._sync()
        entry.synced = True

    def rename(self, old: Path, new: Path) -> None:
        """Give a file its final name."""
        self._live()
        self.names[new.name] = self.names.pop(old.name)
        if old.name in self.flipped:
            self.flipped.add(new.name)

    def sync_directory(self, _path: Path) -> None:
        """Make the names durable."""
        self._live()
        self._sync()
        self.durable_names = dict(self.names)

    def remove(self, path: Path) -> None:
        """Delete a file."""
        self._live()
        self.names.pop(path.name, None)

    def _live(self) -> None:
        """Let the machine die between two calls, when that is what is to come."""
        if self.dies_in:
            self.dies_in -= 1
            if not self.dies_in:
                self.on_death()
                raise DiedError

    def _sync(self) -> None:
        if self.trouble == "sync":
            raise SyncError(errno.EIO, "Input/output error")

    # What befalls it

    def read(self, name: str) -> bytes:
        """Return a file's bytes."""
        if name not in self.names:
            raise FileNotFoundError(errno.ENOENT, "No such file", name)
        return self.names[name].data

    def listing(self) -> list[str]:
        """Return the names that a program finds in the directory."""
        return sorted(self.names)

    def size(self, name: str) -> int:
        """Return the length of a file as a program is told it."""
        return len(self.read(name))

    def check_readable(self, name: str) -> None:
        """Raise what a program meets that opens a file."""
        if self.trouble == "io":
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)

    def cut_power(self) -> None:
        """Lose any part of what was not made durable."""
        after: dict[str, _Body] = {}
        for name in sorted({*self.names, *self.durable_names}):
            now, then = self.names.get(name), self.durable_names.get(name)
            kept = now if now is then or self._rng.random() < self.keeps else then
            if kept is not None:
                after[name] = kept if kept.synced else _Body(self._torn(kept.data), synced=True)
        self.names, self.durable_names = after, dict(after)
        self.trouble = ""

    def _torn(self, data: bytes) -> bytes:
        return data[: self._rng.randrange(len(data) + 1)]

    def flip(self, name: str) -> None:
        """Change a byte of a file."""
        data = bytearray(self.names[name].data)
        if data:
            data[self._rng.randrange(len(data))] ^= 1
            self.names[name].data = bytes(data)
            self.flipped.add(name)
