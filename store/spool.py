"""Bytes that are made one after the other and then needed as a whole: in a temporary file, mapped, not in memory."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

from toprope.store.errors import CkptError


@contextlib.contextmanager
def spool(needed_bytes: int) -> Iterator[BinaryIO]:
    """Open a nameless temporary file (in ``$TMPDIR``), gone at the end, whatever happens.

    Raises:
        CkptError: there is no room for ``needed_bytes`` in it.
    """
    place = tempfile.gettempdir()
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < needed_bytes:
        raise CkptError(
            f"{place}: needs {needed_bytes} bytes for a time, but {free_bytes} are free; point TMPDIR to more room"
        )
    try:
        with tempfile.TemporaryFile() as file:
            yield file
    except OSError as error:
        raise CkptError(f"{place}: {os.strerror(error.errno or 0)}; point TMPDIR to more room") from error


@contextlib.contextmanager
def mapped(file: BinaryIO) -> Iterator[memoryview]:
    """Map what was written to a spool; nobody may hold on to a view of it beyond the end."""
    file.flush()
    size = os.fstat(file.fileno()).st_size
    if not size:
        yield memoryview(b"")
        return
    with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as pages, memoryview(pages) as view:
        yield view
