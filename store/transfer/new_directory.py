"""A directory that appears whole or not at all: written beside its place, synced, then given its name."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from toprope.store.errors import CkptError, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenOut:
    """What of which checkpoint was written where."""

    job: str
    seq: int
    attempt: int
    step: int
    bytes: int
    directory: Path
    files: tuple[str, ...]


@contextlib.contextmanager
def synced_file(path: Path) -> Iterator[BinaryIO]:
    """Make a new file, which is on the medium at the end."""
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def new_directory(to: Path, *, needed_bytes: int) -> Iterator[Path]:
    """Make a temporary directory beside ``to``, gone at the end unless it was put in place."""
    directory = to.parent / f".{to.name}.tmp-{secrets.token_hex(8)}"
    try:
        free_bytes = shutil.disk_usage(to.parent).free
        if free_bytes < needed_bytes:
            raise CkptError(f"{to.parent}: needs {needed_bytes} bytes, but {free_bytes} are free; nothing was written")
        directory.mkdir()
        yield directory
    except OSError as error:
        raise CkptError(f"{to}: can't be written: {os.strerror(error.errno or 0)}; nothing was left there") from error
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def check_target(to: Path, *, force: bool, is_ours: Callable[[str], bool]) -> None:
    """Check that a directory may be put at ``to``: nothing is there, or by ``force`` only files that we wrote.

    Raises:
        UsageError: it may not.
    """
    if not to.parent.is_dir():
        raise UsageError(f"{to.parent}: no such directory; make it, or give --to another one")
    if not to.exists() and not to.is_symlink():
        return
    if to.is_symlink() or not to.is_dir():
        raise UsageError(f"{to}: is not a directory; give --to a new one")
    present = [path.name for path in to.iterdir()]
    if present and not force:
        raise UsageError(f"{to}: is there and not empty; give --to a new directory, or --force to replace this one")
    strange = [name for name in present if not is_ours(name)]
    if strange:
        raise UsageError(f"{to}: holds {strange[0]!r}, which this command did not write; give --to a new directory")


def put_in_place(directory: Path, to: Path) -> None:
    """Give the finished directory its name. What a forced restore replaces goes only once the new one is there."""
    _sync_directory(directory)
    aside = to.parent / f".{to.name}.old-{secrets.token_hex(8)}"
    replaces = to.is_dir() and any(to.iterdir())
    if replaces:
        to.rename(aside)
    directory.rename(to)
    _sync_directory(to.parent)
    if replaces:
        shutil.rmtree(aside)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
