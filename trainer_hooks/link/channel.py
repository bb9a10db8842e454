"""The trainer's end of the Unix socket: one background thread that connects, reads, writes and connects again.

The training thread only appends to a queue and wakes the thread; it never waits for the socket. What is heard goes to
a ``Listener``, whose methods run on the background thread.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from toprope.trainer_hooks.link import wire

BACK_OFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)
MAX_QUEUED = 1024
_CHUNK_BYTES = 1 << 16
_PREFIX_BYTES = 4


class Listener(Protocol):
    """What the owner of a channel does with what comes."""

    def greeting(self) -> Sequence[wire.FromHook]:
        """Return the frames that a new connection begins with."""
        ...

    def heard(self, frame: wire.FromSidecar) -> None:
        """Take a frame."""
        ...

    def lost(self, reason: str) -> None:
        """Learn that the connection has ended, or that none could be made."""
        ...


class Channel:
    """Keeps one connection to a sidecar alive until it is closed."""

    def __init__(self, path: Path, listener: Listener) -> None:
        self._path = path
        self._listener = listener
        self._outbox: deque[bytes] = deque(maxlen=MAX_QUEUED)
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._stopping = threading.Event()
        self._connected = False
        self._thread = threading.Thread(target=self._run, name="toprope-channel", daemon=True)

    def start(self) -> None:
        """Begin to connect. If a listener raises, ``threading.excepthook`` tells of it, and another thread goes on."""
        self._thread.start()

    @property
    def connected(self) -> bool:
        """Whether there is a connection right now."""
        return self._connected

    def send(self, frame: wire.FromHook) -> None:
        """Queue a frame for the connection there is; without one it is dropped, and the next greeting must say it."""
        if self._connected:
            self._outbox.append(wire.encode(frame))
            self._wake()

    def close(self, *, timeout_s: float) -> None:
        """Send what is queued, then end the thread."""
        self._stopping.set()
        self._wake()
        until = time.monotonic() + timeout_s
        joined = None
        while joined is not self._thread:  # one that failed may just have started another
            joined = self._thread
            joined.join(max(0.0, until - time.monotonic()))
        if not joined.is_alive():
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
            os.write(self._wake_write, b"\0")

    def _run(self) -> None:
        foreseen = False
        try:
            self._stay_connected()
            foreseen = True
        finally:
            if not foreseen:  # saving goes on, and whoever reads standard error knows why it paused
                self._outbox.clear()
                self._listener.lost(f"{self._path}: an error that was not foreseen; standard error has a traceback")
                self._stopping.wait(BACK_OFF_S[-1])
                other = threading.Thread(target=self._run, name="toprope-channel", daemon=True)
                other.start()
                self._thread = other  # only now, so that `close` joins none that was not started

    def _stay_connected(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                    connection.settimeout(5.0)
                    connection.connect(str(self._path))
                    failures = 0
                    self._converse(connection)
            except (OSError, wire.WireError) as error:
                self._outbox.clear()
                self._listener.lost(f"{self._path}: {error}")
            self._stopping.wait(BACK_OFF_S[min(failures, len(BACK_OFF_S) - 1)])
            failures += 1

    def _converse(self, connection: socket.socket) -> None:
        self._outbox.clear()
        self._connected = True
        try:
            self._exchange(connection)
        finally:
            self._connected = False

    def _exchange(self, connection: socket.socket) -> None:
        pending = bytearray(b"".join(wire.encode(frame) for frame in self._listener.greeting()))
        connection.setblocking(False)  # noqa: FBT003 - its signature
        frames = _Frames()
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)
            while pending or self._outbox or not self._stopping.is_set():
                while self._outbox:
                    pending += self._outbox.popleft()
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if pending else 0)
                selector.modify(connection, wanted)
                for key, events in selector.select():
                    if key.fileobj is not connection:
                        _drain(self._wake_read)
                        continue
                    if events & selectors.EVENT_READ:
                        for frame in frames.feed(connection.recv(_CHUNK_BYTES)):
                            self._listener.heard(frame)
                    if events & selectors.EVENT_WRITE and pending:
                        del pending[: connection.send(pending)]


def _drain(descriptor: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while os.read(descriptor, _CHUNK_BYTES):
            pass


class _Frames:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, received: bytes) -> list[wire.FromSidecar]:
        """Return the frames that these bytes complete.

        Raises:
            ConnectionResetError: the stream has ended.
            wire.WireError: a frame is not one that a sidecar sends.
        """
        if not received:
            raise ConnectionResetError("the sidecar closed the connection")
        self._buffer += received
        complete: list[wire.FromSidecar] = []
        while len(self._buffer) >= _PREFIX_BYTES:
            end = _PREFIX_BYTES + wire.body_length(bytes(self._buffer[:_PREFIX_BYTES]))
            if len(self._buffer) < end:
                break
            frame = wire.decode(bytes(self._buffer[_PREFIX_BYTES:end]))
            del self._buffer[:end]
            if not isinstance(frame, wire.FromSidecar):
                raise wire.WireError(f"a sidecar does not send {frame.kind}")
            complete.append(frame)
        return complete
