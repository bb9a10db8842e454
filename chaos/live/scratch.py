"""Directories, in shared memory or on disk, that do not outlive their maker, even one that was killed.

The maker holds a lock on its directory, which the kernel lets go when the maker ends, however that happens. Whoever
makes the next directory removes those whose lock is free.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from toprope.chaos.live.mounts import unmount_below

DISK = Path(tempfile.gettempdir())
"""The parent of what is too large for memory."""
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the tmpfs that slots are made for
_PREFIX = "toprope-scratch-"


class Scratch:
    """An empty directory of our own under ``parent``: shared memory where there is some. Use it in a ``with``."""

    def __init__(self, parent: Path | None = None) -> None:
        """Make it, and remove what dead makers have left."""
        usable = os.access(_SHARED_MEMORY, os.W_OK)
        parent = parent or (_SHARED_MEMORY if usable else DISK)
        sweep(parent)
        # locked before it has the name that others look for
        unlocked = Path(tempfile.mkdtemp(prefix=".toprope-", dir=parent))
        self._lock = _open(unlocked)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = unlocked.rename(parent / f"{_PREFIX}{secrets.token_hex(4)}")

    def remove(self) -> None:
        """Delete it with all that it holds."""
        shutil.rmtree(self.path)
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()


def sweep(parent: Path) -> None:
    """Remove the directories of makers that have ended."""
    for path in sorted(parent.glob(f"{_PREFIX}*")):
        try:
            lock = _open(path)
        except (FileNotFoundError, PermissionError):  # removed meanwhile, or another user's
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unmount_below(path)
            shutil.rmtree(path)
        except (BlockingIOError, FileNotFoundError):  # its maker lives, or has just removed it itself
            continue
        finally:
            os.close(lock)


def _open(directory: Path) -> int:
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
