"""Trying again: how long to wait, and a store that does it around another store."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from toprope.store.digest import CHUNK_BYTES
from toprope.store.errors import (
    AlreadyExistsError,
    CorruptObjectError,
    MissingObjectError,
    ThrottledError,
    UnavailableError,
)
from toprope.store.names import Key
from toprope.store.objects.protocol import ObjectStore

_T = TypeVar("_T")

BROKEN_MAX = 8
"""So often an answer may break off within one stream; each time something more may have come, but there is an end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackOff:
    """How often to try again and how long to wait before: each delay is cut by up to half, by chance.

    A store that throttles is asked again after each of ``throttled_s``, one that did not answer after each of
    ``silent_s``: whoever waits for an answer should learn soon that there is none.
    """

    throttled_s: tuple[float, ...] = (0.2, 0.5, 1.0, 2.0, 4.0)
    silent_s: tuple[float, ...] = (0.1, 0.5)
    sleep: Callable[[float], None] = time.sleep
    chance: Callable[[], float] = random.random

    def call(self, do: Callable[[], _T], *, when_silent: bool) -> _T:
        """Return what ``do`` returns; with ``when_silent`` it is called again after a lost answer too.

        Raises:
            UnavailableError: the store did not answer, or throttled us to the end.
        """
        throttled, silent = iter(self.throttled_s), iter(self.silent_s if when_silent else ())
        while True:
            try:
                return do()
            except UnavailableError as error:
                delay_s = next(throttled if isinstance(error, ThrottledError) else silent, None)
                if delay_s is None:
                    raise
            self.sleep(delay_s * (1 - self.chance() / 2))


class RetryStore:
    """A store that asks another one again when that throttles, and for reads also when it did not answer.

    A create whose outcome is open is left open: only its caller knows how to tell its own object from another's.
    """

    def __init__(self, store: ObjectStore, back_off: BackOff | None = None) -> None:
        self._store = store
        self._back_off = back_off or BackOff()

    def __repr__(self) -> str:
        return f"RetryStore({self._store!r})"

    def create(self, key: Key, body: bytes | memoryview) -> None:
        """Write a new object. What we find after we were throttled is ours if it has the same bytes."""
        throttled = False

        def once() -> None:
            nonlocal throttled
            try:
                self._store.create(key, body)
            except AlreadyExistsError:
                if not throttled or not self._holds(key, body):
                    raise
            except ThrottledError:
                throttled = True
                raise

        self._back_off.call(once, when_silent=False)

    def read(self, key: Key, *, start: int = 0, length: int | None = None, uncached: bool = False) -> bytes:
        """Return bytes of an object."""
        return self._back_off.call(
            lambda: self._store.read(key, start=start, length=length, uncached=uncached), when_silent=True
        )

    def stream(self, key: Key, *, start: int, length: int) -> Generator[memoryview, None, None]:
        """Yield bytes of an object; where an answer breaks off only the rest is asked for again.

        Raises:
            UnavailableError: the store did not answer, or more than ``BROKEN_MAX`` answers broke off.
        """
        done = broken = 0
        pieces = self._store.stream(key, start=start, length=length)

        def following() -> memoryview | None:
            nonlocal pieces, broken
            try:
                return next(pieces, None)
            except UnavailableError as error:
                broken += not isinstance(error, ThrottledError)
                pieces = self._store.stream(key, start=start + done, length=length - done)
                raise

        try:
            while (piece := self._back_off.call(following, when_silent=broken < BROKEN_MAX)) is not None:
                done += len(piece)
                yield piece
        finally:
            pieces.close()

    def size(self, key: Key) -> int:
        """Return the length of an object in bytes."""
        return self._back_off.call(lambda: self._store.size(key), when_silent=True)

    def delete(self, keys: Sequence[Key]) -> None:
        """Remove objects; to do it twice does no harm."""
        self._back_off.call(lambda: self._store.delete(keys), when_silent=True)

    def list(self, prefix: str) -> Iterator[Key]:
        """Yield the keys that begin with ``prefix``, in order; asked again only as a whole, before the first."""
        keys = self._back_off.call(lambda: list(self._store.list(prefix)), when_silent=True)
        yield from keys

    def _holds(self, key: Key, body: bytes | memoryview) -> bool:
        """Say whether the object of ``key`` has these bytes."""
        try:
            with memoryview(body) as whole, whole.cast("B") as view:
                if self.size(key) != len(view):
                    return False
                return all(
                    self.read(key, start=start, length=len(view[start : start + CHUNK_BYTES]), uncached=True)
                    == view[start : start + CHUNK_BYTES]
                    for start in range(0, len(view), CHUNK_BYTES)
                )
        except (MissingObjectError, CorruptObjectError):
            return False
