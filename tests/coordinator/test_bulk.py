"""Many indexes are read in portions by a process of its own, which dies with the coordinator and may die before it."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs
from tests.support.fake_store import FakeStore
from tests.support.receipts import expected_indexes, receipts_of
from tests.support.stores import JobBuilder, adapter_image

from toprope.chaos.live.processes import wait_until
from toprope.coordinator.adapters.bulk import BulkReader
from toprope.coordinator.adapters.looking import Look
from toprope.coordinator.adapters.objects import ThreadedStore
from toprope.coordinator.committing import PORTION, Committer
from toprope.coordinator.index_checks import Expected
from toprope.coordinator.intents import CommitStep
from toprope.coordinator.log import Log
from toprope.store.checkpoint.manifest import Index, encode, sha256
from toprope.store.checkpoint.ready import read_index_at
from toprope.store.errors import CorruptObjectError, MissingObjectError, UnavailableError
from toprope.store.objects.directory import DirectoryStore
from toprope.store.objects.protocol import ObjectStore


@pytest.fixture
def step(tmp_path: Path) -> tuple[Expected, ...]:
    """Return what is expected of the indexes of a step of 40 ranks that lies in a directory."""
    builder = JobBuilder(DirectoryStore(tmp_path), image=adapter_image, codec="none", world=40).begin()
    return expected_indexes(builder, builder.checkpoint(10))


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[BulkReader]:
    """Yield one for that directory."""
    reader = BulkReader(str(tmp_path))
    yield reader
    pool = reader._pool
    reader.close()
    if pool is not None:
        pool.shutdown()


def process_of(reader: BulkReader) -> int:
    assert reader._pool is not None
    (pid,) = reader._pool._processes
    return pid


def look(reader: BulkReader, *expected: Expected) -> list[Look]:
    return asyncio.run(reader.look(expected))


def test_what_was_found_comes_in_order_or_what_is_wrong_with_the_first(
    tmp_path: Path, reader: BulkReader, step: tuple[Expected, ...]
) -> None:
    bodies = [(tmp_path / one.key).read_bytes() for one in step]
    assert look(reader, step[7], step[39], step[0]) == [Look(None, bodies[one]) for one in (7, 39, 0)]
    assert look(reader, *step) == [Look(None, body) for body in bodies]
    whole = structs.replace(step[3], whole=True)
    assert look(reader, whole)[0].index == read_index_at(DirectoryStore(tmp_path), whole.key)
    (tmp_path / step[5].key).unlink()
    (tmp_path / step[6].key).write_bytes(b"{}")
    with pytest.raises(MissingObjectError, match="rank-00005"):
        look(reader, *step)
    with pytest.raises(CorruptObjectError, match=r"rank-00006.*: SHA-256 is"):
        look(reader, *step[6:])


def test_a_process_that_was_killed_costs_one_reading(reader: BulkReader, step: tuple[Expected, ...]) -> None:
    before = look(reader, *step)
    os.kill(process_of(reader), signal.SIGKILL)
    with pytest.raises(UnavailableError, match="has ended"):
        look_on(reader, step)
    assert look(reader, *step) == before


def test_a_process_that_was_killed_while_nothing_was_read_costs_one_reading(
    reader: BulkReader, step: tuple[Expected, ...]
) -> None:
    before = look(reader, *step)
    pool = reader._pool
    assert pool is not None
    os.kill(process_of(reader), signal.SIGKILL)
    wait_until(lambda: pool._broken, what="it is known that it has ended", timeout_s=10)
    with pytest.raises(UnavailableError, match="has ended"):
        look(reader, *step)
    assert look(reader, *step) == before


def look_on(reader: BulkReader, step: tuple[Expected, ...]) -> None:
    """Read until something is wrong: that a process was killed is noticed a moment later."""
    for _ in range(1000):
        look(reader, *step[:2])


def test_a_reading_that_takes_long_is_cut_off_by_the_end(reader: BulkReader, step: tuple[Expected, ...]) -> None:
    look(reader, *step)
    pid = process_of(reader)
    before_s, said = cpu_s(pid), list[str]()

    def read_long() -> None:
        with pytest.raises(UnavailableError) as caught:
            look(reader, *step * 1000)
        said.append(str(caught.value))

    reading = threading.Thread(target=read_long)
    reading.start()
    wait_until(lambda: cpu_s(pid) > before_s + 0.2, what="it reads", timeout_s=20)
    reader.close()
    reading.join(10)
    assert said == ["the process that reads indexes for the coordinator is being ended"]
    wait_until(lambda: is_over(pid), what="it has ended", timeout_s=10)


def cpu_s(pid: int) -> float:
    """Return how much processor time a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


_COORDINATOR = """
import asyncio, os, pickle, signal, sys
from toprope.coordinator.adapters.bulk import BulkReader
if __name__ == "__main__":
    reader = BulkReader(sys.argv[1])
    asyncio.run(reader.look(pickle.loads(bytes.fromhex(sys.argv[2]))))
    (pid,) = reader._pool._processes
    print(pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_ends_when_the_coordinator_was_killed(tmp_path: Path, step: tuple[Expected, ...]) -> None:
    program = tmp_path / "coordinator.py"
    program.write_text(_COORDINATOR)
    said = subprocess.run(
        [sys.executable, str(program), str(tmp_path), pickle.dumps(step[:2]).hex()],
        capture_output=True,
        text=True,
        check=False,
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

    async def read_indexes(self, expected: Sequence[Expected]) -> list[Index | None]:
        self.sizes.append(len(expected))
        return await super().read_indexes(expected)


@pytest.mark.parametrize("what", ["receipt", "index"])
def test_a_number_that_is_none_of_a_shard_is_told_of(
    tmp_path: Path, reader: BulkReader, step: tuple[Expected, ...], what: str
) -> None:
    many = list(step)
    if what == "receipt":
        many[7] = structs.replace(many[7], copy=structs.replace(many[7].copy, bytes=2**64))
    else:
        index = read_index_at(DirectoryStore(tmp_path), many[7].key)
        tensor = structs.replace(index.tensors[0], global_shape=(2**64,))
        body = encode(structs.replace(index, tensors=(tensor, *index.tensors[1:])))
        (tmp_path / many[7].key).write_bytes(body)
        many[7] = structs.replace(many[7], copy=structs.replace(many[7].copy, index_sha256=sha256(body)), whole=True)
    with pytest.raises(CorruptObjectError, match=r"rank-00007.*: it has a number of more than 64 bits"):
        look(reader, *many)


@pytest.mark.parametrize("wrong", [(), (PORTION - 1, 40), (PORTION + 2,)])
async def test_of_many_ranks_each_index_is_held_against_its_own_receipt(wrong: tuple[int, ...]) -> None:
    builder = JobBuilder(FakeStore(), image=adapter_image, codec="none", world=PORTION + 6).begin()
    receipts = list(receipts_of(builder, builder.checkpoint(10)))
    for rank in wrong:
        receipts[rank] = replace(receipts[rank], copy=structs.replace(receipts[rank].copy, bytes=1))
    intent = CommitStep(attempt=1, attempt_uid=receipts[0].copy.attempt_uid, step=10, receipts=tuple(receipts))
    store = Portions(builder.store)
    log = Log(store, "job", writer_id="leader")
    await log.look()
    committer = Committer(store, log, wall_s=lambda: 0)
    if wrong:
        with pytest.raises(CorruptObjectError, match=f"rank-{min(wrong):05d}.* names .*, its receipt"):
            await committer._indexes(intent)
    else:
        assert await committer._indexes(intent) == [None] * len(receipts)
        assert sorted(store.sizes) == [6, PORTION]
