"""A new file in memory, filled by several threads at once, each of which makes its own room. All calls block."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Filling:
    """A file that is being filled.

    Its methods raise what ``no_room`` returns, given how many bytes more were needed and the reason, where there is no
    room for them: who writes to a page for which no room was made gets SIGBUS then.
    """

    def __init__(
        self, descriptor: int, *, no_room: Callable[[int, str], BaseException], view: Callable[[], memoryview]
    ) -> None:
        """``view`` maps the file."""
        self._descriptor = descriptor
        self._no_room = no_room
        self._view = view

    def write(self, at: int, body: bytes | memoryview) -> None:
        """Write bytes to their place, which needs no room before."""
        with memoryview(body) as view, self._translated(len(view)):
            done = 0
            while done < len(view):
                done += os.pwrite(self._descriptor, view[done:], at + done)

    def room(self, begin: int, end: int) -> memoryview:
        """Return a writable view of bytes ``begin`` to ``end``, for whoever receives straight into it."""
        self.reserve(begin, end)
        return self._view()[begin:end]

    def reserve(self, begin: int, end: int) -> None:
        """Make room for bytes ``begin`` to ``end``."""
        if begin < end:
            with self._translated(end - begin):
                os.posix_fallocate(self._descriptor, begin, end - begin)

    @contextmanager
    def _translated(self, more: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in {errno.ENOSPC, errno.ENOMEM}:
                raise
            raise self._no_room(more, os.strerror(error.errno)) from error
