"""Thousands of indexes are read in a process of its own, which dies with the coordinator and may die before it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from toprope.chaos.live.processes import wait_until
from toprope.coordinator.adapters.bulk import BulkReader
from toprope.store.errors import CorruptObjectError, MissingObjectError, UnavailableError
from toprope.store.names import Key
from toprope.store.objects.opening import open_store

KEYS = [Key(f"j/shards/a1/s000000001/{number}") for number in range(100)]


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[BulkReader]:
    """Yield one for a store with an object under each of the keys."""
    store = open_store(str(tmp_path), write=True)
    for number, key in enumerate(KEYS):
        store.create(key, b"%d" % number * 10)
    reader = BulkReader(str(tmp_path))
    yield reader
    reader.close()


def process_of(reader: BulkReader) -> int:
    assert reader._pool is not None
    (pid,) = reader._pool._processes
    return pid


async def read_on(reader: BulkReader) -> None:
    """Read until something is wrong: that a process was killed is noticed a moment later."""
    while True:
        await reader.bodies(KEYS[:2], limit=100)
        await asyncio.sleep(0.01)


async def test_the_bodies_come_in_the_order_of_the_keys_or_what_is_wrong_with_the_first(reader: BulkReader) -> None:
    wanted = [KEYS[7], KEYS[99], KEYS[0]]
    assert await reader.bodies(wanted, limit=100) == [b"7" * 10, b"99" * 10, b"0" * 10]
    assert len(await reader.bodies(KEYS, limit=100)) == len(KEYS)
    with pytest.raises(MissingObjectError, match="j/none"):
        await reader.bodies([KEYS[0], Key("j/none"), Key("j/nor-this")], limit=100)
    with pytest.raises(CorruptObjectError, match="at most 15"):
        await reader.bodies([KEYS[0], KEYS[42]], limit=15)


async def test_a_process_that_was_killed_costs_one_reading(reader: BulkReader) -> None:
    await reader.bodies(KEYS[:2], limit=100)
    os.kill(process_of(reader), signal.SIGKILL)
    with pytest.raises(UnavailableError, match="has ended"):
        await read_on(reader)
    assert await reader.bodies(KEYS[1:2], limit=100) == [b"1" * 10]


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
    wait_until(lambda: not Path(f"/proc/{int(said.stdout)}").exists(), what="the reader has ended", timeout_s=10)
