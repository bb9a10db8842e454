"""One fault at one call of a node's disk, for each call on a short way of a job and each kind of fault in turn."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import msgspec

from toprope.chaos.sim.disk import DiedError
from toprope.chaos.sim.journey import Call, Cell, calls_of, struck
from toprope.chaos.sim.options import QUIET
from toprope.chaos.sim.world import Node, World
from toprope.sidecar.ports import SyncError

T = TypeVar("T")
Kind: TypeAlias = Literal[
    "no space",
    "I/O error",
    "sync fails",
    "bit flip",
    "killed before",
    "killed after",
    "power cut before, all kept",
    "power cut before, nothing kept",
    "power cut after, all kept",
    "power cut after, nothing kept",
]
_DEATHS: tuple[Kind, ...] = (
    "killed before",
    "killed after",
    "power cut before, all kept",
    "power cut before, nothing kept",
    "power cut after, all kept",
    "power cut after, nothing kept",
)
KINDS: dict[str, tuple[Kind, ...]] = {
    "write": ("no space", "I/O error", "sync fails", "bit flip", *_DEATHS),
    "rename": ("no space", "I/O error", "bit flip", *_DEATHS),
    "sync": ("no space", "sync fails", *_DEATHS),
    "remove": ("I/O error", *_DEATHS),
    "list": ("I/O error", *_DEATHS),
    "size": ("I/O error", *_DEATHS),
    "read": ("I/O error", "bit flip", *_DEATHS),
}
"""What each operation can meet with."""
ALONE = msgspec.structs.replace(QUIET, copies=0)
"""No peer has a copy: what a node that lost its memory needs comes from its disk."""
_ERRORS: dict[Kind, int] = {"no space": errno.ENOSPC, "I/O error": errno.EIO, "sync fails": errno.EIO}


class PlannedDisks:
    """The disks of a world; call number ``at`` meets with ``fault``."""

    def __init__(self, world: World, *, at: int = -1, fault: Kind = "I/O error") -> None:
        self.calls: list[Call] = []
        self.struck: Call | None = None
        self._world = world
        self._at = at
        self._fault = fault
        for node in world.nodes:
            self._meet_calls(node)

    def _meet_calls(self, node: Node) -> None:
        disk = node.disk
        write, rename, sync, remove = disk.write, disk.rename, disk.sync_directory, disk.remove
        listing, size, readable = disk.listing, disk.size, disk.check_readable

        def told(operation: str, name: str, act: Callable[[], T]) -> T:
            return self._met(node, operation, name, act)

        def writing(path: Path, body: memoryview) -> None:
            told("write", path.name, lambda: write(path, body))

        def renaming(old: Path, new: Path) -> None:
            told("rename", new.name, lambda: rename(old, new))

        def syncing(_path: Path) -> None:
            told("sync", "", lambda: sync(_path))

        disk.write, disk.rename = writing, renaming  # type: ignore[method-assign]  # the disk of one history
        disk.sync_directory = syncing  # type: ignore[method-assign]
        disk.remove = lambda path: told("remove", path.name, lambda: remove(path))  # type: ignore[method-assign]
        disk.listing = lambda: told("list", "", listing)  # type: ignore[method-assign]
        disk.size = lambda name: told("size", name, lambda: size(name))  # type: ignore[method-assign]
        disk.check_readable = lambda name: told("read", Path(name).name, lambda: readable(name))  # type: ignore[method-assign]

    def _met(self, node: Node, operation: str, name: str, act: Callable[[], T]) -> T:
        call = Call(who=node.name, operation=operation, about=_kind(name))
        self.calls.append(call)
        if len(self.calls) - 1 != self._at:
            return act()
        self.struck = call
        return self._strike(node, operation, name, act)

    def _strike(self, node: Node, operation: str, name: str, act: Callable[[], T]) -> T:
        fault = self._fault
        if fault in _ERRORS:
            if operation == "write":
                self._leave_half(node, name, act)
            error = SyncError if operation == "sync" or fault == "sync fails" else OSError
            raise error(_ERRORS[fault], os.strerror(_ERRORS[fault]), name)
        if fault == "bit flip":
            return self._flipped(node, name, act)
        if "after" in fault:
            act()
        self._die(node)
        raise DiedError

    def _leave_half(self, node: Node, name: str, act: Callable[[], object]) -> None:
        """Leave a part of what was to be written, none of it durable."""
        act()
        body = node.disk.names[name]
        body.data, body.synced = body.data[: len(body.data) // 2], False

    def _flipped(self, node: Node, name: str, act: Callable[[], T]) -> T:
        """Change a bit of a file once it is written, or before it is read."""
        self._world.oracle.on_flip()
        result = act()
        node.disk.flip(name)
        return result

    def _die(self, node: Node) -> None:
        if self._fault.startswith("killed"):
            assert node.sidecar is not None
            node.sidecar.process.kill()
            return
        node.disk.keeps = 1.0 if self._fault.endswith("all kept") else 0.0
        self._world.cut_power(node, replaced=False)
        node.disk.keeps = 0.5


def calls() -> tuple[Call, ...]:
    """Return the calls of the way without a fault."""
    return calls_of(ALONE, PlannedDisks)


def strike(at: int, fault: Kind) -> Cell:
    """Go the way with one fault."""
    return struck(ALONE, partial(PlannedDisks, at=at, fault=fault), at=at, fault=fault)


def _kind(name: str) -> str:
    """Return of which kind a file is."""
    if name.startswith("tmp."):
        return "temporary"
    return "receipt" if name.endswith(".receipt") else "data" if name else "directory"
