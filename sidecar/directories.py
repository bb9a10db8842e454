"""The directories of a sidecar: made, tried out, and owned by one process at a time. All calls block."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from toprope.store.errors import UsageError

LOCK_NAME = "sidecar.lock"


def lock_directory(root: Path, *, option: str) -> int:
    """Return a descriptor whose lock says that this process owns the directory, until it ends.

    ``option`` is what gives a sidecar another one.

    Raises:
        UsageError: another live sidecar owns it.
    """
    descriptor = os.open(root / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise UsageError(
            f"another sidecar of job {root.name} serves {root}: stop it first, or give this one its own {option}; "
            "another run needs a name of its own"
        ) from error
    return descriptor


def refuse_if_owned(root: Path, *, option: str) -> None:
    """See, without making anything, that no other process owns the directory now.

    Raises:
        UsageError: a live sidecar owns it, or it can't be looked at.
    """
    try:
        if (root / LOCK_NAME).exists():
            os.close(lock_directory(root, option=option))
    except OSError as error:
        raise _unwritable(root, error, what=option) from error


def make_directory(path: Path, *, what: str) -> None:
    """Make a directory of this user's, with its parents, and see that it can be written.

    Raises:
        UsageError: it can't be made or written.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        trial = path / f"tmp.{os.urandom(8).hex()}"
        os.close(os.open(trial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        trial.unlink()
    except OSError as error:
        raise _unwritable(path, error, what=what) from error


def _unwritable(path: Path, error: OSError, *, what: str) -> UsageError:
    reason = os.strerror(error.errno or 0)
    return UsageError(f"{what} {path} can't be written: {reason}. Give a directory that this user can write")
