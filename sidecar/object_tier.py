"""The object tier: what is new of a shard and its index, as two write-once objects; the receipt comes back. Blocks.

New is what neither the newest READY has of the same rank nor another rank of this node stores for the same step.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from toprope.coordinator.wire import Copy, ReadBack, ReadBackTask
from toprope.sidecar.packing import Codec, Packer, pack_gently
from toprope.sidecar.siblings import Borrowed, Siblings
from toprope.sidecar.values import Shard
from toprope.store.checkpoint import manifest
from toprope.store.checkpoint.codec import most_packed_bytes
from toprope.store.checkpoint.incremental import (
    Base,
    PartFile,
    Placed,
    checked_digest,
    index_of_parts,
    kept_tensors,
    part_file,
)
from toprope.store.checkpoint.manifest import File, Index, Packed
from toprope.store.checkpoint.ready import read_index, read_manifest
from toprope.store.checkpoint.shard import HashedImage, hash_image, index_of
from toprope.store.digest import digest_of_object
from toprope.store.errors import AlreadyExistsError, CkptError, CorruptObjectError, LogCorruptError, MissingObjectError
from toprope.store.log.chain import glance
from toprope.store.log.fold import JobState
from toprope.store.names import Key, index_key, shard_key, step_prefix
from toprope.store.objects.protocol import ObjectStore
from toprope.store.spool import mapped, spool

SMALL_BYTES = 32 * 1024 * 1024
"""A file of so many bytes is put together in memory, a larger one in a spool."""

T = TypeVar("T")
Write = Callable[[bytes | memoryview], object]

log = logging.getLogger("toprope.sidecar")


class DamagedError(Exception):
    """The image to store is not the one that was hashed."""


class _NoRoomError(Exception):
    """There is no room to put a file together."""


class ObjectTier:
    """Stores the shards of one job. Its calls block, and may come from several threads."""

    def __init__(
        self, store: ObjectStore, job: str, *, codec: Codec = "auto", siblings: Siblings | None = None
    ) -> None:
        self._store = store
        self._job = job
        self._packer = Packer(codec)
        self._siblings = siblings or Siblings()
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
        base = self._base_of(shard)
        kept = {} if base is None else self._kept(whole, base)
        with self._siblings.turn(shard, whole, base, kept) as (turn, borrowed):
            index = None
            if kept or borrowed.turns:
                index = self._put_part(shard, image, hashed, whole, (kept, borrowed), nonce=nonce)
            if index is None:
                file = self._write(shard, image, whole.digest, nonce=nonce)
                index = msgspec.structs.replace(whole, files=(file,))
            elif any(not self._is_of_step(file, shard) for file in index.files):
                assert base is not None
                index = msgspec.structs.replace(index, base=base.seq)
            receipt = self._write_index(shard, index, nonce=nonce)
            turn.index = index
        return receipt

    def _put_part(
        self,
        shard: Shard,
        image: memoryview,
        hashed: HashedImage,
        whole: Index,
        elsewhere: tuple[Mapping[str, Placed], Borrowed],
        *,
        nonce: str,
    ) -> Index | None:
        """Write a file of what is new of the image, and return the index; None if it is to be stored whole."""
        kept, borrowed = elsewhere
        part = part_file(image, hashed, kept=kept.keys() | borrowed.turns.keys())
        with contextlib.ExitStack() as room:
            body = _put_together(part, room)
            if body is None:
                return None
            digest = checked_digest(body, part, whole)
            if digest is None:
                raise DamagedError("the slot changed while what is new of it was put together")
            file = self._write(shard, body, digest, nonce=nonce)
            del body
        return index_of_parts(whole, {**kept, **borrowed.placed()}, part=part, file=file)

    def _is_of_step(self, file: File, shard: Shard) -> bool:
        return file.key.startswith(step_prefix(self._job, attempt=shard.attempt, step=shard.step))

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
        if decision.pack:
            try:
                return self._write_packed(shard, raw, digest, nonce=nonce)
            except _NoRoomError as error:
                log.warning("a file of rank %d is stored unpacked: %s", shard.rank, error)
        key = self._key(shard, nonce, packed=False)
        self._upload(key, raw)
        return File(key=key, bytes=len(raw), digest=digest)

    def _write_packed(self, shard: Shard, raw: memoryview, digest: str, *, nonce: str) -> File:
        with contextlib.ExitStack() as room:
            body, packed = _gathered(
                lambda write: pack_gently(raw, write), most_bytes=most_packed_bytes(len(raw)), room=room
            )
            if packed.raw_digest != digest:
                raise DamagedError(f"what was packed has digest {packed.raw_digest}; expected {digest}")
            key = self._key(shard, nonce, packed=True)
            self._upload(key, body)
            del body
        stored = Packed(codec="zstd", bytes=packed.bytes, digest=packed.digest)
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
            rests_on=tuple(file.key for file in index.files[1:] if self._is_of_step(file, shard)),
        )

    # What may be pointed into

    def _base_of(self, shard: Shard) -> Base | None:
        """Return the index of the same rank in the newest READY to be trusted; None if there is none of that world.

        A hint: whether it may be pointed into is decided when the step is to become READY.
        """
        with self._mutex:
            try:
                state = self._state = glance(self._store, self._state)
            except LogCorruptError:
                self._state = JobState(job=self._job)  # what it was read from may be gone
                return None
        trusted = state.restorable()
        if not trusted:
            return None
        seq, _ = trusted[0]
        try:
            ready, _ = read_manifest(self._store, state, seq)
            if ready.world != shard.world:
                return None
            return Base(seq=seq, index=read_index(self._store, ready, ready.shards[shard.rank]))
        except (CorruptObjectError, MissingObjectError) as error:
            log.warning("rank %d is stored whole, as READY %d can't be read: %s", shard.rank, seq, error)
            return None

    def _kept(self, whole: Index, base: Base) -> dict[str, Placed]:
        """Return what the files of the base have of an image: those that are there and as long as they should be."""
        kept = kept_tensors(whole, base.index)
        files = {number: base.index.files[number] for number in {one.file for one in kept.values()}}
        sound = {number for number, file in sorted(files.items()) if self._is_there(file)}
        return {name: Placed(file=files[one.file], tensor=one) for name, one in kept.items() if one.file in sound}

    def _is_there(self, file: File) -> bool:
        try:
            size = self._store.size(Key(file.key))
        except (MissingObjectError, CorruptObjectError) as error:
            log.warning("what was in it is stored anew: %s", error)
            return False
        if size != file.stored_bytes:
            log.warning(
                "%s has %d bytes, expected %d: what was in it is stored anew", file.key, size, file.stored_bytes
            )
        return size == file.stored_bytes


def _put_together(part: PartFile, room: contextlib.ExitStack) -> memoryview | None:
    """Return the file, mapped from where ``room`` has it if it is large; None if there is no room."""

    def write_all(write: Write) -> None:
        for piece in part.pieces:
            write(piece)

    try:
        body, _ = _gathered(write_all, most_bytes=part.bytes, room=room)
    except _NoRoomError as error:
        log.warning("a shard is stored whole: what is new of it can't be put together: %s", error)
        return None
    return body


def _gathered(produce: Callable[[Write], T], *, most_bytes: int, room: contextlib.ExitStack) -> tuple[memoryview, T]:
    """Return what is written as ``produce`` is called, in memory if it is little, and what that returned.

    Raises:
        _NoRoomError: there is no room for ``most_bytes``.
    """
    if most_bytes <= SMALL_BYTES:
        body = bytearray()
        made = produce(body.extend)
        return memoryview(body), made
    try:
        file = room.enter_context(spool(most_bytes))
        made = produce(file.write)
        return room.enter_context(mapped(file)), made
    except (CkptError, OSError) as error:
        raise _NoRoomError(str(error)) from error


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
