"""Getting a verified copy of a shard for a restore, by the first way that leads to one. Blocks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from toprope.coordinator.wire import RestoreShard
from toprope.sidecar.effects import Stage
from toprope.sidecar.events import ShardStaged
from toprope.sidecar.filling import Filling
from toprope.sidecar.memory import Memory, NoRoomError
from toprope.sidecar.parts import Part, Parts, parts_in, runs, wanted
from toprope.sidecar.ports import PeerError, PeersPort
from toprope.sidecar.values import Way
from toprope.store.checkpoint.files import FileReader, places, write_image
from toprope.store.checkpoint.manifest import Index
from toprope.store.checkpoint.ready import read_index_at
from toprope.store.digest import digest, digest_of_file
from toprope.store.errors import CkptError, CorruptObjectError, UnavailableError
from toprope.store.names import Key
from toprope.store.objects.protocol import ObjectStore
from toprope.trainer_hooks.link.wire import ALL, DIGESTS, StagedShard

_ALL = frozenset({ALL})


class StagingError(Exception):
    """No way leads to the shard; the message lists each and what was wrong with it.

    ``again``: there is none just now, or one led nowhere only for want of an answer: one may lead there yet.
    """

    def __init__(self, text: str, *, again: bool) -> None:
        super().__init__(text)
        self.again = again


class _WayError(Exception):
    """This way does not lead to the shard; ``again``: not just now."""

    def __init__(self, text: str, *, again: bool = False) -> None:
        super().__init__(text)
        self.again = again


class _WrongBytesError(_WayError):
    """What came along this way is not what it should be."""


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
        again = not request.ways
        for way in request.ways:
            name = f"{way.tier} of {way.node}" if way.node else f"{way.tier} {way.key}"
            try:
                path, tensors = self._taken(request, way)
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
        raise StagingError("; ".join(tried) or "nobody has it just now", again=again)

    def _taken(self, request: Stage, way: Way) -> tuple[Path, frozenset[str]]:
        """Take it, from the object store once more if wrong bytes come.

        They may be wrong only as they came, and a checkpoint that is struck off for them is lost to the job.
        """
        try:
            return self._take(request, way)
        except _WrongBytesError:
            if way.kind != "object":
                raise
            return self._take(request, way)

    def _take(self, request: Stage, way: Way) -> tuple[Path, frozenset[str]]:
        if way.kind == "here":
            return self._take_here(request, way), _ALL
        path = self.memory.staged(request.attempt_uid, request.shard.rank, request.part)
        index = None if way.kind == "node" else self._index(request, way)
        try:
            if ALL not in request.tensors and (index is None or index.head.digest):
                some = path.with_suffix(".some")  # has room for these only, and is no file for a whole shard
                if index is None:
                    self._some_from_node(request, way, some)
                else:
                    self._some_from_store(index, request.tensors, some)
                return some, request.tensors
            with self.memory.filling(path, request.shard.bytes) as file:
                if index is None:
                    self._from_node(request, way, file.room(0, request.shard.bytes))
                else:
                    self._from_store(index, file)
        except (NoRoomError, OSError) as error:
            raise _WayError(f"no room to stage it: {error}") from error
        _check(digest(self.memory.view(path)), request.shard)
        return path, _ALL

    def _take_here(self, request: Stage, way: Way) -> Path:
        path, shard = Path(way.path), request.shard
        try:
            found = digest_of_file(path) if way.tier == "local" else digest(self.memory.view(path)[: shard.bytes])
            _check(found, shard)
        except OSError as error:
            raise _WayError(str(error), again=True) from error
        except _WayError:
            self.doubt(request, way)
            raise
        return path if path.exists() else self._named(request, path)

    def _named(self, request: Stage, path: Path) -> Path:
        """Return a copy of what is mapped here and has no name any more: a trainer can't open it."""
        copy, size = self.memory.staged(request.attempt_uid, request.shard.rank, request.part), request.shard.bytes
        try:
            view = self.memory.fit(copy, size)
        except (NoRoomError, OSError) as error:
            raise _WayError(f"{path} was removed, and there is no room for a copy: {error}") from error
        view[:] = self.memory.view(path)[:size]
        _check(digest(view), request.shard)
        return copy

    def _from_node(self, request: Stage, way: Way, view: memoryview) -> None:
        try:
            self.peers.receive(_url(request, way), view)
        except PeerError as error:
            raise _WayError(str(error), again=True) from error

    def _some_from_node(self, request: Stage, way: Way, path: Path) -> None:
        """Fetch the same from a peer, that has taken all digests anew for it: the whole is what the source says."""
        url = _url(request, way)

        def fetch(some: Sequence[Part], file: Filling) -> None:
            for begin, end in runs(some):
                self.peers.receive(url, file.room(begin, end), begin=begin)

        try:
            parts = self.peers.parts(url, of_bytes=request.shard.bytes)
            _check(parts.digest, request.shard)
            self._some(parts, request.tensors, path, fetch)
        except PeerError as error:
            raise _WayError(str(error), again=True) from error

    def _index(self, request: Stage, way: Way) -> Index:
        try:
            index = read_index_at(self.objects, Key(way.key))
        except CkptError as error:
            raise _of_store(error) from error
        if index.bytes != request.shard.bytes:
            raise _WayError(f"its image has {index.bytes} bytes; expected {request.shard.bytes}")
        _check(index.digest, request.shard)
        return index

    def _from_store(self, index: Index, file: Filling) -> None:
        try:
            write_image(self.objects, index, file.write)
        except CkptError as error:
            raise _of_store(error) from error

    def _some_from_store(self, index: Index, tensors: frozenset[str], path: Path) -> None:
        """Fetch header, document and these tensors to where they lie in the image, each checked by its own digest."""
        files = [FileReader(self.objects, file) for file in index.files]
        stored = dict(places(index))

        def fetch(some: Sequence[Part], file: Filling) -> None:
            for part in some:
                if part.begin < part.end:  # an empty one may begin where another does
                    lies = stored[part.begin]
                    file.write(part.begin, files[lies.file].read(lies.begin, lies.end))

        try:
            self._some(parts_in(index), tensors, path, fetch)
        except CkptError as error:
            raise _of_store(error) from error

    def _some(
        self, parts: Parts, tensors: frozenset[str], path: Path, fetch: Callable[[Sequence[Part], Filling], None]
    ) -> None:
        """Let these tensors be fetched, check each, and write down the digests of all, so that they can be compared."""
        some = wanted(parts, tensors)
        with self.memory.filling(path, parts.bytes, needed=sum(part.end - part.begin for part in some)) as file:
            fetch(some, file)
        view = self.memory.view(path)
        for part in some:
            found = digest(view[part.begin : part.end])
            if found != part.digest:
                name = f"its tensor {part.name}" if part.name else "its header"
                raise _WrongBytesError(f"{name} has digest {found}; expected {part.digest}")
        body = json.dumps({part.name: part.digest for part in parts.parts if part.name}).encode()
        with self.memory.filling(path.with_suffix(DIGESTS), len(body)) as file:
            file.write(0, body)


def _of_store(error: CkptError) -> _WayError:
    """Return what an error of the object store means for this way: a frame, a table or an index may have come wrong."""
    if isinstance(error, CorruptObjectError):
        return _WrongBytesError(str(error))
    return _WayError(str(error), again=isinstance(error, UnavailableError))


def _url(request: Stage, way: Way) -> str:
    place = f"{request.source_attempt_uid}/{request.step}/{request.shard.rank}"
    return f"{way.url}/v1/copies/{place}?tier={way.tier}"


def _check(found: str, shard: RestoreShard) -> None:
    if found != shard.digest:
        raise _WrongBytesError(f"its digest is {found}; expected {shard.digest}")
