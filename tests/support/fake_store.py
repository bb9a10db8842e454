"""An object store in memory that loses requests and replies on demand. It passes the contract of object stores."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import Literal, TypeAlias

from toprope.store.errors import AlreadyExistsError, CorruptObjectError, MissingObjectError, UnavailableError
from toprope.store.names import Key

STREAMED = 64 * 1024
Fault: TypeAlias = Literal["none", "request lost", "reply lost", "late"]


class FakeStore:
    """Objects in a dict. ``faults`` says what befalls the next creates, in order; then all goes well.

    A ``late`` create lands when ``land`` is called. ``reads_lost`` is how many of the next reads go unanswered.
    """

    def __init__(self) -> None:
        self.objects: dict[Key, bytes] = {}
        self.faults: deque[Fault] = deque()
        self.late: list[tuple[Key, bytes]] = []
        self.reads_lost = 0
        self.created: list[Key] = []
        self._lock = threading.Lock()

    def create(self, key: Key, body: bytes | memoryview) -> None:
        fault = self.faults.popleft() if self.faults else "none"
        if fault == "request lost":
            raise UnavailableError(f"{key}: request lost")
        if fault == "late":
            self.late.append((key, bytes(body)))
            raise UnavailableError(f"{key}: no answer yet")
        with self._lock:
            if key in self.objects:
                raise AlreadyExistsError(key)
            self.objects[key] = bytes(body)
            self.created.append(key)
        if fault == "reply lost":
            raise UnavailableError(f"{key}: reply lost")

    def land(self) -> None:
        for key, body in self.late:
            if key not in self.objects:
                self.objects[key] = body
                self.created.append(key)
        self.late.clear()

    def read(self, key: Key, *, start: int = 0, length: int | None = None, uncached: bool = False) -> bytes:
        if self.reads_lost:
            self.reads_lost -= 1
            raise UnavailableError(f"{key}: no answer")
        if key not in self.objects:
            raise MissingObjectError(key)
        body = self.objects[key]
        if length is not None and start + length > len(body):
            raise CorruptObjectError(f"{key}: ends at byte {len(body)}, expected {start + length}")
        return body[start:] if length is None else body[start : start + length]

    def stream(self, key: Key, *, start: int, length: int) -> Generator[memoryview, None, None]:
        whole = memoryview(self.read(key, start=start, length=length))
        yield from (whole[at : at + STREAMED] for at in range(0, length, STREAMED))

    def size(self, key: Key) -> int:
        return len(self.read(key))

    def delete(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self.objects.pop(key, None)

    def list(self, prefix: str) -> Iterator[Key]:
        yield from sorted(key for key in tuple(self.objects) if key.startswith(prefix))
