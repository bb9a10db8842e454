"""What comes of a range, in pieces, until all of it has come."""

from __future__ import annotations

from collections.abc import Callable, Generator

from toprope.store.errors import CkptError
from toprope.store.objects.protocol import STREAM_BYTES


def pieces_of(
    read_into: Callable[[memoryview, int], int], *, start: int, length: int, short: Callable[[int], CkptError]
) -> Generator[memoryview, None, None]:
    """Yield ``length`` bytes from ``start`` on in order, each piece valid until the next is asked for.

    ``read_into`` fills as much as it likes of the room that it is given with what lies from a place on, and returns how
    many bytes these are; 0: nothing more comes.

    Raises:
        CkptError: what ``short`` makes of the place at which it ended too early.
    """
    buffer = memoryview(bytearray(min(STREAM_BYTES, length)))
    at, end = start, start + length
    while at < end:
        count = read_into(buffer[: end - at], at)
        if not count:
            raise short(at)
        at += count
        yield buffer[:count]
