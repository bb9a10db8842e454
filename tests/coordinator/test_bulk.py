"""Many indexes are read in portions by a process of its own, which dies with the coordinator and may die before it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs
from tests.support.fake_store import FakeStore
from tests.support.stores import JobBuilder, adapter_image

from toprope.chaos.live.processes import wait_until
from toprope.coordinator.adapters.bulk import BulkReader
from toprope.coordinator.adapters.objects import ThreadedStore
from toprope.coordinator.committing import READ_AT_ONCE, Committer
from toprope.coordinator.intents import CommitStep
from toprope.coordinator.log import Log
from toprope.coordinator.readiness import Receipt
from toprope.coordinator.wire import Copy
from toprope.store.checkpoint.manifest import Index, Shard
from toprope.store.checkpoint.ready import read_index_at, read_manifest
from toprope.store.errors import CorruptObjectError, MissingObjectError, UnavailableError
from toprope.store.names import Key
from toprope.store.objects.opening import open_store
from toprope.store.objects.protocol import ObjectStore

KEYS = [Key(f"j/shards/a1/s000000001/{number}") for number in range(100)]


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[BulkReader]:
    """Yield one for a store with an object under each of the keys."""
    store = open_store(str(tmp_path), write=True)
    for number, key in enumerate(KEYS):
        store.create(key, b"%d" % number * 10)
    reader = BulkReader(str(tmp_path))
    yield reader
    pool = reader._pool
    reader.close()
    assert pool is not None
    pool.shutdown()


def process_of(reader: BulkReader) -> int:
    assert reader._pool is not None
    (pid,) = reader._pool._processes
    return pid


def read(reader: BulkReader, *keys: Key, limit: int = 100) -> list[bytes]:
    return asyncio.run(reader.bodies(keys, limit=limit))


def test_the_bodies_come_in_the_order_of_the_keys_or_what_is_wrong_with_the_first(reader: BulkReader) -> None:
    assert read(reader, KEYS[7], KEYS[99], KEYS[0]) == [b"7" * 10, b"99" * 10, b"0" * 10]
    assert len(read(reader, *KEYS)) == len(KEYS)
    with pytest.raises(MissingObjectError, match="j/none"):
        read(reader, KEYS[0], Key("j/none"), Key("j/nor-this"))
    with pytest.raises(CorruptObjectError, match="at most 15"):
        read(reader, KEYS[0], KEYS[42], limit=15)


def test_a_process_that_was_killed_costs_one_reading(reader: BulkReader) -> None:
    read(reader, *KEYS[:2])
    os.kill(process_of(reader), signal.SIGKILL)
    with pytest.raises(UnavailableError, match="has ended"):
        read_on(reader)
    assert read(reader, KEYS[1]) == [b"1" * 10]


def read_on(reader: BulkReader) -> None:
    """Read until something is wrong: that a process was killed is noticed a moment later."""
    for _ in range(1000):
        read(reader, *KEYS[:2])


_COORDINATOR = """
import asyncio, os, signal, sys
from toprope.coordinator.adapters.bulk import BulkReader
from toprope.store.names import Key
if __name__ == "__main__":
    reader = BulkReader(sys.argv[1])
    asyncio.run(reader.bodies([Key(sys.argv[2])], limit=100))
    (pid,) = reader._pool._processes
    print(pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_ends_when_the_coordinator_was_killed(tmp_path: Path) -> None:
    open_store(str(tmp_path / "store"), write=True).create(KEYS[0], b"0")
    program = tmp_path / "coordinator.py"
    program.write_text(_COORDINATOR)
    said = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "store"), KEYS[0]], capture_output=True, text=True, check=False
    )
    assert said.returncode == -signal.SIGKILL, said.stderr
    wait_until(lambda: is_over(int(said.stdout)), what="the reader has ended", timeout_s=10)


def is_over(pid: int) -> bool:
    """Say whether a process has ended, whether or not somebody has asked for its status yet."""
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True


class Portions(ThreadedStore):
    """A store that notes how many indexes are read at a time."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        self.sizes: list[int] = []

    async def read_indexes(self, keys: Sequence[Key]) -> list[bytes]:
        self.sizes.append(len(keys))
        return await super().read_indexes(keys)


def receipt_of(index: Index, shard: Shard) -> Receipt:
    (file,) = index.files
    copy = Copy(
        attempt=1,
        attempt_uid=index.attempt_uid,
        step=index.step,
        rank=index.rank,
        world=index.world,
        tier="object",
        bytes=index.bytes,
        digest=index.digest,
        key=file.key,
        index_key=shard.index_key,
        index_sha256=shard.index_sha256,
        stored_bytes=file.stored_bytes,
        stored_digest=file.stored_digest,
    )
    return Receipt(node="a", copy=copy)


@pytest.mark.parametrize("wrong", [(), (65, 40)])
async def test_of_many_ranks_each_index_is_held_against_its_own_receipt(wrong: tuple[int, ...]) -> None:
    builder = JobBuilder(FakeStore(), image=adapter_image, codec="none", world=2 * READ_AT_ONCE + 6).begin()
    seq = builder.checkpoint(10)
    manifest, _ = read_manifest(builder.store, builder.log.state, seq)
    receipts = [receipt_of(read_index_at(builder.store, Key(one.index_key)), one) for one in manifest.shards]
    for rank in wrong:
        receipts[rank] = replace(receipts[rank], copy=structs.replace(receipts[rank].copy, bytes=1))
    intent = CommitStep(attempt=1, attempt_uid=receipts[0].copy.attempt_uid, step=10, receipts=tuple(receipts))
    store = Portions(builder.store)
    log = Log(store, "job", writer_id="leader")
    await log.look()
    found = await Committer(store, log, wall_s=lambda: 0)._indexes(intent)
    assert sorted(store.sizes) == [6, READ_AT_ONCE, READ_AT_ONCE]
    if wrong:
        assert f"rank-{min(wrong):05d}" in str(found)
    else:
        assert found == [None] * len(receipts)
