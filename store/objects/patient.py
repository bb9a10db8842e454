"""A store on a network file system, where a node may see for a while what was before another node wrote.

NFS and its like keep names and lengths of files for up to a minute: an object that another node has just written is
missing here, or empty. So an object that something names, and that must be there, is looked for again, its directory
read anew each time; and so is a directory that another node made at the moment when we wanted to. That has a bound for
all of them together: after it what is not to be seen is said to be so, which is not the same as damaged.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from itertools import chain, repeat
from pathlib import Path
from typing import TypeVar

from toprope.store.errors import CorruptObjectError, MissingObjectError, UnseenDirectoryError, UnseenObjectError
from toprope.store.names import Key, is_named
from toprope.store.objects.protocol import ObjectStore

PATIENCE_S = 60.0
REST_S = 600.0
"""Where patience was in vain there is none for so long: a checkpoint that lost many objects is not waited for."""
_LOOK_AGAIN_S = (0.1, 0.3, 1.0, 3.0, 5.0)
_NETWORKED = re.compile(
    r"afs|beegfs(_nodev)?|ceph|cifs|fuse\.(?!fuse-overlayfs).+|gfs2?|glusterfs|gpfs|lustre|nfs4?|ocfs2|smb[0-9]*|wekafs"
)

_T = TypeVar("_T")


class PatientStore:
    """The objects of ``store``, looked for again, for ``patience_s`` at most, where they are named and not seen yet."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        patience_s: float = PATIENCE_S,
        sleep: Callable[[float], None] = time.sleep,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._patience_s = patience_s
        self._sleep = sleep
        self._now_s = now_s
        self._until_s: float | None = None
        self._mutex = threading.Lock()

    def __repr__(self) -> str:
        return f"PatientStore({self._store!r})"

    def create(self, key: Key, body: bytes | memoryview) -> None:
        """Write a new object, as soon as its directory is seen: until then nothing of it is written."""
        for waited in self._looks(key):
            try:
                self._store.create(key, body)
            except UnseenDirectoryError:
                continue
            return self._seen(waited=waited)
        raise UnseenDirectoryError(f"{key}: its directory is not visible yet: {self._looked_at()}; try again")

    def read(self, key: Key, *, start: int = 0, length: int | None = None, uncached: bool = False) -> bytes:
        """Return bytes of an object."""
        return self._patiently(key, lambda: self._store.read(key, start=start, length=length, uncached=uncached))

    def stream(self, key: Key, *, start: int, length: int) -> Generator[memoryview, None, None]:
        """Yield bytes of an object, as soon as it is seen."""
        pieces = self._store.stream(key, start=start, length=length)

        def first() -> memoryview:
            nonlocal pieces
            pieces = self._store.stream(key, start=start, length=length)
            return next(pieces, memoryview(b""))

        found = self._patiently(key, first)
        with closing(pieces):
            yield found
            yield from pieces

    def size(self, key: Key) -> int:
        """Return the length of an object in bytes."""
        return self._patiently(key, lambda: self._store.size(key))

    def delete(self, keys: Sequence[Key]) -> None:
        """Remove objects."""
        self._store.delete(keys)

    def list(self, prefix: str) -> Iterator[Key]:
        """Yield the keys that begin with ``prefix``, in order."""
        return self._store.list(prefix)

    def _patiently(self, key: Key, look: Callable[[], _T]) -> _T:
        """Return what ``look`` returns, once the object is there and not empty, as no named one is.

        Raises:
            UnseenObjectError: it is not to be seen.
        """
        if not is_named(key):
            return look()
        for waited in self._looks(key):
            try:
                found = look()
                if found not in (0, b"") or not self._is_unseen(key):
                    self._seen(waited=waited)
                    return found
            except MissingObjectError:
                pass
            except CorruptObjectError:
                if not self._is_unseen(key):
                    raise
        raise UnseenObjectError(f"{key}: not visible yet, or removed: {self._looked_at()}")

    def _looks(self, key: Key) -> Iterator[bool]:
        """Yield for each look at ``key`` for which there is patience whether we have waited before it."""
        yield False
        for delay_s in chain(_LOOK_AGAIN_S, repeat(_LOOK_AGAIN_S[-1])):
            if not self._may_wait():
                return
            self._sleep(delay_s)
            deque(self._store.list(f"{key.rpartition('/')[0]}/"), maxlen=0)  # so that names are fetched anew
            yield True

    def _looked_at(self) -> str:
        return f"this file system of the network was looked at again for {self._patience_s:.0f} s"

    def _seen(self, *, waited: bool) -> None:
        if waited:
            with self._mutex:
                self._until_s = None

    def _is_unseen(self, key: Key) -> bool:
        try:
            return self._store.size(key) == 0
        except MissingObjectError:
            return True

    def _may_wait(self) -> bool:
        """Say whether there is patience left: for all objects together, and none for a while after it was in vain."""
        with self._mutex:
            now_s = self._now_s()
            if self._until_s is None or now_s > self._until_s + REST_S:
                self._until_s = now_s + self._patience_s
            return now_s < self._until_s


def is_networked(directory: Path, *, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Return whether a directory lies on a file system that several machines write, by what is mounted there."""
    real = directory.resolve()
    kind, depth = "", -1
    for line in mounts.read_text().splitlines():
        where, _, what = line.partition(" - ")
        point = Path(where.split()[4].encode().decode("unicode_escape"))
        if real.is_relative_to(point) and len(point.parts) >= depth:  # of two at one point the later hides the other
            kind, depth = what.split()[0], len(point.parts)
    return _NETWORKED.fullmatch(kind) is not None
