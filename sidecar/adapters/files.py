"""Pages and local files on a real machine."""

from __future__ import annotations

import os
from pathlib import Path

from toprope.sidecar.ports import SyncError
from toprope.trainer_hooks.link.slot import Page, read_page, write_page

_CHUNK_BYTES = 8 * 1024 * 1024


class Pages:
    """Control pages in the memory directory."""

    def read(self, path: Path) -> Page:
        """Return the newest whole page."""
        return read_page(path)

    def write(self, path: Path, page: Page) -> None:
        """Write the page."""
        write_page(path, page)


class Disk:
    """Files of the local tier."""

    def write(self, path: Path, body: memoryview) -> None:
        """Write a new file and sync it."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            for start in range(0, len(body), _CHUNK_BYTES):
                _write_all(descriptor, body[start : start + _CHUNK_BYTES])
            _sync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file its final name."""
        old.rename(new)

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _sync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        """Delete a file; one that is not there is no error."""
        path.unlink(missing_ok=True)


def _write_all(descriptor: int, body: memoryview) -> None:
    while body:
        body = body[os.write(descriptor, body) :]


def _sync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise SyncError(error.errno, error.strerror) from error
