"""Where the bytes of a snapshot are: the files of a store, packed or not, and the image that lies in them in parts."""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass

from toprope.store import digest
from toprope.store.checkpoint import codec
from toprope.store.checkpoint.manifest import File, Head, Index, Tensor
from toprope.store.names import Key
from toprope.store.objects.protocol import ObjectStore


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes of a file that are read at once: those of an object, or ``begin`` to ``end`` of a frame of it."""

    key: Key
    begin: int
    end: int
    frame: codec.Frame | None = None

    def read(self, store: ObjectStore) -> bytes:
        frame = self.frame
        if frame is None:
            return store.read(self.key, start=self.begin, length=self.end - self.begin)
        body = store.read(self.key, start=frame.packed_begin, length=frame.packed_end - frame.packed_begin)
        return codec.unpack_frame(body, size=frame.end - frame.begin, name=self.key)[self.begin : self.end]


class FileReader:
    """Reads a file by ranges of its own bytes, whatever it is packed with.

    Its methods raise as ``ObjectStore.read`` does, and CorruptObjectError when what is packed is damaged.
    """

    def __init__(self, store: ObjectStore, file: File) -> None:
        self._store = store
        self._file = file
        self._key = Key(file.key)
        self._frames: tuple[codec.Frame, ...] = ()

    def read(self, begin: int, end: int) -> bytes:
        """Return bytes ``begin`` to ``end``."""
        if self._file.packed is None:
            return self._stored(begin, end)
        return b"".join(piece.read(self._store) for piece in self.pieces(begin, end))

    def pieces(self, begin: int, end: int, *, at_once: int = digest.CHUNK_BYTES) -> Iterator[_Piece]:
        """Yield how bytes ``begin`` to ``end`` are read, in order, ``at_once`` of them or a frame at a time."""
        if self._file.packed is None:
            for start in range(begin, end, at_once):
                yield _Piece(self._key, start, min(start + at_once, end))
            return
        if not self._frames:
            self._frames = codec.frames_of(
                self._stored, packed_bytes=self._file.stored_bytes, raw_bytes=self._file.bytes, name=self._key
            )
        while begin < end:
            frame = self._frames[bisect_right(self._frames, begin, key=lambda frame: frame.begin) - 1]
            yield _Piece(self._key, begin - frame.begin, min(end, frame.end) - frame.begin, frame)
            begin = frame.end

    def _stored(self, begin: int, end: int) -> bytes:
        return self._store.read(self._key, start=begin, length=end - begin)


def image_parts(index: Index) -> Iterator[Head | Tensor]:
    """Yield what a rank's image consists of, in order."""
    yield index.head
    yield from index.tensors


def places(index: Index) -> Iterator[tuple[int, Head | Tensor]]:
    """Yield where in a rank's image each part of it begins, and the part."""
    at = 0
    for part in image_parts(index):
        yield at, part
        at += part.end - part.begin


def image_chunks(store: ObjectStore, index: Index) -> Iterator[bytes]:
    """Yield the bytes of a rank's image in order, some at a time, while the next ones are being read.

    Only with the digest that the index gives are they known to be those that were written. Raises as a ``FileReader``.
    """
    placed = _placed(store, index, at_once=digest.CHUNK_BYTES)
    if index.bytes <= digest.CHUNK_BYTES:  # what is small takes no threads
        yield from (piece.read(store) for _, piece in placed)
    else:
        yield from digest.read_ahead(lambda one: one[1].read(store), placed)


def write_image(store: ObjectStore, index: Index, write: Callable[[int, memoryview], None]) -> None:
    """Hand a rank's image to ``write``, piece by piece with its place there, in any order and from several threads.

    It comes in small pieces, each still in the cache when it is written: that costs less than to have new pages found,
    and cleared, for all that is read. What fails first ends the others at their next piece. Raises as a ``FileReader``
    does, and as ``write`` does.
    """
    share = -(-index.bytes // digest.READS_AT_ONCE)  # so that what is not large comes over as many connections too
    placed = _placed(store, index, at_once=min(digest.FILL_BYTES, max(digest.CHUNK_BYTES, share)))
    given_up = threading.Event()
    if index.bytes <= digest.CHUNK_BYTES:
        for at, piece in placed:
            _pass_on(store, at, piece, write, given_up)
        return
    with ThreadPoolExecutor(digest.READS_AT_ONCE, thread_name_prefix="fill") as pool:
        passing = [pool.submit(_pass_on, store, at, piece, write, given_up) for at, piece in placed]
        try:
            for one in as_completed(passing):
                one.result()
        finally:
            given_up.set()


def _pass_on(
    store: ObjectStore, at: int, piece: _Piece, write: Callable[[int, memoryview], None], given_up: threading.Event
) -> None:
    """Hand a piece to ``write`` as it comes, unless all is given up meanwhile."""
    if given_up.is_set():
        return
    if piece.frame is not None:
        write(at, memoryview(piece.read(store)))
        return
    with closing(store.stream(piece.key, start=piece.begin, length=piece.end - piece.begin)) as stream:
        for part in stream:
            if given_up.is_set():
                return
            write(at, part)
            at += len(part)


def _placed(store: ObjectStore, index: Index, *, at_once: int) -> list[tuple[int, _Piece]]:
    """Return the pieces of an image, in order, each with its place there."""
    readers = [FileReader(store, file) for file in index.files]
    pieces = [
        piece for number, begin, end in _runs(index) for piece in readers[number].pieces(begin, end, at_once=at_once)
    ]
    begins = itertools.accumulate((piece.end - piece.begin for piece in pieces), initial=0)
    return list(zip(begins, pieces, strict=False))


def _runs(index: Index) -> Iterator[tuple[int, int, int]]:
    """Yield what can be read in one go: file number, begin and end."""
    number, begin, end = index.head.file, index.head.begin, index.head.end
    for tensor in index.tensors:
        if (tensor.file, tensor.begin) != (number, end):
            yield number, begin, end
            number, begin = tensor.file, tensor.begin
        end = tensor.end
    yield number, begin, end
