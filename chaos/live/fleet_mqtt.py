"""A connection to the broker for many nodes at once: the few packets of MQTT 3.1.1 that a fleet needs.

A load that shares the machine with what it measures has to be light: this takes a fifth of the time of the client that
coordinator and sidecars use. QoS 0 and 1, no reconnecting: a connection that is lost ends the fleet.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence

from toprope.coordinator.settings import Address

_CONNECT, _CONNACK, _PUBLISH, _PUBACK, _SUBSCRIBE, _SUBACK = 0x10, 0x20, 0x30, 0x40, 0x82, 0x90
_AT_LEAST_ONCE, _RETAIN, _CLEAN_SESSION, _REFUSED = 0x02, 0x01, 0x02, 0x80
_NUMBERS = 0xFFFF
"""Packets are numbered from 1 to this, and then from 1 again."""


class FleetMqtt(asyncio.Protocol):
    """One connection of a client ``identifier``. ``hear`` is given the topic and the body of each message."""

    def __init__(self, identifier: str, hear: Callable[[str, bytes], None]) -> None:
        loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[None] = loop.create_future()
        """Raises ConnectionError once the connection is lost, whoever ended it but ``close``."""
        self._identifier = identifier
        self._hear = hear
        self._came = bytearray()
        self._number = 0
        self._connected: asyncio.Future[None] = loop.create_future()
        self._subscribed: asyncio.Future[None] = loop.create_future()

    @staticmethod
    async def connected(broker: Address, *, identifier: str, hear: Callable[[str, bytes], None]) -> FleetMqtt:
        """Return a connection that the broker has accepted.

        Raises:
            ConnectionError: it has not.
        """
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(lambda: FleetMqtt(identifier, hear), broker.host, broker.port)
        await client.accepted()
        return client

    async def accepted(self) -> None:
        """Return once the broker has accepted the connection.

        Raises:
            ConnectionError: it has not.
        """
        await self._until(self._connected)

    async def subscribe(self, topics: Sequence[str]) -> None:
        """Subscribe with QoS 1, and return once the broker has taken it.

        Raises:
            ConnectionError: the connection was lost before.
        """
        self._subscribed = asyncio.get_running_loop().create_future()
        self._send(_SUBSCRIBE, self._next() + b"".join(_text(topic) + b"\1" for topic in topics))
        await self._until(self._subscribed)

    def publish(self, topic: str, body: bytes) -> None:
        """Publish a retained document with QoS 1; nothing is waited for."""
        self._send(_PUBLISH | _AT_LEAST_ONCE | _RETAIN, _text(topic) + self._next() + body)

    def close(self) -> None:
        """End the connection."""
        self.lost.cancel()
        self._transport.close()

    # --- asyncio.Protocol ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        never = 0
        self._send(_CONNECT, _text("MQTT") + struct.pack("!BBH", 4, _CLEAN_SESSION, never) + _text(self._identifier))

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell those who wait."""
        if not self.lost.done():
            self.lost.set_exception(ConnectionError(f"the broker ended a connection of the fleet: {exc or 'closed'}"))

    def data_received(self, data: bytes) -> None:
        """Take in all packets that are whole."""
        self._came += data
        at = 0
        while (packet := _packet_at(self._came, at)) is not None:
            begin, end = packet
            self._on_packet(self._came[at], bytes(self._came[begin:end]))
            at = end
        del self._came[:at]

    # --- packets ---------------------------------------------------------------------------------------------------

    def _on_packet(self, head: int, body: bytes) -> None:
        kind = head & 0xF0
        if kind == _PUBLISH:
            length = 2 + int.from_bytes(body[:2])
            at_least_once = bool(head & _AT_LEAST_ONCE)
            if at_least_once:
                self._send(_PUBACK, body[length : length + 2])
            self._hear(body[2:length].decode(), body[length + 2 * at_least_once :])
        elif kind in {_CONNACK, _SUBACK}:
            refused = body[1] != 0 if kind == _CONNACK else _REFUSED in body[2:]
            answered = self._connected if kind == _CONNACK else self._subscribed
            if refused:
                answered.set_exception(ConnectionError(f"the broker refuses: packet {head:#x} {body.hex()}"))
            else:
                answered.set_result(None)
        elif kind != _PUBACK:
            raise ConnectionError(f"the broker sent a packet of an unexpected kind: {head:#x}")

    async def _until(self, answered: asyncio.Future[None]) -> None:
        await asyncio.wait({answered, self.lost}, return_when=asyncio.FIRST_COMPLETED)
        await (answered if answered.done() else self.lost)

    def _next(self) -> bytes:
        self._number = self._number % _NUMBERS + 1
        return self._number.to_bytes(2)

    def _send(self, head: int, body: bytes) -> None:
        self._transport.write(bytes((head, *_length(len(body)))) + body)


def _text(text: str) -> bytes:
    encoded = text.encode()
    return len(encoded).to_bytes(2) + encoded


def _length(size: int) -> bytes:
    """Return how MQTT writes a length: seven bits a byte, the lowest first."""
    written = bytearray()
    while size >= 0x80:  # noqa: PLR2004 - MQTT's
        written.append(size & 0x7F | 0x80)
        size >>= 7
    written.append(size)
    return bytes(written)


def _packet_at(came: bytearray, at: int) -> tuple[int, int] | None:
    """Return where the body of the packet that begins at ``at`` begins and ends, if all of it came."""
    size = shift = 0
    for place in range(at + 1, min(len(came), at + 5)):
        size |= (came[place] & 0x7F) << shift
        shift += 7
        if came[place] < 0x80:  # noqa: PLR2004 - the last byte of a length
            return (place + 1, place + 1 + size) if place + 1 + size <= len(came) else None
    return None
