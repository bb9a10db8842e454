"""A TCP proxy that can be told to misbehave, as a process of its own.

``python -m toprope.chaos.live.proxy LISTEN TARGET MODE_FILE LOG_FILE`` carries bytes both ways, and does what the mode
file says from the next piece of bytes on (addresses are ``[HOST:]PORT``, on loopback without a host):

- ``pass``
- ``cut``: every connection is reset, new ones too
- ``half-open [WAY]``: bytes are taken and go nowhere; with a way, a cut of that way alone
- ``stall N [WAY]``: after N bytes of a connection nothing more is taken
- ``delay S [WAY]``: each piece comes S seconds later
- ``throttle BYTES_A_SECOND [WAY]``
- ``truncate N``: a reply ends after N bytes, with a reset
- ``slowdown``: an HTTP request is answered with 503 SlowDown
- ``expired``: an HTTP request is answered with 403 ExpiredToken
- ``lost``: an HTTP request arrives, its reply does not
- ``late S``: who makes an HTTP request is cut off, and S seconds later it arrives all the same
- ``muddle SEED [WAY]``: MQTT messages are repeated, swapped and lost

``WAY`` is ``up`` (towards the target) or ``down`` (back). It logs what it does, a line each.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self, TypeAlias, get_args

from toprope.chaos.live.muddle import Muddle

MODES = (
    "pass",
    "cut",
    "half-open",
    "stall",
    "delay",
    "throttle",
    "truncate",
    "slowdown",
    "expired",
    "lost",
    "late",
    "muddle",
)
Way: TypeAlias = Literal["up", "down"]
_NEW_CONNECTIONS = {"cut", "slowdown", "expired", "lost", "late", "muddle"}
"""Modes that connections of before can't go over to: those are reset."""
_DOWN_ONLY = {"truncate", "lost"}
_CHUNK_BYTES = 64 * 1024
_UNDERWAY_PIECES = 1024
_POLL_S = 0.02
_APPLIED_S = 10.0
_REFUSALS = {"slowdown": ("503 Slow Down", "SlowDown"), "expired": ("403 Forbidden", "ExpiredToken")}
"""The status and S3's code that a mode answers requests with."""


def _refusal(mode: str) -> bytes:
    status, code = _REFUSALS[mode]
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>made to fail</Message></Error>"
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nConnection: close\r\nContent-Length: {len(body)}"
    return f"{head}\r\n\r\n{body}".encode()


@dataclass(frozen=True, slots=True)
class Mode:
    """What a mode file says."""

    kind: str = "pass"
    amount: float = 0.0
    way: Way | None = None

    @classmethod
    def parsed(cls, text: str) -> Self:
        """Read ``KIND [AMOUNT] [WAY]``.

        Raises:
            ValueError: it says something else.
        """
        kind, *rest = text.split()
        way = rest.pop() if rest and rest[-1] in get_args(Way) else None
        if kind not in MODES or len(rest) > 1:
            raise ValueError(
                f"mode {text!r}: give one of {', '.join(MODES)}, with an amount and a way where it has one"
            )
        return cls(kind, float(rest[0]) if rest else 0.0, "up" if way == "up" else "down" if way else None)

    def at(self, way: Way) -> str:
        """Return what is to be done with bytes that go this way."""
        only = "down" if self.kind in _DOWN_ONLY else self.way
        return self.kind if only in {None, way} else "pass"


@dataclass(slots=True)
class Proxy:
    """The proxy; connections that are open are known, so that they can be reset."""

    target: tuple[str, int]
    mode_file: Path
    log: Path
    mode: Mode = field(default_factory=Mode)
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _chances: dict[Way, random.Random] = field(default_factory=dict)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def serve(self, host: str, port: int) -> None:
        """Serve until cancelled."""
        self.mode = Mode.parsed(self.mode_file.read_text())
        server = await asyncio.start_server(self._connection, host, port)
        async with server, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow())
            tasks.create_task(server.serve_forever())

    async def _follow(self) -> None:
        """Read the mode file; when connections are to be cut, or answered in another way, end those that are open."""
        while True:
            await asyncio.sleep(_POLL_S)
            before, self.mode = self.mode, Mode.parsed(self.mode_file.read_text())
            if self.mode == before:
                continue
            self.note(f"mode {self.mode.kind} {self.mode.amount:g} {self.mode.way or 'both ways'}")
            if self.mode.kind in _NEW_CONNECTIONS:
                for writer in list(self._writers):
                    self._reset(writer)
            async with self._changed:
                self._changed.notify_all()

    async def passing(self, way: Way) -> None:
        """Return once bytes, and the end of them, are no longer kept back this way."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.mode.at(way) not in {"half-open", "stall"})

    def note(self, text: str) -> None:
        """Write a line into the log."""
        with self.log.open("ab") as stream:
            stream.write(f"{time.monotonic():.6f} {text}\n".encode())

    def _reset(self, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        with contextlib.suppress(OSError):  # it may be closed
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        self.note("reset a connection")

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            if self.mode.kind == "cut":
                self._reset(writer)
            elif self.mode.kind in _REFUSALS:
                await self._answer(self.mode.kind, reader, writer)
            elif self.mode.kind == "late":
                await self._bring_late(self.mode.amount, reader, writer)
            else:
                await self._carry(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            writer.transport.abort()
        finally:
            self._writers.discard(writer)
            with contextlib.suppress(OSError):
                writer.close()

    async def _answer(self, mode: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(_refusal(mode))
        await writer.drain()
        self.note(f"answered {' '.join(_REFUSALS[mode])}")
        with contextlib.suppress(TimeoutError):  # what else it sends is read, or the reset would overtake the answer
            async with asyncio.timeout(0.2):
                while await reader.read(_CHUNK_BYTES):
                    pass

    async def _bring_late(self, later_s: float, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take a whole request, cut its sender off, and bring it to the target once nobody waits for it any more."""
        head = await reader.readuntil(b"\r\n\r\n")
        fields = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:] if b": " in line)
        if fields.get(b"expect") == b"100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            await writer.drain()
        body = await reader.readexactly(int(fields.get(b"content-length", b"0")))
        self._reset(writer)
        await asyncio.sleep(later_s)
        far_reader, far_writer = await asyncio.open_connection(*self.target)
        try:
            far_writer.write(head + body)
            async with asyncio.timeout(_APPLIED_S):
                status = b"100"
                while b"100" in status:
                    status = (await far_reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0]
        finally:
            far_writer.transport.abort()
        said = f"{head.split(b' HTTP')[0].decode()} ({len(body)} bytes): {status.decode()}"
        self.note(f"brought {later_s:g} s after its sender was cut off: {said}")

    def chance(self, way: Way) -> random.Random:
        """Return the chance of a way; what one connection has drawn is not drawn again by the next."""
        return self._chances.setdefault(way, random.Random(f"{self.mode.amount:g} {way}"))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self.target)
        self._writers.add(far_writer)
        try:
            async with asyncio.TaskGroup() as tasks:
                for way in (_OneWay(self, "up", reader, far_writer), _OneWay(self, "down", far_reader, writer)):
                    tasks.create_task(way.take())
                    tasks.create_task(way.give())
        except* OSError:
            self._reset(writer)
        finally:
            self._writers.discard(far_writer)
            far_writer.transport.abort()


class _OneWay:
    """Bytes of a connection that go one way: taken, under way for as long as the mode says, given."""

    def __init__(self, proxy: Proxy, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._proxy, self._way, self._reader, self._writer = proxy, way, reader, writer
        self._underway: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_UNDERWAY_PIECES)
        self._taken = 0
        self._muddle: Muddle | None = None

    async def take(self) -> None:
        """Read until the sender ends, and do what the mode says.

        Raises:
            ConnectionResetError: a reply is to end here.
        """
        while piece := await self._reader.read(_CHUNK_BYTES):
            due_s = time.monotonic()
            match self._proxy.mode.at(self._way):
                case "delay":
                    due_s += self._proxy.mode.amount
                    self._note(f"delay of {len(piece)} bytes")
                case "throttle":
                    await asyncio.sleep(len(piece) / self._proxy.mode.amount)
                    self._note(f"throttle of {len(piece)} bytes")
                case "half-open":
                    self._note(f"swallowed {len(piece)} bytes")
                    continue
                case "stall":
                    piece = await self._stalled(piece)
                case "truncate" | "lost":
                    await self._end_early(piece)
                case "muddle":
                    piece = self._muddled(piece)
                case _:
                    pass
            self._taken += len(piece)
            await self._underway.put((due_s, piece))
        await self._proxy.passing(self._way)  # that it has ended is to be silent, too
        await self._underway.put((0.0, b""))

    async def give(self) -> None:
        """Write what is due, in the order in which it came."""
        while True:
            due_s, piece = await self._underway.get()
            if not due_s:
                break
            if (early_s := due_s - time.monotonic()) > 0:
                await asyncio.sleep(early_s)
            self._writer.write(piece)
            await self._writer.drain()
        if self._writer.can_write_eof():
            with contextlib.suppress(OSError):
                self._writer.write_eof()

    def _note(self, text: str) -> None:
        self._proxy.note(f"{text} {self._way}")

    async def _stalled(self, piece: bytes) -> bytes:
        """Give what may still pass, then wait until the mode is another one, and return the rest."""
        passes = max(0, int(self._proxy.mode.amount) - self._taken)
        if passes >= len(piece):
            return piece
        await self._underway.put((time.monotonic(), piece[:passes]))
        self._note(f"stalled after {self._taken + passes} bytes")
        await self._proxy.passing(self._way)
        return piece[passes:]

    async def _end_early(self, piece: bytes) -> None:
        passes = int(self._proxy.mode.amount) - self._taken if self._proxy.mode.kind == "truncate" else 0
        if passes >= len(piece):
            return
        self._writer.write(piece[: max(0, passes)])
        await self._writer.drain()
        self._note(f"{self._proxy.mode.kind}: a reply of {len(piece)} bytes ended after {max(0, passes)}")
        raise ConnectionResetError

    def _muddled(self, piece: bytes) -> bytes:
        if self._muddle is None:
            self._muddle = Muddle(self._proxy.chance(self._way))
        muddle = self._muddle
        passes = muddle.take(piece)
        self._note(f"muddled: {muddle.repeated} repeated, {muddle.swapped} swapped, {muddle.lost} lost")
        return passes


def tell(mode_file: Path, mode: str) -> None:
    """Let the proxy that follows this file do so from now on.

    Raises:
        ValueError: there is no such mode.
    """
    Mode.parsed(mode)
    temporary = mode_file.with_suffix(".tmp")
    temporary.write_text(mode)
    temporary.rename(mode_file)


def done(log: Path) -> list[tuple[float, str]]:
    """Return what a proxy has done, each with the monotonic time in seconds; changes of mode are left out."""
    lines = (line.partition(" ") for line in log.read_text().splitlines()) if log.exists() else ()
    return [(float(at_s), text) for at_s, _, text in lines if not text.startswith("mode ")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until killed."""
    listen, target, mode_file, log = sys.argv[1:] if arguments is None else arguments
    proxy = Proxy(_address(target), Path(mode_file), Path(log))
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(proxy.serve(*_address(listen)))
    os._exit(0)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host or "127.0.0.1", int(port)


if __name__ == "__main__":
    main()
