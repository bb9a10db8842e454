"""From what a user writes after ``--store`` to an object store."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote

from toprope.store.errors import UnavailableError, UsageError
from toprope.store.objects.directory import DirectoryStore


def open_store(root: str, *, write: bool = False) -> DirectoryStore:
    """Return the object store at ``root``: a directory, or a ``file://`` URL of one.

    With ``write`` a missing directory is made (its parent must exist), and the store is tried out.

    Raises:
        UsageError: it is no store that this version knows, or it can't be written.
        UnavailableError: nothing to read is there.
    """
    path = _directory_of(root)
    if not write:
        if not path.is_dir():
            what = "is not a directory" if path.exists() else "does not exist or is not mounted"
            raise UnavailableError(f"store {root} can't be reached: it {what}")
        return DirectoryStore(path)
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"store {root} can't be made: {os.strerror(error.errno or 0)}. "
            "Give a directory that this user can write, or one whose parent exists"
        ) from error
    store = DirectoryStore(path)
    store.probe()
    return store


def _directory_of(root: str) -> Path:
    if not root or "\0" in root:
        raise UsageError(f"store {root!r} is not usable: give a directory, or file:///path")
    if root.startswith("file:///"):
        return Path(unquote(root.removeprefix("file://")))
    if root.startswith("file:"):
        raise UsageError(f"store {root!r} is not usable: write file:///path, with three slashes")
    if "://" in root:
        raise UsageError(
            f"store {root!r} is not usable: this version keeps objects in directories only "
            "(s3:// comes with the S3 store); give a directory, or file:///path"
        )
    return Path(root)
