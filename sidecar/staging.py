"""Getting a verified copy of a shard for a restore, by the first way that leads to one. Blocks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from toprope.coordinator.wire import RestoreShard
from toprope.sidecar.effects import Stage
from toprope.sidecar.events import ShardStaged
from toprope.sidecar.memory import Memory, NoRoomError
from toprope.sidecar.ports import PeerError, PeersPort
from toprope.sidecar.values import Way
from toprope.store.checkpoint import read_index_at
from toprope.store.digest import digest, digest_of_file
from toprope.store.errors import CkptError, UnavailableError
from toprope.store.files import FileReader, fill_from_image, places
from toprope.store.manifest import Head, Index, Tensor
from toprope.store.names import Key
from toprope.store.objects.protocol import ObjectStore
from toprope.store.whole import DOCUMENT
from toprope.trainer_hooks.wire import ALL, DIGESTS, StagedShard

_ALL = frozenset({ALL})


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

    def stage(self, request: Stage) -> ShardStaged:
        """Return the shard, verified, or as much of it as is wanted.

        Raises:
            StagingError: it can't be had.
        """
        tried: list[str] = []
        again = False
        for way in request.ways:
            name = f"{way.tier} of {way.node}" if way.node else f"{way.tier} {way.key}"
            try:
                path, tensors = self._take(request, way)
            except _WayError as error:
                tried.append(f"{name}: {error}")
                again |= error.again
            else:
                staged = StagedShard(
                    rank=request.shard.rank,
                    path=str(path),
                    bytes=request.shard.bytes,
                    digest=request.shard.digest,
                    tier=way.tier,
                    node=way.node,
                )
                return ShardStaged(attempt_uid=request.attempt_uid, shard=staged, tensors=tensors)
        raise StagingError("; ".join(tried) or "nobody has it", again=again)

    def _take(self, request: Stage, way: Way) -> tuple[Path, frozenset[str]]:
        if way.kind == "here":
            return self._take_here(request, way), _ALL
        path = self.memory.staged(request.attempt_uid, request.shard.rank, request.part)
        try:
            if way.kind == "node":
                view = self.memory.fit(path, request.shard.bytes)
                self._from_node(request, way, view)
            else:
                index = self._index(request, way)
                if ALL not in request.tensors and index.head.digest:
                    some = path.with_suffix(".some")  # has room for these only, and is no file for a whole shard
                    self._some_from_store(index, request.tensors, some)
                    self._note_digests(index, some.with_suffix(DIGESTS))
                    return some, request.tensors
                view = self.memory.fit(path, request.shard.bytes)
                self._from_store(index, view)
        except (NoRoomError, OSError) as error:
            raise _WayError(f"no room to stage it: {error}") from error
        _check(digest(view), request.shard)
        return path, _ALL

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

    def _index(self, request: Stage, way: Way) -> Index:
        try:
            index = read_index_at(self.objects, Key(way.key))
        except CkptError as error:
            raise _WayError(str(error), again=isinstance(error, UnavailableError)) from error
        if index.bytes != request.shard.bytes:
            raise _WayError(f"its image has {index.bytes} bytes; expected {request.shard.bytes}")
        _check(index.digest, request.shard)
        return index

    def _from_store(self, index: Index, view: memoryview) -> None:
        try:
            fill_from_image(self.objects, index, view)
        except CkptError as error:
            raise _WayError(str(error), again=isinstance(error, UnavailableError)) from error

    def _some_from_store(self, index: Index, tensors: frozenset[str], path: Path) -> None:
        """Fetch header, document and these tensors to where they lie in the image, each checked by its own digest."""
        wanted = [
            (at, part)
            for at, part in places(index)
            if isinstance(part, Head) or part.name in tensors or part.name == DOCUMENT
        ]
        ranges = [(at, at + part.end - part.begin) for at, part in wanted]
        view = self.memory.fit_parts(path, index.bytes, ranges)
        files = [FileReader(self.objects, file) for file in index.files]
        try:
            for (begin, end), (_, part) in zip(ranges, wanted, strict=True):
                view[begin:end] = files[part.file].read(part.begin, part.end)
                if digest(view[begin:end]) != part.digest:
                    name = "its header" if isinstance(part, Head) else f"its tensor {part.name}"
                    raise _WayError(f"{name} has digest {digest(view[begin:end])}; expected {part.digest}")
        except CkptError as error:
            raise _WayError(str(error), again=isinstance(error, UnavailableError)) from error

    def _note_digests(self, index: Index, path: Path) -> None:
        """Write down what the digest of each tensor is, so that a trainer can compare what it does not fetch."""
        body = json.dumps({part.name: part.digest for _, part in places(index) if isinstance(part, Tensor)}).encode()
        self.memory.fit_parts(path, len(body), [(0, len(body))])[:] = body


def _check(found: str, shard: RestoreShard) -> None:
    if found != shard.digest:
        raise _WayError(f"its digest is {found}; expected {shard.digest}")
