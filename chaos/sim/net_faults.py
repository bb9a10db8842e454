"""One fault at one message, for each message on a short way of a job and each kind of fault in turn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, TypeAlias, get_args

import msgspec

from toprope.chaos.sim.broker import NAME as BROKER
from toprope.chaos.sim.journey import Call, Cell, calls_of, struck
from toprope.chaos.sim.options import QUIET
from toprope.chaos.sim.world import World

Kind: TypeAlias = Literal[
    "lost",
    "doubled",
    "overtaken",
    "late",
    "link cut one way",
    "link cut both ways",
    "sender dies",
    "receiver dies",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
TOGETHER = msgspec.structs.replace(QUIET, broker=True, every=2, local_every=2, object_every=2)
_AGAIN_S, _OVERTAKEN_S, _LATE_S, _CUT_S = 2.0, 0.7, 15.0, 6.0


class PlannedNet:
    """The network of a world; message number ``at`` meets with ``fault``. What stays on a node is no message."""

    def __init__(self, world: World, *, at: int = -1, fault: Kind = "lost") -> None:
        self.calls: list[Call] = []
        self.struck: Call | None = None
        self._world = world
        self._at = at
        self._fault = fault
        self._send = world.net.send
        world.net.send = self._met  # type: ignore[method-assign]  # the network of one history

    def _met(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        if source == target:
            self._send(source, target, deliver)
            return
        call = Call(who=source, operation="to", about=target)
        self.calls.append(call)
        if len(self.calls) - 1 != self._at:
            self._send(source, target, deliver)
            return
        self.struck = call
        self._strike(source, target, deliver)

    def _strike(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        loop = self._world.loop
        match self._fault:
            case "lost":
                return
            case "doubled":
                self._send(source, target, deliver)
                loop.outside(_AGAIN_S, deliver)
            case "overtaken":
                loop.outside(_OVERTAKEN_S, deliver)
            case "late":
                loop.outside(_LATE_S, deliver)
            case "link cut one way":
                self._cut({(source, target)})
            case "link cut both ways":
                self._cut({(source, target), (target, source)})
            case "sender dies":
                self._send(source, target, deliver)
                self._kill(source)
            case "receiver dies":
                self._send(source, target, deliver)
                self._kill(target)

    def _cut(self, links: set[tuple[str, str]]) -> None:
        cuts = self._world.net.cuts
        cuts.update(links)
        self._world.loop.outside(_CUT_S, cuts.difference_update, links)

    def _kill(self, name: str) -> None:
        world = self._world
        if name == BROKER:
            world.broker.restart()
            return
        cars = [node.sidecar.process for node in world.nodes if node.sidecar is not None and node.name == name]
        for process in (*cars, *(host.process for host in world.hosts if host.name == name)):
            process.kill()


def calls() -> tuple[Call, ...]:
    """Return the messages of the way without a fault."""
    return calls_of(TOGETHER, PlannedNet)


def strike(at: int, fault: Kind) -> Cell:
    """Go the way with one fault."""
    return struck(TOGETHER, partial(PlannedNet, at=at, fault=fault), at=at, fault=fault)
