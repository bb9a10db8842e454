"""A byte that flips after its digest was taken, in the slot or on its way out: found before anything is READY.

One that flips before, between the seal and the first digest, can't be seen (docs/concepts/promises.md). That a step of
which an object does not read back never becomes READY, and the next one does, is in tests/coordinator/test_steering.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.sidecar.test_files import made_image, memory_in, sealed_slot
from tests.support.fake_store import FakeStore

from toprope.coordinator.wire import Copy, ReadBackTask
from toprope.sidecar.memory import Memory
from toprope.sidecar.object_tier import DamagedError, ObjectTier, read_back
from toprope.sidecar.values import Shard
from toprope.store.names import Key

AT = 2000


class FlippingStore(FakeStore):
    """Flips a byte of the next shard between the digest and the medium."""

    flips = True

    def create(self, key: Key, body: bytes | memoryview) -> None:
        if self.flips and key.endswith(".safetensors"):
            self.flips = False
            body = bytes(body[:AT]) + bytes([body[AT] ^ 1]) + bytes(body[AT + 1 :])
        super().create(key, body)


def hashed(memory: Memory, *, step: int) -> tuple[Shard, memoryview]:
    body = made_image(step=step)
    sealed_slot(memory, body, seq=step, step=step)
    return memory.hash_slot(0, 0, seq=step), memory.view(memory.slot(0, 0).data)[: len(body)]


def is_good(store: FakeStore, receipt: Copy) -> bool:
    """Read an upload back, as another sidecar does before its step can become READY."""
    task = ReadBackTask(node="b", key=receipt.key, bytes=receipt.stored_bytes, digest=receipt.stored_digest)
    return read_back(store, task).ok


def test_a_flip_in_the_slot_after_it_was_hashed_is_not_uploaded_and_the_next_step_is(memory_dir: Path) -> None:
    memory, store = memory_in(memory_dir), FakeStore()
    tier = ObjectTier(store, "job")
    shard, image = hashed(memory, step=1)
    image[AT] ^= 1
    with pytest.raises(DamagedError, match=r"was .* when it was hashed"):
        tier.put(shard, image, nonce="0a")
    assert store.objects == {}
    memory.remove_slots(0, (0,))
    shard, image = hashed(memory, step=2)
    assert is_good(store, tier.put(shard, image, nonce="0b"))


def test_a_flip_on_its_way_out_is_found_by_who_reads_it_back_and_the_next_step_is_good(memory_dir: Path) -> None:
    memory, store = memory_in(memory_dir), FlippingStore()
    tier = ObjectTier(store, "job")
    shard, image = hashed(memory, step=1)
    assert not is_good(store, tier.put(shard, image, nonce="0a"))
    assert bytes(image) == made_image(step=1)
    memory.remove_slots(0, (0,))
    shard, image = hashed(memory, step=2)
    assert is_good(store, tier.put(shard, image, nonce="0b"))
