"""Copies that others read from a simulated sidecar, part by part."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from toprope.chaos.sim.net import NetError
from toprope.sidecar import events as on

if TYPE_CHECKING:
    from toprope.chaos.sim.sidecar import SimSidecar

_SERVE_S = 4.0


@dataclass(slots=True, kw_only=True)
class Flow:
    """Bytes of a copy on their way to a reader."""

    read: Callable[[], bytes | None]
    size: int
    ended: bool = False


class Serving:
    """What a sidecar gives to others."""

    def __init__(self, car: SimSidecar) -> None:
        self._car, self._world, self._node, self._memory = car, car.world, car.node, car.node.memory
        self._serves: dict[int, Flow] = {}
        self._numbers = itertools.count(1)

    async def serve(
        self, place: tuple[str, int, int], tier: str, *, begin: int, end: int, serve: int
    ) -> tuple[int, bytes]:
        """Return part of a copy; the slot is in use from the first part to the last, or until the deadline."""
        if not serve:
            serve = self._begin(place, tier)
        flowing = self._serves.get(serve)
        if flowing is None or flowing.ended:
            raise NetError("the connection was destroyed")
        body = flowing.read()
        if body is None:
            self._end(serve)
            raise NetError("404: the copy is gone")
        if end >= flowing.size:
            self._end(serve)
        return serve, body[begin:end]

    def _begin(self, place: tuple[str, int, int], tier: str) -> int:
        found = [(way, size) for way, size in self._car.core.locate(*place) if tier == way.tier]
        if not found:
            raise NetError("404: no verified copy here")
        way, size = found[0]
        serve = next(self._numbers)
        file = self._memory.at(way.path)

        def read() -> bytes | None:
            if file is not None:
                return bytes(file.data[:size])
            return self._node.local_bytes(way.path)

        self._serves[serve] = Flow(read=read, size=size)
        self._car.post(on.ServeBegan(serve=serve, attempt_uid=place[0], step=place[1], rank=place[2]))
        self._world.loop.call_later(_SERVE_S, self._end, serve)
        return serve

    def _end(self, serve: int) -> None:
        flowing = self._serves.pop(serve, None)
        if flowing is not None and not flowing.ended:
            flowing.ended = True
            self._car.post(on.ServeEnded(serve=serve))

    async def acked(self, holder: str, place: tuple[str, int, int], found: str) -> bool:
        """Take in which digest a holder has."""
        uid, step, rank = place
        self._car.post(on.Acked(holder=holder, attempt_uid=uid, step=step, rank=rank, digest=found))
        return True
