"""Receiving peer copies into spare files, and believing only what was stored. Blocks; used by several threads.

Of a copy that is like the one in the rank's other spare only the tensors whose digest has changed travel, and of one
that was begun before only those that are not here yet: the owner is asked for the digests first. While nearly all
tensors change from step to step it is seldom asked, for it would take them for nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from toprope.sidecar.effects import Pull
from toprope.sidecar.memory import DroppedError, Memory
from toprope.sidecar.parts import Part, Parts, parts_of, runs
from toprope.sidecar.ports import PeerError, Ports
from toprope.store.digest import digest
from toprope.store.errors import CorruptObjectError
from toprope.trainer_hooks.link.slot import SlotState

WORTH_ASKING = 0.9
"""If more than this share of a copy had to travel, the digests were of no use."""
ASK_AGAIN_AFTER = 8
GAP_BYTES = 1024 * 1024
"""So little between two ranges is received with them: a request of its own would cost more."""


class WrongBytesError(Exception):
    """What was stored, or what the owner has, has another digest than the owner gave: ``found``."""

    def __init__(self, text: str, *, found: str) -> None:
        super().__init__(text)
        self.found = found


class Puller:
    """Pulls, and remembers what it needs to pull less the next time."""

    def __init__(self, memory: Memory, ports: Ports) -> None:
        self._memory = memory
        self._ports = ports
        self._parts: dict[Path, Parts] = {}
        self._begun: dict[Path, str] = {}
        self._useless: dict[int, int] = {}
        self._mutex = threading.Lock()

    def pull(self, request: Pull) -> int:
        """Receive a shard into its spare, hash what was stored, write the spare's page; return the bytes received.

        Until then the page speaks of what the spare held before; after a crash its digest will not fit.

        Raises:
            PeerError: the bytes can't be had.
            WrongBytesError: they are not those of the shard; the spare is empty.
            NoRoomError: there is no room for the spare.
        """
        shard = request.shard
        paths = self._memory.spare(shard.rank, request.spare)
        view = self._memory.fit(paths.data, shard.bytes)
        with self._mutex:
            begun = self._begun.get(paths.data) == shard.digest
            self._begun[paths.data] = shard.digest
            self._parts.pop(paths.data, None)
        received, parts = self._receive(request, view, begun=begun)
        found = digest(view)
        if found != shard.digest:
            with self._mutex:
                del self._begun[paths.data]
                self._parts.clear()
            if received < len(view):
                raise PeerError(f"{request.url}: what was not received anew was damaged here: digest {found}")
            raise WrongBytesError(f"{request.url}: what came has digest {found}; expected {shard.digest}", found=found)
        try:
            self._memory.check_header(view, shard)
        except DroppedError as error:
            raise PeerError(f"{request.url}: {error}") from error
        self._ports.pages.write(paths.page, shard.page())
        with self._mutex:
            del self._begun[paths.data]
            if parts is not None:
                self._parts[paths.data] = parts
        return received

    def _receive(self, request: Pull, view: memoryview, *, begun: bool) -> tuple[int, Parts | None]:
        """Fill the spare with as few bytes of the owner as is known how; return how many, and what it consists of."""
        shard, peers = request.shard, self._ports.peers
        url = f"{request.url}/v1/copies/{shard.attempt_uid}/{shard.step}/{shard.rank}?tier=memory"
        base = self._base(request)
        if base is None and not begun:
            peers.receive(url, view, paced=True)
            return len(view), None
        parts = peers.parts(url, of_bytes=shard.bytes)
        if parts.digest != shard.digest:
            raise WrongBytesError(f"{request.url}: it has digest {parts.digest} by now", found=parts.digest)
        known: dict[str, tuple[Part, memoryview]] = {}
        if base is not None:
            known = {part.name: (part, base[1][part.begin : part.end]) for part in base[0].parts}
        missing = [part for part in parts.parts if not _filled(view, part, known.get(part.name), begun=begun)]
        received = 0
        for begin, end in _joined(runs(missing)):
            peers.receive(url, view[begin:end], begin=begin, paced=True)
            received += end - begin
        with self._mutex:
            self._useless[shard.rank] = ASK_AGAIN_AFTER if received > WORTH_ASKING * len(view) else 0
        return received, parts

    def _base(self, request: Pull) -> tuple[Parts, memoryview] | None:
        """Return what the rank's other spare holds, if that is worth a comparison."""
        rank, number = request.shard.rank, 1 - request.spare
        with self._mutex:
            if self._useless.get(rank, 0) > 0:
                self._useless[rank] -= 1
                return None
        paths = self._memory.spare(rank, number)
        try:
            page = self._ports.pages.read(paths.page)
            view = self._memory.view(paths.data)[: page.bytes]
            if page.state is not SlotState.HASHED or len(view) != page.bytes:
                return None
            with self._mutex:
                parts = self._parts.get(paths.data)
            if parts is None or parts.digest != page.digest:
                parts = parts_of(view, name=paths.data.name)
        except (OSError, CorruptObjectError):
            return None
        with self._mutex:
            self._parts[paths.data] = parts
        return parts, view


def _filled(view: memoryview, part: Part, base: tuple[Part, memoryview] | None, *, begun: bool) -> bool:
    """Say whether a part has its bytes: copied from the base, or there since a pull that was begun before."""
    into = view[part.begin : part.end]
    if base is not None and base[0].digest == part.digest and len(base[1]) == len(into):
        into[:] = base[1]
        return True
    return begun and digest(into) == part.digest


def _joined(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the ranges, those with little between them as one."""
    whole: tuple[int, int] | None = None
    for begin, end in ranges:
        if whole is not None and begin - whole[1] > GAP_BYTES:
            yield whole
            whole = None
        whole = (begin if whole is None else whole[0], end)
    if whole is not None:
        yield whole
