"""Twenty thousand small tensors are a few objects a rank and step, and the newest of many steps is found at once."""

from __future__ import annotations

import os
import struct
import time
from collections import Counter
from pathlib import Path

import pytest
from tests.support.fake_store import FakeStore
from tests.support.stores import JobBuilder, safetensors_image, shard_image

from toprope.sidecar.object_tier import ObjectTier
from toprope.sidecar.values import Shard
from toprope.store.checkpoint.shard import parse_header
from toprope.store.digest import digest
from toprope.store.look.show import read_job
from toprope.store.names import Key
from toprope.store.objects.directory import DirectoryStore

TENSORS, TENSOR_BYTES = 20_000, 1024
STEPS = 500


def many(*, step: int, rank: int, world: int = 2, number: int = 1, job_uid: str = "") -> bytes:
    """Return an image of many small tensors."""
    plain = shard_image(step=step, rank=rank, world=world, number=number, job_uid=job_uid)
    header = parse_header(plain, size=len(plain), name="plain")
    document = next(one for one in header.extents if one.name == "__document__")
    tensors = {
        f"model.layer.{at:05d}.weight": ("F32", [TENSOR_BYTES // 4], struct.pack("<II", step, at) * (TENSOR_BYTES // 8))
        for at in range(TENSORS)
    }
    body = plain[document.begin : document.end]
    return safetensors_image({**tensors, "__document__": ("U8", [len(body)], body)}, header.metadata)


class Counted(DirectoryStore):
    """A directory store that counts what is asked of it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.created: list[Key] = []

    def create(self, key: Key, body: bytes | memoryview) -> None:
        super().create(key, body)
        self.created.append(key)


@pytest.mark.fault("B146")
@pytest.mark.slow
@pytest.mark.long
def test_small_tensors_are_a_handful_of_objects_and_syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: Counter[str] = Counter()
    real = os.fsync

    def counted(descriptor: int) -> None:
        synced["all"] += 1
        real(descriptor)

    monkeypatch.setattr(os, "fsync", counted)
    store = Counted(tmp_path)
    builder = JobBuilder(store, image=many, codec="none").begin()
    for step in (10, 20):
        store.created.clear()
        synced.clear()
        builder.checkpoint(step)
        shards = [key for key in store.created if "/shards/" in key]
        assert len(shards) == 2 * 2, "a shard and an index for each rank"
        assert len(store.created) <= 2 * 2 + 3, "and what the step has once: manifest, record, facts"
        assert synced["all"] <= 4 * len(store.created)
    image = many(step=30, rank=0, job_uid=builder.log.state.job_uid)
    shard = Shard(attempt=1, step=30, attempt_uid="01" * 16, rank=0, world=2, bytes=len(image), digest=digest(image))
    began_s = time.process_time()
    ObjectTier(store, "job", codec="none").put(shard, memoryview(image), nonce="30")
    assert time.process_time() - began_s < 5.0


class Reads(FakeStore):
    """A store that notes what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.read_keys: list[Key] = []

    def read(self, key: Key, *, start: int = 0, length: int | None = None, uncached: bool = False) -> bytes:
        self.read_keys.append(key)
        return super().read(key, start=start, length=length, uncached=uncached)


@pytest.mark.fault("B146")
def test_the_newest_of_many_is_found_without_a_look_at_their_manifests() -> None:
    store = Reads()
    builder = JobBuilder(store, world=1).begin()
    for step in range(1, STEPS + 1):
        builder.checkpoint(step)
    store.read_keys.clear()
    found = read_job(store, "job")
    assert found.state.restorable()[0][1].step == STEPS
    assert not [key for key in store.read_keys if "/manifests/" in key or "/shards/" in key]
