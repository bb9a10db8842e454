"""A store that tells how many bytes were read from it, for those who show how far something is."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing

from toprope.store.names import Key
from toprope.store.objects.protocol import ObjectStore


class MeteredStore:
    """The objects of ``store``; ``on_read`` is told the length of whatever was read."""

    def __init__(self, store: ObjectStore, on_read: Callable[[int], None]) -> None:
        self._store = store
        self._on_read = on_read

    def create(self, key: Key, body: bytes | memoryview) -> None:
        """Write a new object."""
        self._store.create(key, body)

    def read(self, key: Key, *, start: int = 0, length: int | None = None, uncached: bool = False) -> bytes:
        """Return bytes of an object, and tell how many."""
        body = self._store.read(key, start=start, length=length, uncached=uncached)
        self._on_read(len(body))
        return body

    def stream(self, key: Key, *, start: int, length: int) -> Generator[memoryview, None, None]:
        """Yield bytes of an object, and tell of each piece how many."""
        with closing(self._store.stream(key, start=start, length=length)) as pieces:
            for piece in pieces:
                self._on_read(len(piece))
                yield piece

    def size(self, key: Key) -> int:
        """Return the length of an object in bytes."""
        return self._store.size(key)

    def list(self, prefix: str) -> Iterator[Key]:
        """Yield the keys that begin with ``prefix``, in order."""
        return self._store.list(prefix)

    def delete(self, keys: Sequence[Key]) -> None:
        """Remove objects."""
        self._store.delete(keys)
