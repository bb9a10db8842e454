"""Getting a verified copy of a shard for a restore, by the first way that leads to one. Blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from toprope.coordinator.wire import RestoreShard
from toprope.sidecar.effects import Stage
from toprope.sidecar.memory import Memory, NoRoomError
from toprope.sidecar.ports import PeerError, PeersPort
from toprope.sidecar.values import Way
from toprope.store.checkpoint import read_index_at
from toprope.store.digest import digest, digest_of_file
from toprope.store.errors import CkptError, UnavailableError
from toprope.store.files import fill_from_image
from toprope.store.names import Key
from toprope.store.objects.protocol import ObjectStore
from toprope.trainer_hooks.wire import StagedShard


class StagingError(Exception):
    """No way leads to the shard; the message lists each and what was wrong with it.

    ``again``: one led nowhere only for want of an answer, and may lead there yet.
    """

    def __init__(self, text: str, *, again: bool) -> None:
        super().__init__(text)
        self.again = again


class _WayError(Exception):
    """This way does not lead to the shard; ``again``: not just now."""

    def __init__(self, text: str, *, again: bool = False) -> None:
        super().__init__(text)
        self.again = again


@dataclass(frozen=True, slots=True, kw_only=True)
class Stager:
    """What staging needs. ``doubt`` is told of a copy of this node that was found to be wrong."""

    memory: Memory
    peers: PeersPort
    objects: ObjectStore
    doubt: Callable[[Stage, Way], None]

    def stage(self, request: Stage) -> StagedShard:
        """Return the shard, verified.

        Raises:
            StagingError: it can't be had.
        """
        tried: list[str] = []
        again = False
        for way in request.ways:
            name = f"{way.tier} of {way.node}" if way.node else f"{way.tier} {way.key}"
            try:
                path = self._take(request, way)
            except _WayError as error:
                tried.append(f"{name}: {error}")
                again |= error.again
            else:
                return StagedShard(
                    rank=request.shard.rank,
                    path=str(path),
                    bytes=request.shard.bytes,
                    digest=request.shard.digest,
                    tier=way.tier,
                    node=way.node,
                )
        raise StagingError("; ".join(tried) or "nobody has it", again=again)

    def _take(self, request: Stage, way: Way) -> Path:
        if way.kind == "here":
            return self._take_here(request, way)
        path = self.memory.staged(request.attempt_uid, request.shard.rank)
        try:
            view = self.memory.fit(path, request.shard.bytes)
        except (NoRoomError, OSError) as error:
            raise _WayError(f"no room to stage it: {error}") from error
        if way.kind == "node":
            self._from_node(request, way, view)
        else:
            self._from_store(way, view)
        _check(digest(view), request.shard)
        return path

    def _take_here(self, request: Stage, way: Way) -> Path:
        path, shard = Path(way.path), request.shard
        try:
            found = digest_of_file(path) if way.tier == "local" else digest(self.memory.view(path)[: shard.bytes])
            _check(found, shard)
        except OSError as error:
            raise _WayError(str(error)) from error
        except _WayError:
            self.doubt(request, way)
            raise
        return path

    def _from_node(self, request: Stage, way: Way, view: memoryview) -> None:
        place = f"{request.source_attempt_uid}/{request.step}/{request.shard.rank}"
        try:
            self.peers.receive(f"{way.url}/v1/copies/{place}?tier={way.tier}", view)
        except PeerError as error:
            raise _WayError(str(error), again=True) from error

    def _from_store(self, way: Way, view: memoryview) -> None:
        try:
            index = read_index_at(self.objects, Key(way.key))
            if index.bytes != len(view):
                raise _WayError(f"its image has {index.bytes} bytes; expected {len(view)}")
            fill_from_image(self.objects, index, view)
        except CkptError as error:
            raise _WayError(str(error), again=isinstance(error, UnavailableError)) from error


def _check(found: str, shard: RestoreShard) -> None:
    if found != shard.digest:
        raise _WayError(f"its digest is {found}; expected {shard.digest}")
