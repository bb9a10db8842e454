"""The object store protocol: write-once objects under keys. Six methods, each atomic for one object."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Protocol

from toprope.store.errors import CorruptObjectError
from toprope.store.names import Key

MAX_WHOLE_BYTES = 64 * 1024 * 1024
"""What ``read`` returns at most when it is given no length: nobody's memory is filled by an object of an odd size."""
STREAM_BYTES = 256 * 1024
"""What our own stores stream at a time: it stays in a processor's cache until it has been passed on."""


class ObjectStore(Protocol):
    """Objects by key. Methods block; services call them off the event loop."""

    def create(self, key: Key, body: bytes | memoryview) -> None:
        """Write a new object, durably and whole: when this returns, every reader sees it, after a power cut too.

        Raises:
            AlreadyExistsError: the key has an object, which a power cut will not take; it was not touched.
            UnavailableError: it may or may not have been written.
        """

    def read(self, key: Key, *, start: int = 0, length: int | None = None, uncached: bool = False) -> bytes:
        """Return ``length`` bytes from ``start`` on, or all.

        ``uncached`` asks the medium and not a cache: what it returns is still there after a power cut.

        Raises:
            MissingObjectError: there is no such object.
            CorruptObjectError: it ends before ``start + length``; or no length was given, and what there is from
                ``start`` on has more than ``MAX_WHOLE_BYTES``.
            UnavailableError: the store did not answer.
        """

    def stream(self, key: Key, *, start: int, length: int) -> Generator[memoryview, None, None]:
        """Yield ``length`` bytes from ``start`` on, in order, in pieces that are valid until the next is asked for.

        Nothing is asked of the store before the first. Who may leave before the end closes it.

        Raises:
            MissingObjectError, CorruptObjectError, UnavailableError: as ``read``, here or further on.
        """

    def size(self, key: Key) -> int:
        """Return the length of an object in bytes.

        Raises:
            MissingObjectError: there is no such object.
            UnavailableError: the store did not answer.
        """

    def delete(self, keys: Sequence[Key]) -> None:
        """Remove objects; that one is missing is no error. Only what the job log has condemned may be named.

        Raises:
            UnavailableError: some of them may be there still. Ask again.
        """

    def list(self, prefix: str) -> Iterator[Key]:
        """Yield the keys that begin with ``prefix``, in order. Nothing is decided by a listing.

        Raises:
            UnavailableError: the store did not answer.
        """


def check_whole(key: Key, wanted: int) -> None:
    """Check how many bytes are to be read where no length was given.

    Raises:
        CorruptObjectError: they are more than ``MAX_WHOLE_BYTES``.
    """
    if wanted > MAX_WHOLE_BYTES:
        raise CorruptObjectError(f"{key}: {wanted} bytes; at most {MAX_WHOLE_BYTES} are read at once")
