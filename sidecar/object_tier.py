"""The object tier: what is new of a shard and its index, as two write-once objects; the receipt comes back. Blocks."""

from __future__ import annotations

import contextlib
import logging
import threading
import time

import msgspec

from toprope.coordinator.wire import Copy, ReadBack, ReadBackTask
from toprope.sidecar.packing import Codec, Packer, packed_gently
from toprope.sidecar.values import Shard
from toprope.store import manifest
from toprope.store.checkpoint import read_index, read_manifest
from toprope.store.digest import digest as digest_of_bytes
from toprope.store.digest import digest_of_object
from toprope.store.errors import AlreadyExistsError, CkptError, CorruptObjectError, LogCorruptError, MissingObjectError
from toprope.store.fold import JobState
from toprope.store.incremental import Base, PartFile, checked_digest, index_of_parts, kept_tensors, part_file
from toprope.store.log import glance
from toprope.store.manifest import File, Index, Packed
from toprope.store.names import Key, index_key, shard_key
from toprope.store.objects.protocol import ObjectStore
from toprope.store.shard import HashedImage, hash_image, index_of
from toprope.store.spool import mapped, spool

SMALL_BYTES = 32 * 1024 * 1024
"""A part file of so many bytes is put together in memory, a larger one in a spool."""

log = logging.getLogger("toprope.sidecar")


class DamagedError(Exception):
    """The image to store is not the one that was hashed."""


class ObjectTier:
    """Stores the shards of one job. Its calls block, and may come from several threads."""

    def __init__(self, store: ObjectStore, job: str, *, codec: Codec = "auto") -> None:
        self._store = store
        self._job = job
        self._packer = Packer(codec)
        self._state = JobState(job=job)
        self._reason = ""
        self._mutex = threading.Lock()

    def put(self, shard: Shard, image: memoryview, *, nonce: str) -> Copy:
        """Write what is new of the image, and its index, and return the receipt.

        Raises:
            DamagedError: the image has another digest, or changed meanwhile; nothing is named by a receipt.
            UnavailableError: it may or may not have been written; try again under a new nonce.
        """
        hashed = hash_image(image, name=f"the slot of rank {shard.rank}")
        if hashed.digest != shard.digest:
            raise DamagedError(f"the slot's digest is {hashed.digest} and was {shard.digest} when it was hashed")
        whole = index_of(hashed, key=self._key(shard, nonce, packed=False))
        index = self._put_part(shard, image, hashed, whole, nonce=nonce)
        if index is None:
            file = self._write(shard, image, whole.digest, nonce=nonce)
            index = msgspec.structs.replace(whole, files=(file,))
        return self._write_index(shard, index, nonce=nonce)

    def _put_part(
        self, shard: Shard, image: memoryview, hashed: HashedImage, whole: Index, *, nonce: str
    ) -> Index | None:
        """Write a file of what is new of the image, and return the index; None if it is to be stored whole."""
        base = self._base_of(shard)
        kept = {} if base is None else kept_tensors(whole, base.index)
        if base is None or not kept:
            return None
        part = part_file(image, hashed, kept=kept)
        with contextlib.ExitStack() as room:
            body = _put_together(part, room)
            if body is None:
                return None
            digest = checked_digest(body, part, whole)
            if digest is None:
                raise DamagedError("the slot changed while what is new of it was put together")
            file = self._write(shard, body, digest, nonce=nonce)
            del body
        return index_of_parts(whole, base, kept=kept, part=part, file=file)

    def _key(self, shard: Shard, nonce: str, *, packed: bool) -> Key:
        return shard_key(
            self._job,
            attempt=shard.attempt,
            step=shard.step,
            rank=shard.rank,
            world=shard.world,
            nonce=nonce,
            packed=packed,
        )

    def _write(self, shard: Shard, raw: memoryview, digest: str, *, nonce: str) -> File:
        """Write a file, packed if that pays."""
        decision = self._packer.decide(raw)
        if decision.reason != self._reason:
            self._reason = decision.reason
            log.info("uploads are %s: %s", "packed" if decision.pack else "not packed", decision.reason)
        if not decision.pack:
            self._upload(self._key(shard, nonce, packed=False), raw)
            return File(key=self._key(shard, nonce, packed=False), bytes=len(raw), digest=digest)
        packed = packed_gently(raw)
        if packed.raw_digest != digest:
            raise DamagedError(f"what was packed has digest {packed.raw_digest}; expected {digest}")
        key = self._key(shard, nonce, packed=True)
        stored = Packed(codec="zstd", bytes=len(packed.body), digest=digest_of_bytes(packed.body))
        self._upload(key, memoryview(packed.body))
        return File(key=key, bytes=len(raw), digest=digest, packed=stored)

    def _upload(self, key: Key, body: memoryview) -> None:
        began_s = time.perf_counter()
        self._store.create(key, body)
        self._packer.uploaded(len(body), seconds=time.perf_counter() - began_s)

    def _write_index(self, shard: Shard, index: Index, *, nonce: str) -> Copy:
        body = manifest.encode(index)
        sha256 = manifest.sha256(body)
        key = index_key(
            self._job, attempt=shard.attempt, step=shard.step, rank=shard.rank, world=shard.world, sha256=sha256
        )
        with contextlib.suppress(AlreadyExistsError):  # named by its hash: the same bytes
            self._store.create(key, body)
        new = index.files[0]
        return msgspec.structs.replace(
            shard.copy("object", key=new.key),
            nonce=nonce,
            index_key=key,
            index_sha256=sha256,
            stored_bytes=new.stored_bytes,
            stored_digest=new.stored_digest,
        )

    # What may be pointed into

    def _base_of(self, shard: Shard) -> Base | None:
        """Return the index of the same rank in head, the newest READY; None if there is none of that world.

        A hint: whether it may be pointed into is decided when the step is to become READY.
        """
        with self._mutex:
            try:
                state = self._state = glance(self._store, self._state)
            except LogCorruptError:
                self._state = JobState(job=self._job)  # what it was read from may be gone
                return None
        if state.head is None or state.head in state.retired:
            return None
        try:
            ready, _ = read_manifest(self._store, state, state.head)
            if ready.world != shard.world:
                return None
            return Base(seq=state.head, index=read_index(self._store, ready, ready.shards[shard.rank]))
        except (CorruptObjectError, MissingObjectError) as error:
            log.warning("rank %d is stored whole, as READY %d can't be read: %s", shard.rank, state.head, error)
            return None


def _put_together(part: PartFile, room: contextlib.ExitStack) -> memoryview | None:
    """Return the file, mapped from where ``room`` has it if it is large; None if there is no room."""
    if part.bytes <= SMALL_BYTES:
        return memoryview(b"".join(part.pieces))
    try:
        file = room.enter_context(spool(part.bytes))
        for piece in part.pieces:
            file.write(piece)
        return room.enter_context(mapped(file))
    except (CkptError, OSError) as error:
        log.warning("a shard is stored whole: what is new of it can't be put together: %s", error)
        return None


def read_back(store: ObjectStore, task: ReadBackTask) -> ReadBack:
    """Read an object past the page cache and say whether it has the digest asked for.

    Raises:
        UnavailableError: the store did not answer.
    """
    key = Key(task.key)
    try:
        size = store.size(key)
        found = digest_of_object(store, key, uncached=True) if size == task.bytes else f"{size} bytes"
    except (MissingObjectError, CorruptObjectError) as error:
        found = str(error)
    return ReadBack(key=task.key, digest=task.digest, ok=found == task.digest, found=found)
