"""The bytes of whole tensors, read from the shards that hold their parts, each part checked against its digest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from toprope.store.checkpoint.files import FileReader
from toprope.store.checkpoint.manifest import Index, Manifest
from toprope.store.checkpoint.ready import damage_in, damage_of, read_index, read_manifest, scan_shard
from toprope.store.checkpoint.shard import ITEM_BYTES, LENGTH_BYTES, MAX_HEADER_BYTES, parse_header
from toprope.store.checkpoint.whole import Band, Part, Whole, bands, common, runs
from toprope.store.digest import Hasher
from toprope.store.errors import CorruptObjectError, MissingObjectError
from toprope.store.log.fold import JobState
from toprope.store.objects.protocol import ObjectStore

BAND_BYTES = 32 * 1024 * 1024
"""How much of a tensor is in memory at a time."""


def read_indexes(store: ObjectStore, state: JobState, seq: int) -> tuple[Manifest, tuple[Index, ...]]:
    """Return the manifest and the indexes of READY ``seq``.

    Raises:
        CorruptObjectError: one is damaged or missing; the message says whose.
    """
    rank: int | None = None
    try:
        manifest, _ = read_manifest(store, state, seq)
        indexes = []
        for shard in manifest.shards:
            rank = shard.rank
            indexes.append(read_index(store, manifest, shard))
    except (CorruptObjectError, MissingObjectError) as error:
        raise CorruptObjectError(str(damage_of(error, state, seq=seq, rank=rank))) from error
    return manifest, tuple(indexes)


def tensor_bytes(store: ObjectStore, whole: Whole, *, job: str, limit: int = BAND_BYTES) -> Iterator[bytes | bytearray]:
    """Yield the bytes of a tensor that its parts tile, in order, some at a time.

    Only when all have been taken without an error are they known to be those that were written.

    Raises:
        CorruptObjectError: a part is damaged or missing. It holds a ``Damage``, which names job, step, rank, tensor,
            file and place.
        UnavailableError: the store did not answer.
    """
    parts = [_Reading(store, part, job) for part in whole.parts]
    item_bytes = ITEM_BYTES[whole.dtype]
    for band in bands(whole.shape, item_bytes=item_bytes, limit=limit):
        yield _band(parts, band, item_bytes)
    for part in parts:
        part.finish()


def _band(parts: list[_Reading], band: Band, item_bytes: int) -> bytes | bytearray:
    blocks = [(part, block) for part in parts if (block := common(part.part.box, band.box)) is not None]
    if len(blocks) == 1 or not band.box:
        return blocks[0][0].read(band.end - band.begin)
    filled = bytearray(band.end - band.begin)
    for part, block in blocks:
        elements = [(begin * item_bytes, count * item_bytes) for begin, count in runs(block, band.box)]
        body = memoryview(part.read(sum(count for _, count in elements)))
        at = 0
        for begin, count in elements:
            filled[begin : begin + count] = body[at : at + count]
            at += count
    return filled


@dataclass(slots=True)
class _Reading:
    """A part that is read from its first byte to its last, whatever order its bytes have in the whole."""

    store: ObjectStore
    part: Part
    job: str
    at: int = 0
    hasher: Hasher = field(default_factory=Hasher)
    reader: FileReader = field(init=False)

    def __post_init__(self) -> None:
        """Begin with the file that has it."""
        self.reader = FileReader(self.store, self.part.index.files[self.part.tensor.file])

    def read(self, count: int) -> bytes:
        """Return its next bytes."""
        try:
            begin = self.part.tensor.begin + self.at
            body = self.reader.read(begin, begin + count)
        except (CorruptObjectError, MissingObjectError) as error:
            raise self._damaged(str(error)) from error
        self.at += count
        self.hasher.update(body)
        return body

    def finish(self) -> None:
        """Check that what was read is what was written."""
        found = self.hasher.hexdigest()
        if found != self.part.tensor.digest:
            raise self._damaged(f"digest {found}, expected {self.part.tensor.digest}")

    def _damaged(self, what: str) -> CorruptObjectError:
        return CorruptObjectError(damage_in(self.part.index, self.job, what, self.part.tensor))


def shard_metadata(store: ObjectStore, index: Index, *, job: str) -> dict[str, str]:
    """Return the metadata of a rank's image. All of it is read, since its digest alone may vouch for them.

    Raises:
        CorruptObjectError: the image is damaged; the message names what of it.
    """
    head = bytearray()
    room = LENGTH_BYTES + MAX_HEADER_BYTES

    def take(chunk: bytes) -> None:
        head.extend(chunk[: room - len(head)])

    for damage in scan_shard(store, index, job=job, take=take):
        raise CorruptObjectError(str(damage))
    return parse_header(bytes(head), size=index.bytes, name=index.files[0].key).metadata
