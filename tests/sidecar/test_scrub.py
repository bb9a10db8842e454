"""The scrub finds what has changed since it was hashed, and says nothing of what was given up meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.support.core_driver import Driver, shard

from toprope.coordinator.wire import Cadence
from toprope.sidecar import effects as do
from toprope.sidecar import events as on
from toprope.sidecar.scrub import CHUNK_BYTES, Scrub
from toprope.sidecar.threads import Threads, parse_cpus
from toprope.sidecar.values import Lying, Shard, Way
from toprope.store.digest import digest
from toprope.store.errors import UsageError

BODY = bytes(range(256)) * (CHUNK_BYTES // 256) + b"the end"


def lying(path: Path, tier: str) -> Lying:
    of_body = Shard(attempt=1, step=1, attempt_uid="1a" * 16, rank=0, world=1, bytes=len(BODY), digest=digest(BODY))
    return Lying(way=Way(kind="here", tier=tier, path=str(path)), shard=of_body)  # type: ignore[arg-type]


async def scrubbed(there: list[Lying], *, body: bytes = BODY, goes: bool = False) -> list[Lying]:
    """Return what one round over these copies doubts; those in memory have this ``body``, and may go meanwhile."""
    doubted: list[Lying] = []

    def view(_: Path) -> memoryview:
        if goes:
            there.clear()
        return memoryview(body)

    threads = Threads()
    scrub = Scrub(listed=lambda: tuple(there), view=view, doubt=doubted.append, threads=threads, bytes_per_s=1e12)
    await scrub.round()
    threads.close()
    return doubted


@pytest.mark.parametrize("tier", ["memory", "peer"])
@pytest.mark.parametrize("at", [0, CHUNK_BYTES, len(BODY) - 1])
async def test_one_flipped_bit_in_memory_is_found(tier: str, at: int) -> None:
    there = [lying(Path("/memory"), tier)]
    assert await scrubbed(there) == []
    assert await scrubbed(there, body=BODY[:at] + bytes([BODY[at] ^ 1]) + BODY[at + 1 :]) == there


async def test_what_was_given_up_while_it_was_read_is_not_doubted() -> None:
    assert await scrubbed([lying(Path("/memory"), "memory")], body=b"x" * len(BODY), goes=True) == []


async def test_a_file_on_disk_that_has_changed_is_short_or_is_gone_is_found(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(BODY)
    there = [lying(path, "local")]
    assert await scrubbed(there) == []
    for damaged in (BODY[:100] + b"\0" + BODY[101:], BODY[:-1]):
        path.write_bytes(damaged)
        assert await scrubbed(there) == there
    path.unlink()
    assert await scrubbed(there) == there


def test_the_core_lists_each_copy_with_its_file_and_not_those_in_the_object_store() -> None:
    driver = Driver()
    driver.train()
    driver.want(cadence=Cadence(from_step=0, every=1, local_every=1, object_every=1))
    driver.snapshot(0, 1)
    driver.on(on.LocalStored(shard=shard(1), path="/l/1", slot=0))
    driver.on(on.ObjectStored(slot=0, receipt=shard(1).copy("object")))
    found = [(one.way.tier, one.way.path, one.shard.step) for one in driver.core.lying()]
    assert found == [("memory", "/slots/0/0", 1), ("local", "/l/1", 1)]


def test_a_damaged_copy_of_this_disk_is_deleted_told_of_and_made_again() -> None:
    driver = Driver()
    driver.train()
    driver.want(cadence=Cadence(from_step=0, every=1, local_every=1, object_every=100))
    driver.snapshot(0, 1)
    driver.on(on.LocalStored(shard=shard(1), path="/l/1", slot=0))
    driver.on(on.CopyDoubted(attempt_uid=shard(1).attempt_uid, step=1, rank=0, tier="local"))
    assert driver.all(do.DropLocal) == [do.DropLocal(path="/l/1")]
    assert [shout.what for shout in driver.all(do.Shout)] == ["digest-differs"]
    assert driver.copies("local") == []
    assert [effect.shard.step for effect in driver.all(do.StoreLocal)] == [1]


def test_a_damaged_peer_copy_is_pulled_again() -> None:
    driver = Driver()
    driver.attempt()
    driver.place("b", "a")
    driver.owner(shard(1, rank=1).copy("memory"))
    driver.on(on.Pulled(shard=shard(1, rank=1), spare=0))
    driver.on(on.CopyDoubted(attempt_uid=shard(1).attempt_uid, step=1, rank=1, tier="peer"))
    assert [(pull.shard.step, pull.spare) for pull in driver.all(do.Pull)] == [(1, 0)]


@pytest.mark.parametrize("text", ["x", "0-", "1,,a", "100000"])
def test_a_list_of_processors_that_is_none_or_names_one_that_is_not_there_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--cpus"):
        parse_cpus(text)


def test_ranges_and_numbers_of_processors_are_understood() -> None:
    assert parse_cpus("") == frozenset()
    assert parse_cpus("0-0,0") == {0}


async def test_threads_that_serve_no_trainer_are_nice_and_stay_on_their_processors() -> None:
    threads = Threads(nice=7, cpus=frozenset({0}))

    def seen() -> tuple[int, set[int]]:
        return os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0)

    here = os.getpriority(os.PRIO_PROCESS, 0)
    assert await threads.run("hash", seen) == (max(7, here), {0})
    assert await threads.run("slots", seen) == (here, os.sched_getaffinity(0))
    threads.close()
