"""A store that did not answer when it was opened: it is tried out before the first object is written to it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence

from toprope.store.names import Key
from toprope.store.objects.protocol import ObjectStore


class UntriedStore:
    """Lets nothing be written before ``try_out`` has once returned; reading is left to the store itself."""

    def __init__(self, store: ObjectStore, try_out: Callable[[], None]) -> None:
        self._store = store
        self._try_out = try_out
        self._mutex = threading.Lock()
        self._tried = False

    def __repr__(self) -> str:
        return f"UntriedStore({self._store!r})"

    def create(self, key: Key, body: bytes | memoryview) -> None:
        """Write a new object.

        Raises:
            UsageError: the store can't be used; the message says why.
            UnavailableError: it still does not answer, or it may or may not have been written.
        """
        with self._mutex:
            if not self._tried:
                self._try_out()
                self._tried = True
        self._store.create(key, body)

    def read(self, key: Key, *, start: int = 0, length: int | None = None, uncached: bool = False) -> bytes:
        """Return bytes of an object."""
        return self._store.read(key, start=start, length=length, uncached=uncached)

    def stream(self, key: Key, *, start: int, length: int) -> Generator[memoryview, None, None]:
        """Yield bytes of an object."""
        return self._store.stream(key, start=start, length=length)

    def size(self, key: Key) -> int:
        """Return the length of an object in bytes."""
        return self._store.size(key)

    def delete(self, keys: Sequence[Key]) -> None:
        """Remove objects."""
        self._store.delete(keys)

    def list(self, prefix: str) -> Iterator[Key]:
        """Yield the keys that begin with ``prefix``, in order."""
        return self._store.list(prefix)
