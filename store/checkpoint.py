"""A READY checkpoint as the store holds it: its manifest, its indexes and its files, each checked as it is read.

Nothing is believed because of where it lies: a manifest must be the one that the log names and describe that READY,
an index the one that the manifest names, a file's bytes those of its index. Keys are computed, not taken from what was
read, as far as they can be.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from toprope.store.digest import Hasher, chunks_of_object
from toprope.store.errors import CkptError, CorruptObjectError, MissingObjectError
from toprope.store.fold import JobState
from toprope.store.manifest import (
    MAX_INDEX_BYTES,
    MAX_MANIFEST_BYTES,
    Index,
    Manifest,
    Shard,
    Tensor,
    decode,
)
from toprope.store.names import Key, index_key, manifest_key, shard_key
from toprope.store.objects.protocol import ObjectStore
from toprope.store.shard import LENGTH_BYTES, MAX_HEADER_BYTES, Header, header_length, identity_of, parse_header


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
    body = read_capped(store, key, limit=MAX_MANIFEST_BYTES)
    manifest = decode(body, Manifest, key=key, expected_sha256=ready.manifest_sha256)
    said = (manifest.job, manifest.job_uid, manifest.attempt, manifest.attempt_uid, manifest.step)
    expected = (state.job, state.job_uid, ready.attempt, ready.attempt_uid, ready.step)
    if said != expected:
        raise CorruptObjectError(f"{key}: it describes {said}, but READY {seq} is {expected}")
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
    key = _index_key(manifest, shard)
    if shard.index_key != key:
        raise CorruptObjectError(f"{key}: the manifest names {shard.index_key!r} instead")
    body = read_capped(store, key, limit=MAX_INDEX_BYTES)
    index = decode(body, Index, key=key, expected_sha256=shard.index_sha256)
    said = (index.job_uid, index.attempt, index.attempt_uid, index.step, index.rank, index.world)
    expected = (*_identity(manifest), shard.rank, manifest.world)
    if said != expected:
        raise CorruptObjectError(f"{key}: it describes {said}, expected {expected}")
    _check_files(index, shard, manifest, key=key)
    return index


def scan_shard(
    store: ObjectStore, index: Index, *, job: str, take: Callable[[bytes], None] | None = None
) -> Iterator[Damage]:
    """Read a rank's file from end to end, handing its bytes to ``take``, and yield what is wrong with it."""
    key = Key(index.files[0].key)
    try:
        yield from _scan(store, index, key, job=job, take=take)
    except (MissingObjectError, CorruptObjectError) as error:
        yield _damage(index, job, str(error))


def _scan(
    store: ObjectStore, index: Index, key: Key, *, job: str, take: Callable[[bytes], None] | None
) -> Iterator[Damage]:
    file = index.files[0]
    size = store.size(key)
    if size != file.bytes:
        cut = next((tensor for tensor in _in_order(index) if tensor.end > size), None)
        begin, end = sorted((size, file.bytes))
        yield _damage(index, job, f"the file has {size} bytes, expected {file.bytes}", cut, begin=begin, end=end)
        return
    scan = _Scan(index)
    for chunk in chunks_of_object(store, key):
        scan.update(chunk)
        if take is not None:
            take(chunk)
    yield from scan.damages(job)


def damage_of(error: CkptError, state: JobState, *, seq: int, rank: int | None = None) -> Damage:
    """Return what an error in reading a manifest or an index means for READY ``seq``."""
    ready = state.readies[seq]
    key, _, what = str(error).partition(": ")
    return Damage(job=state.job, key=key, what=what, step=ready.step, attempt=ready.attempt, rank=rank)


class _Scan:
    """The digests of a file and of its tensors, computed as its bytes come by, in order."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._whole = Hasher()
        self._head = bytearray()
        self._at = 0
        self._tensors = _in_order(index)
        begin = self._tensors[0].begin if self._tensors else index.files[0].bytes
        self._head_bytes = min(begin, LENGTH_BYTES + MAX_HEADER_BYTES)
        self._current = 0
        self._own = Hasher()
        self._damaged: list[tuple[Tensor, str]] = []

    def update(self, chunk: bytes) -> None:
        self._whole.update(chunk)
        self._head += chunk[: max(0, self._head_bytes - self._at)]
        end = self._at + len(chunk)
        with memoryview(chunk) as view:
            while self._current < len(self._tensors) and self._tensors[self._current].begin <= end:
                tensor = self._tensors[self._current]
                self._own.update(view[max(0, tensor.begin - self._at) : tensor.end - self._at])
                if tensor.end > end:
                    break
                self._finish(tensor)
        self._at = end

    def _finish(self, tensor: Tensor) -> None:
        found = self._own.hexdigest()
        if found != tensor.digest:
            self._damaged.append((tensor, found))
        self._own = Hasher()
        self._current += 1

    def damages(self, job: str) -> Iterator[Damage]:
        file = self._index.files[0]
        for tensor, found in self._damaged:
            what = f"digest {found}, expected {tensor.digest}"
            yield _damage(self._index, job, what, tensor, begin=tensor.begin, end=tensor.end)
        if self._damaged:
            return
        found = self._whole.hexdigest()
        if found != file.digest:
            what = f"the header was changed: the file has digest {found}, expected {file.digest}"
            yield _damage(self._index, job, what, begin=0, end=self._head_bytes)
        elif why := _disagreement(bytes(self._head), self._index):
            yield _damage(self._index, job, why, begin=0, end=self._head_bytes)


def _disagreement(head: bytes, index: Index) -> str | None:
    """Return how the header of a file whose digest is right differs from its index: a bug of whoever wrote them."""
    file = index.files[0]
    try:
        header_length(head, size=file.bytes, name=file.key)
        header = parse_header(head, size=file.bytes, name=file.key)
        identity = identity_of(header, name=file.key)
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
    return {(tensor.name, tensor.dtype, tensor.shape, tensor.begin, tensor.end) for tensor in index.tensors}


def _check_files(index: Index, shard: Shard, manifest: Manifest, *, key: Key) -> None:
    if len(index.files) != 1 or any(tensor.file != 0 for tensor in index.tensors):
        raise CorruptObjectError(f"{key}: it names {len(index.files)} files; this version reads one for each rank")
    file = index.files[0]
    stem = shard_key(
        manifest.job, attempt=index.attempt, step=index.step, rank=index.rank, world=index.world, nonce="0"
    ).removesuffix("0.safetensors")
    if re.fullmatch(re.escape(stem) + r"[0-9a-f]{1,128}\.safetensors", file.key) is None:
        raise CorruptObjectError(f"{key}: it names the file {file.key[:200]!r}, which is not one of that rank and step")
    if (file.bytes, file.digest) != (shard.bytes, shard.digest):
        raise CorruptObjectError(f"{key}: it gives its file another size or digest than the manifest does")
    at = 0
    for tensor in _in_order(index):
        if not at <= tensor.begin <= tensor.end <= file.bytes:
            raise CorruptObjectError(f"{key}: tensor {tensor.name[:80]!r} does not lie inside its file and apart")
        at = tensor.end


def _in_order(index: Index) -> list[Tensor]:
    return sorted(index.tensors, key=lambda tensor: (tensor.begin, tensor.end))


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


def _damage(
    index: Index, job: str, what: str, tensor: Tensor | None = None, *, begin: int | None = None, end: int | None = None
) -> Damage:
    return Damage(
        job=job,
        key=index.files[0].key,
        what=what.removeprefix(f"{index.files[0].key}: "),
        step=index.step,
        attempt=index.attempt,
        rank=index.rank,
        tensor=tensor.name if tensor else None,
        begin=begin,
        end=end,
    )


def read_capped(store: ObjectStore, key: Key, *, limit: int, uncached: bool = False) -> bytes:
    """Return an object, ``uncached`` as in ``ObjectStore.read``, unless it is longer than it may be.

    Raises:
        CorruptObjectError: it is longer than ``limit``.
        MissingObjectError: it is not there.
    """
    size = store.size(key)
    if size > limit:
        raise CorruptObjectError(f"{key}: {size} bytes; at most {limit}")
    return store.read(key, uncached=uncached)
