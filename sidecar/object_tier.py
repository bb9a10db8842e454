"""The object tier: a shard and its index, as two write-once objects; what comes back is the receipt. Blocks."""

from __future__ import annotations

import contextlib

import msgspec

from toprope.coordinator.wire import Copy, ReadBack, ReadBackTask
from toprope.sidecar.values import Shard
from toprope.store import manifest
from toprope.store.digest import digest_of_object
from toprope.store.errors import AlreadyExistsError, CorruptObjectError, MissingObjectError
from toprope.store.names import Key, index_key, shard_key
from toprope.store.objects.protocol import ObjectStore
from toprope.store.shard import hash_image, index_of


class DamagedError(Exception):
    """The image to store is not the one that was hashed."""


def store_object(store: ObjectStore, job: str, shard: Shard, image: memoryview, *, nonce: str) -> Copy:
    """Write the image and its index, and return the receipt.

    Raises:
        DamagedError: the image has another digest; nothing was written.
        UnavailableError: it may or may not have been written; try again under a new nonce.
    """
    attempt, step, rank, world = shard.attempt, shard.step, shard.rank, shard.world
    key = shard_key(job, attempt=attempt, step=step, rank=rank, world=world, nonce=nonce)
    hashed = hash_image(image, name=key)
    if hashed.digest != shard.digest:
        raise DamagedError(f"the slot's digest is {hashed.digest} and was {shard.digest} when it was hashed")
    body = manifest.encode(index_of(hashed, key=key))
    store.create(key, image)
    index_sha256 = manifest.sha256(body)
    index = index_key(job, attempt=attempt, step=step, rank=rank, world=world, sha256=index_sha256)
    with contextlib.suppress(AlreadyExistsError):  # named by its hash: the same bytes
        store.create(index, body)
    receipt = shard.copy("object", key=key)
    return msgspec.structs.replace(receipt, nonce=nonce, index_key=index, index_sha256=index_sha256)


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
