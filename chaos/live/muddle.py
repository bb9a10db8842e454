"""One way of an MQTT connection, muddled: messages are repeated, swapped with their neighbours and lost.

Only PUBLISH packets are; all others go as they came, so that the connection itself lives on.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

_PUBLISH = 3
_MAX_LENGTH_BYTES = 4


class Muddle:
    """Takes bytes of one direction and gives those that are to go on."""

    def __init__(self, chance: random.Random, *, lost_share: float = 0.05) -> None:
        """``lost_share`` of the messages are lost, half of the others wait until the next packet has gone."""
        self._chance = chance
        self._lost_share = lost_share
        self._pending = b""
        self._held = b""
        self.lost = self.swapped = self.repeated = 0

    def take(self, piece: bytes) -> bytes:
        """Return what is to go on now that ``piece`` has come."""
        self._pending += piece
        return b"".join(self._sent(packet) for packet in self._packets())

    def _sent(self, packet: bytes) -> bytes:
        held, self._held = self._held, b""
        if packet[0] >> 4 != _PUBLISH:
            return packet + held
        if self._chance.random() < self._lost_share:
            self.lost += 1
            return held
        self.repeated += 1
        if held:
            self.swapped += 1
        elif self._chance.random() < 0.5:  # noqa: PLR2004 - half of them
            self._held = packet * 2
            return b""
        return packet * 2 + held

    def _packets(self) -> Iterator[bytes]:
        """Cut whole packets off what has come: type and flags, length in 7-bit groups, the rest."""
        while (size := _size(self._pending)) and len(self._pending) >= size:
            packet, self._pending = self._pending[:size], self._pending[size:]
            yield packet


def _size(data: bytes) -> int:
    """Return the bytes of the packet that ``data`` begins with, or 0 while that is not known."""
    length = 0
    for at, byte in enumerate(data[1 : 1 + _MAX_LENGTH_BYTES]):
        length |= (byte & 0x7F) << (7 * at)
        if byte < 0x80:  # noqa: PLR2004 - the last group
            return 2 + at + length
    return 0
