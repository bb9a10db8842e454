"""A READY checkpoint as the store holds it: its manifest, its indexes and its files, each checked as it is read.

Nothing is believed because of where it lies: a manifest must be the one that the log names and describe that READY,
an index the one that the manifest names, a file's bytes those of its index. Keys are computed, not taken from what was
read, as far as they can be.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from toprope.store.checkpoint.codec import MAX_RATIO
from toprope.store.checkpoint.files import image_chunks, image_parts
from toprope.store.checkpoint.manifest import (
    MANIFEST_BYTES_A_RANK,
    MAX_FILES,
    MAX_INDEX_BYTES,
    MAX_MANIFEST_BYTES,
    File,
    Head,
    Index,
    Manifest,
    Shard,
    Tensor,
    decode,
)
from toprope.store.checkpoint.shard import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    Header,
    header_length,
    identity_of,
    parse_header,
)
from toprope.store.digest import Hasher, digest_of_object
from toprope.store.errors import CkptError, CorruptObjectError, MissingObjectError, UnseenObjectError
from toprope.store.log.fold import JobState
from toprope.store.names import Key, index_key, is_shard_key, manifest_key, shard_key
from toprope.store.objects.protocol import ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """Something that is not as it was written: where it is, as exactly as the digests can tell, and what is wrong."""

    job: str
    key: str
    what: str
    step: int | None = None
    attempt: int | None = None
    rank: int | None = None
    tensor: str | None = None
    begin: int | None = None
    end: int | None = None
    unseen: bool = False
    """Whether all that is wrong is that it is not to be seen, on a file system that may show it later."""

    def __str__(self) -> str:
        where = [f"job {self.job}"]
        where += [f"{name} {value}" for name, value in (("step", self.step), ("rank", self.rank)) if value is not None]
        if self.tensor is not None:
            where.append(f"tensor {self.tensor}")
        place = self.key if self.begin is None else f"{self.key} bytes {self.begin} to {self.end}"
        return f"{', '.join(where)}: {self.what} ({place})"


def read_manifest(store: ObjectStore, state: JobState, seq: int) -> tuple[Manifest, bytes]:
    """Return the manifest of READY ``seq``, and its bytes.

    Raises:
        CorruptObjectError: its bytes are not those that the log names, or it does not describe that READY.
        MissingObjectError: it is not there.
    """
    ready = state.readies[seq]
    key = manifest_key(state.job, attempt=ready.attempt, step=ready.step, sha256=ready.manifest_sha256)
    world = state.attempts[ready.attempt - 1].world_size
    limit = min(MAX_MANIFEST_BYTES, MANIFEST_BYTES_A_RANK * (world + 4))
    body = read_capped(store, key, limit=limit)
    manifest = decode(body, Manifest, key=key, expected_sha256=ready.manifest_sha256)
    said = (manifest.job, manifest.job_uid, manifest.attempt, manifest.attempt_uid, manifest.step)
    expected = (state.job, state.job_uid, ready.attempt, ready.attempt_uid, ready.step)
    if said != expected:
        raise CorruptObjectError(f"{key}: it describes {said}, but READY {seq} is {expected}")
    if manifest.world != world:
        raise CorruptObjectError(f"{key}: it is of {manifest.world} ranks, but attempt {ready.attempt} has {world}")
    if [shard.rank for shard in manifest.shards] != list(range(manifest.world)):
        raise CorruptObjectError(f"{key}: it does not name each of the {manifest.world} ranks once, in order")
    if sum(shard.bytes for shard in manifest.shards) != ready.bytes:
        raise CorruptObjectError(f"{key}: its shards do not add up to the {ready.bytes} bytes of READY {seq}")
    return manifest, body


def read_index(store: ObjectStore, manifest: Manifest, shard: Shard) -> Index:
    """Return the index of a rank.

    Raises:
        CorruptObjectError: its bytes are not those that the manifest names, or it does not describe that rank.
        MissingObjectError: it is not there.
    """
    return index_of_body(index_body(store, manifest, shard), manifest, shard)


def index_body(store: ObjectStore, manifest: Manifest, shard: Shard) -> bytes:
    """Return the bytes of the index of a rank as they lie there, unchecked; raises as ``read_index``."""
    return read_capped(store, _index_key(manifest, shard), limit=MAX_INDEX_BYTES)


def index_of_body(body: bytes, manifest: Manifest, shard: Shard) -> Index:
    """Return the index of a rank that has these bytes; raises as ``read_index``."""
    key = _index_key(manifest, shard)
    if shard.index_key != key:
        raise CorruptObjectError(f"{key}: the manifest names {shard.index_key!r} instead")
    index = decode(body, Index, key=key, expected_sha256=shard.index_sha256)
    said = (index.job_uid, index.attempt, index.attempt_uid, index.step, index.rank, index.world)
    expected = (*_identity(manifest), shard.rank, manifest.world)
    if said != expected:
        raise CorruptObjectError(f"{key}: it describes {said}, expected {expected}")
    _check_files(index, shard, manifest, key=key)
    return index


def read_index_at(store: ObjectStore, key: Key) -> Index:
    """Return the index that a key names, for whoever knows which rank's it is and checks its image afterwards.

    Raises:
        CorruptObjectError: its bytes are not those that its name has the SHA-256 of, or it is no index.
        MissingObjectError: it is not there.
    """
    named = re.search(r"-([0-9a-f]{64})\.index\.json$", key)
    if named is None:
        raise CorruptObjectError(f"{key}: not the key of an index")
    index = decode(read_capped(store, key, limit=MAX_INDEX_BYTES), Index, key=key, expected_sha256=named[1])
    check_places(index, job=key.partition("/")[0], key=key)
    return index


def scan_shard(
    store: ObjectStore, index: Index, *, job: str, take: Callable[[bytes], None] | None = None
) -> Iterator[Damage]:
    """Read a rank's image from end to end, handing its bytes to ``take``, and yield what is wrong with it."""
    damages = [damage for file in index.files for damage in length_damage(store, index, file, job=job)]
    if damages:
        yield from damages
        return
    scan = _Scan(index, job)
    try:
        for chunk in image_chunks(store, index):
            scan.update(chunk)
            if take is not None:
                take(chunk)
    except (MissingObjectError, CorruptObjectError) as error:
        named = str(error).partition(": ")[0]
        number = next((at for at, file in enumerate(index.files) if file.key == named), scan.part.file)
        yield damage_in(index, job, error, scan.part if scan.part.file == number else None, number=number)
        return
    yield from scan.damages()


def length_damage(store: ObjectStore, index: Index, file: File, *, job: str) -> Iterator[Damage]:
    """Yield what is wrong with the length of a file of a rank, without reading it."""
    number = index.files.index(file)
    try:
        size = store.size(Key(file.key))
    except (MissingObjectError, CorruptObjectError) as error:
        yield damage_in(index, job, error, number=number)
        return
    if size != file.stored_bytes:
        yield length_damaged(index, file, size, job=job)


def length_damaged(index: Index, file: File, size: int, *, job: str) -> Damage:
    """Return what it means that a file of a rank has ``size`` bytes, which are not those of its index."""
    number = index.files.index(file)
    parts = (part for part in index.tensors if part.file == number and part.end > size)
    cut = None if file.packed is not None else min(parts, key=lambda part: part.begin, default=None)
    begin, end = sorted((size, file.stored_bytes))
    what = f"the file has {size} bytes, expected {file.stored_bytes}"
    return damage_in(index, job, what, cut, number=number, begin=begin, end=end)


def scan_object(store: ObjectStore, index: Index, file: File, *, job: str) -> Iterator[Damage]:
    """Read the object of a file from end to end, what nothing names any more included, and yield what is wrong."""
    number = index.files.index(file)
    try:
        found = digest_of_object(store, Key(file.key))
    except (MissingObjectError, CorruptObjectError) as error:
        yield damage_in(index, job, error, number=number)
        return
    if found != file.stored_digest:
        what = f"outside of the tensors that this step needs: digest {found}, expected {file.stored_digest}"
        yield damage_in(index, job, what, number=number, begin=0, end=file.stored_bytes)


def damage_of(error: CkptError, state: JobState, *, seq: int, rank: int | None = None) -> Damage:
    """Return what an error in reading a manifest or an index means for READY ``seq``."""
    ready = state.readies[seq]
    key, _, what = str(error).partition(": ")
    unseen = isinstance(error, UnseenObjectError)
    return Damage(job=state.job, key=key, what=what, step=ready.step, attempt=ready.attempt, rank=rank, unseen=unseen)


class _Scan:
    """The digests of an image and of its parts, computed as its bytes come by, in order."""

    def __init__(self, index: Index, job: str) -> None:
        self._index = index
        self._job = job
        self._whole = Hasher()
        self._head = bytearray()
        self._parts = list(image_parts(index))
        self._found: list[str] = []
        self._own = Hasher()
        self._missing = self._bytes_of(0)

    @property
    def part(self) -> Head | Tensor:
        """The part that is being read."""
        return self._parts[min(len(self._found), len(self._parts) - 1)]

    def _bytes_of(self, number: int) -> int:
        return self._parts[number].end - self._parts[number].begin if number < len(self._parts) else 0

    def update(self, chunk: bytes) -> None:
        self._whole.update(chunk)
        if not self._found:
            self._head += chunk[: self._missing]
        with memoryview(chunk) as view:
            at = 0
            while len(self._found) < len(self._parts) and (self._missing <= len(view) - at):
                self._own.update(view[at : at + self._missing])
                at += self._missing
                self._found.append(self._own.hexdigest())
                self._own = Hasher()
                self._missing = self._bytes_of(len(self._found))
            self._own.update(view[at:])
            self._missing -= len(view) - at

    def damages(self) -> Iterator[Damage]:
        index, head, damaged = self._index, self._index.head, False
        for part, found in zip(self._parts, self._found, strict=True):
            if part.digest and found != part.digest:
                damaged = True
                what = "" if isinstance(part, Tensor) else "the header was changed: "
                yield damage_in(index, self._job, f"{what}digest {found}, expected {part.digest}", part)
        if damaged:
            return
        found = self._whole.hexdigest()
        if found != index.digest:
            what = f"the header was changed: the image has digest {found}, expected {index.digest}"
            yield damage_in(index, self._job, what, head)
        elif why := _disagreement(bytes(self._head), index):
            yield damage_in(index, self._job, why, head)


def _disagreement(head: bytes, index: Index) -> str | None:
    """Return how the header of an image whose digest is right differs from its index: a bug of whoever wrote them."""
    name = index.files[index.head.file].key
    try:
        header_length(head, size=index.bytes, name=name)
        header = parse_header(head, size=index.bytes, name=name)
        identity = identity_of(header, name=name)
    except CorruptObjectError as error:
        return str(error).partition(": ")[2]
    said = (identity.job_uid, identity.attempt, identity.attempt_uid, identity.step, identity.rank, identity.world)
    expected = (index.job_uid, index.attempt, index.attempt_uid, index.step, index.rank, index.world)
    if said != expected:
        return f"the header says {said}, the index {expected}"
    return None if _places(header) == _tensors(index) else "header and index name different tensors"


def _places(header: Header) -> set[tuple[str, str, tuple[int, ...], int, int]]:
    return {(extent.name, extent.dtype, extent.shape, extent.begin, extent.end) for extent in header.extents}


def _tensors(index: Index) -> set[tuple[str, str, tuple[int, ...], int, int]]:
    """Return the tensors of an index with the places that they have in its image."""
    found = set()
    at = index.head.end - index.head.begin
    for tensor in index.tensors:
        end = at + tensor.end - tensor.begin
        found.add((tensor.name, tensor.dtype, tensor.shape, at, end))
        at = end
    return found


def _check_files(index: Index, shard: Shard, manifest: Manifest, *, key: Key) -> None:
    if (index.bytes, index.digest) != (shard.bytes, shard.digest):
        raise CorruptObjectError(f"{key}: it gives its image another size or digest than the manifest does")
    check_places(index, job=manifest.job, key=key)


def check_places(index: Index, *, job: str, key: Key) -> None:
    """Check that an index names files of this job, the first one its own, in which all that it names can lie.

    Raises:
        CorruptObjectError: it does not.
    """
    files = index.files
    if not 1 <= len(files) <= MAX_FILES or len({file.key for file in files}) != len(files):
        raise CorruptObjectError(f"{key}: it names {len(files)} files; expected 1 to {MAX_FILES}, each once")
    stem = shard_key(
        job, attempt=index.attempt, step=index.step, rank=index.rank, world=index.world, nonce="0"
    ).removesuffix("0.safetensors")
    if not files[0].key.startswith(stem):
        raise CorruptObjectError(
            f"{key}: it names the file {files[0].key[:200]!r}, which is not one of that rank and step"
        )
    for file in files:
        if not is_shard_key(job, file.key, packed=file.packed is not None):
            raise CorruptObjectError(f"{key}: it names the file {file.key[:200]!r}, which is not one of a shard")
        if file.packed is not None and file.bytes > file.packed.bytes * MAX_RATIO:
            raise CorruptObjectError(f"{key}: {file.packed.bytes} bytes can't be {file.bytes}, packed ({file.key})")
    _check_parts(index, key=key)


def _check_parts(index: Index, *, key: Key) -> None:
    at = [0] * len(index.files)
    for part in sorted(image_parts(index), key=lambda part: (part.file, part.begin, part.end)):
        name = "its header" if isinstance(part, Head) else f"tensor {part.name[:80]!r}"
        if not 0 <= part.file < len(at):
            raise CorruptObjectError(f"{key}: {name} lies in file {part.file} of {len(at)}")
        if not at[part.file] <= part.begin <= part.end <= index.files[part.file].bytes:
            raise CorruptObjectError(f"{key}: {name} does not lie inside its file and apart")
        at[part.file] = part.end
    if (length := index.head.end - index.head.begin) > LENGTH_BYTES + MAX_HEADER_BYTES:
        raise CorruptObjectError(f"{key}: its header has {length} bytes; at most {LENGTH_BYTES + MAX_HEADER_BYTES}")
    total = sum(part.end - part.begin for part in image_parts(index))
    if total != index.bytes:
        raise CorruptObjectError(f"{key}: what it names has {total} bytes, and its image {index.bytes}")


def _identity(manifest: Manifest) -> tuple[str, int, str, int]:
    return manifest.job_uid, manifest.attempt, manifest.attempt_uid, manifest.step


def _index_key(manifest: Manifest, shard: Shard) -> Key:
    return index_key(
        manifest.job,
        attempt=manifest.attempt,
        step=manifest.step,
        rank=shard.rank,
        world=manifest.world,
        sha256=shard.index_sha256,
    )


def damage_in(  # noqa: PLR0913 - what a damage consists of
    index: Index,
    job: str,
    what: str | CkptError,
    part: Head | Tensor | None = None,
    *,
    number: int = 0,
    begin: int | None = None,
    end: int | None = None,
) -> Damage:
    """Return what is wrong with a part of a rank's image, or else with its file of this number."""
    key = index.files[number if part is None else part.file].key
    if part is not None and begin is None:
        begin, end = part.begin, part.end
    return Damage(
        job=job,
        key=key,
        what=str(what).removeprefix(f"{key}: "),
        unseen=isinstance(what, UnseenObjectError),
        step=index.step,
        attempt=index.attempt,
        rank=index.rank,
        tensor=part.name if isinstance(part, Tensor) else None,
        begin=begin,
        end=end,
    )


def read_capped(store: ObjectStore, key: Key, *, limit: int) -> bytes:
    """Return an object, unless it is longer than it may be.

    Raises:
        CorruptObjectError: it is longer than ``limit``.
        MissingObjectError: it is not there.
    """
    size = store.size(key)
    if size > limit:
        raise too_long(key, size, limit=limit)
    return store.read(key)


def too_long(key: Key, size: int, *, limit: int) -> CorruptObjectError:
    """Return the error for an object that has more bytes than it may have."""
    return CorruptObjectError(f"{key}: {size} bytes; at most {limit}")
