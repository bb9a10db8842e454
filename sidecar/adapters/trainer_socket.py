"""The Unix socket on which trainers speak: frames in, frames out, nobody else's processes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from toprope.store.errors import UsageError
from toprope.trainer_hooks.link import wire

HELLO_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 1.0
MAX_QUEUED_FRAMES = 1024
_PREFIX_BYTES = 4
_CREDENTIALS = struct.Struct("3i")

log = logging.getLogger("toprope.sidecar")


class TrainerSocket:
    """Serves trainers; ``on_frame`` and ``on_closed`` learn what they say, by connection number."""

    def __init__(
        self, path: Path, *, on_frame: Callable[[int, wire.FromHook], None], on_closed: Callable[[int], None]
    ) -> None:
        self._path = path
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._numbers = itertools.count(1)
        self._outboxes: dict[int, asyncio.Queue[bytes | None]] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve while the context lasts, in place of a socket file that a dead sidecar left.

        Raises:
            UsageError: a live process serves it, or it can't be made.
        """
        bound = bind_unix(self._path)
        server = await asyncio.start_unix_server(self._serve, sock=bound)
        try:
            yield
        finally:
            server.close()
            self._path.unlink(missing_ok=True)
            for connection in list(self._outboxes):
                self.hang_up(connection)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._idle.wait()

    def send(self, connection: int, frame: wire.FromSidecar) -> None:
        """Queue a frame; a trainer that reads none of 1,024 loses its connection."""
        self._put(connection, wire.encode(frame))

    def hang_up(self, connection: int) -> None:
        """Close a connection once what is queued has left."""
        self._put(connection, None)

    def _put(self, connection: int, item: bytes | None) -> None:
        outbox = self._outboxes.get(connection)
        if outbox is None:
            return
        try:
            outbox.put_nowait(item)
        except asyncio.QueueFull:
            log.warning("trainer connection %d does not read: closed", connection)
            while not outbox.empty():
                outbox.get_nowait()
            outbox.put_nowait(None)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = next(self._numbers)
        if not _is_ours(writer):
            log.warning("trainer connection %d refused: another user's process", number)
            writer.close()
            return
        outbox: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=MAX_QUEUED_FRAMES)
        self._outboxes[number] = outbox
        self._idle.clear()
        try:
            async with asyncio.TaskGroup() as tasks:
                sender = tasks.create_task(_send(outbox, writer))
                await self._read(number, reader)
                with contextlib.suppress(asyncio.QueueFull):
                    outbox.put_nowait(None)
                async with asyncio.timeout(1.0):
                    await sender
        except* (OSError, EOFError, TimeoutError, wire.WireError) as errors:
            log.info("trainer connection %d ended: %s", number, errors.exceptions[0])
        finally:
            del self._outboxes[number]
            writer.close()
            self._on_closed(number)
            if not self._outboxes:
                self._idle.set()

    async def _read(self, number: int, reader: asyncio.StreamReader) -> None:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            self._on_frame(number, await _frame(reader))
        while True:
            try:
                frame = await _frame(reader)
            except asyncio.IncompleteReadError as error:
                if error.partial:
                    raise
                return
            self._on_frame(number, frame)


async def _frame(reader: asyncio.StreamReader) -> wire.FromHook:
    length = wire.body_length(await reader.readexactly(_PREFIX_BYTES))
    frame = wire.decode(await reader.readexactly(length))
    if not isinstance(frame, wire.FromHook):
        raise wire.WireError(f"a trainer does not send {frame.kind}")
    return frame


async def _send(outbox: asyncio.Queue[bytes | None], writer: asyncio.StreamWriter) -> None:
    while (item := await outbox.get()) is not None:
        writer.write(item)
        await writer.drain()
    writer.close()


def _is_ours(writer: asyncio.StreamWriter) -> bool:
    """Say whether the other end runs as this user or as root."""
    raw = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    return uid in {os.getuid(), 0}


def bind_unix(path: Path) -> socket.socket:
    """Return a listening socket of mode 0600 at ``path``.

    Raises:
        UsageError: a live process serves it, or it can't be made.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_stale(path)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            listening.bind(str(path))
        finally:
            os.umask(before)
        listening.listen(128)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise UsageError(f"socket {path} can't be made: {reason}. Give another with --socket") from error
    return listening


def _remove_stale(path: Path) -> None:
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.settimeout(1.0)
        try:
            trial.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
    raise UsageError(f"socket {path} is served by another sidecar: stop it, or give another path with --socket")
