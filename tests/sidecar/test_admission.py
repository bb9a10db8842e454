"""What does not fit is said with numbers and the nearest setting that does, to trainers and people, until it fits."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.core_driver import Driver, shard, sight

from toprope.coordinator.wire import TROUBLES_MAX, Cadence, Placement
from toprope.sidecar import effects as do
from toprope.sidecar import events as on
from toprope.sidecar.adapters.files import Disk
from toprope.sidecar.admission import disk_trouble, memory_advice
from toprope.sidecar.local_tier import LocalError, LocalTier
from toprope.sidecar.values import Shard
from toprope.store.digest import digest
from toprope.trainer_hooks.link import wire

MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("copies", "room", "said"),
    [
        (2, 600 * MIB, "--copies 1 needs 500.0 MiB, which fits"),
        (2, 350 * MIB, "--copies 0 needs 300.0 MiB, which fits"),
        (1, 350 * MIB, "--copies 0 needs 300.0 MiB, which fits"),
        (2, 299 * MIB, "states of up to 99.7 MiB a rank fit"),
    ],
)
def test_the_nearest_setting_with_which_memory_suffices_is_named(copies: int, room: int, said: str) -> None:
    text = memory_advice({0: 100 * MIB}, dict.fromkeys(range(1, copies + 1), 100 * MIB), copies=copies, room=room)
    assert text.startswith("3 slots for each rank here take 300.0 MiB, 2 for each rank that is held for other nodes ")
    assert said in text


def test_a_disk_has_to_have_room_for_the_copies_that_stay_and_the_one_that_is_written() -> None:
    assert disk_trouble({0: MIB, 1: MIB}, room=6 * MIB) == ""
    assert "3 local copies of each rank here take 6.00 MiB, and its disk has room for 5.99 MiB" in disk_trouble(
        {0: MIB, 1: MIB}, room=6 * MIB - 10_000
    )


def refused() -> Driver:
    """Return a node whose trainer announced a size that does not fit, and that holds copies for another."""
    driver = Driver()
    driver.attempt()
    driver.want(placement=(Placement(owner="b", holder="a", url="http://b"),))
    driver.owner(shard(1, rank=1).copy("memory"))
    driver.hello()
    joined = wire.Join(attempt_uid=driver.desired.attempt.uid, ask=0, wants=()) if driver.desired.attempt else None
    assert joined is not None
    driver.frame(joined)
    driver.frame(wire.Size(bytes=100))
    driver.on(on.SlotsRefused(rank=0, reason="3 slots of rank 0: 300 bytes of memory needed, 20 bytes free", room=320))
    return driver


def test_a_trainer_and_people_are_told_why_there_are_no_slots_and_that_there_are_when_there_are() -> None:
    driver = refused()
    (frame,) = driver.sent(wire.Desired)
    assert "300 bytes of memory needed, 20 bytes free" in frame.no_slots
    assert "--copies 0 needs 300 B, which fits" in frame.no_slots
    assert list(driver.inventory.troubles) == [f"rank 0 has no slots: {frame.no_slots}"]
    assert [shout.what for shout in driver.all(do.Shout)] == ["no-room"]
    driver.tick(6.0)
    assert [slots.slots for slots in driver.all(do.MakeSlots)] == [(0, 1, 2)], "it is tried again"
    driver.see(*(sight(number) for number in range(3)))
    assert [frame.no_slots for frame in driver.sent(wire.Desired)] == [""]
    assert list(driver.inventory.troubles) == []


def training() -> Driver:
    driver = Driver()
    driver.train()
    driver.want(cadence=Cadence(from_step=0, every=1, local_every=1, object_every=1))
    driver.snapshot(0, 1)
    return driver


def test_a_tier_that_fails_is_told_of_until_it_takes_something() -> None:
    driver = training()
    driver.on(on.StoreFailed(tier="local", shard=shard(1), slot=0, reason="/l: No space left on device"))
    driver.on(on.StoreFailed(tier="object", shard=shard(1), slot=0, reason="503"))
    assert list(driver.inventory.troubles) == [
        "the local tier fails: /l: No space left on device",
        "the object tier fails: 503",
    ]
    driver.tick(1.0)
    driver.on(on.LocalStored(shard=shard(1), path="/l/1", slot=0))
    assert list(driver.inventory.troubles) == ["the object tier fails: 503"]
    driver.on(on.ObjectStored(slot=0, receipt=shard(1).copy("object")))
    assert list(driver.inventory.troubles) == []


def test_a_tier_that_hangs_is_told_of_until_it_answers() -> None:
    driver = training()
    driver.on(on.ObjectStored(slot=0, receipt=shard(1).copy("object")))
    assert list(driver.inventory.troubles) == []
    driver.tick(61.0)
    assert list(driver.inventory.troubles) == ["the local tier hangs with step 1 of rank 0"]
    driver.on(on.LocalStored(shard=shard(1), path="/l/1", slot=0))
    assert list(driver.inventory.troubles) == []


def test_a_disk_that_is_too_small_is_told_of_before_the_first_snapshot() -> None:
    driver = Driver()
    driver.train()
    driver.on(on.DiskSeen(free=299))
    assert len(driver.inventory.troubles) == 1
    assert (
        "local copies of each rank here take 300 B, and its disk has room for 299 B" in (driver.inventory.troubles[0])
    )
    driver.on(on.DiskSeen(free=300))
    assert list(driver.inventory.troubles) == []


def test_a_copy_that_does_not_fit_here_is_told_of_until_it_does() -> None:
    driver = refused()
    driver.on(on.PullFailed(shard=shard(1, rank=1), spare=0, reason="spare: 50 bytes of memory needed"))
    assert "rank 1 is not copied here: spare: 50 bytes of memory needed" in driver.inventory.troubles
    driver.on(on.Pulled(shard=shard(1, rank=1), spare=0))
    assert not any("rank 1" in text for text in driver.inventory.troubles)


def test_troubles_are_few_and_short() -> None:
    driver = Driver()
    driver.attempt()
    for rank in range(TROUBLES_MAX + 1):
        driver.core.slots.refuse(rank, "x" * 5000, now_s=0.0)
    driver.tick()
    assert (len(driver.inventory.troubles), max(map(len, driver.inventory.troubles))) == (TROUBLES_MAX, 500)


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 64 MiB."""
    directory = tmp_path / "tmpfs"
    directory.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(directory)], capture_output=True, check=False
    )
    if made.returncode != 0:
        pytest.skip("may not mount a tmpfs here")
    assert subprocess.run(["mountpoint", "-q", str(directory)], check=False).returncode == 0
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


def fill(path: Path) -> None:
    """Write until there is no room at all."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


@pytest.mark.fault("B74")
def test_a_disk_that_is_full_to_the_last_byte_gets_room_by_what_the_sidecar_itself_gives_up(tmpfs: Path) -> None:
    tier, driver = LocalTier(tmpfs, Disk()), Driver()
    body = bytes(range(256)) * 4096 * 8
    driver.train()
    driver.want(cadence=Cadence(from_step=0, every=1, local_every=1, object_every=100))
    for step in (1, 2):
        path = tier.store(of(body, step), memoryview(body), nonces=(f"a{step}", f"b{step}"))
        driver.on(on.LocalStored(shard=of(body, step), path=str(path), slot=None))
    third = tier.store(of(body, 3), memoryview(body), nonces=("a3", "b3"))
    fill(tmpfs / "others")
    assert tier.free_bytes() == 0
    with pytest.raises(LocalError, match="No space left on device") as caught:
        tier.store(of(body, 4), memoryview(body), nonces=("a4", "b4"))
    assert not caught.value.quarantine, "a full disk loses nothing that was written"
    driver.on(on.LocalStored(shard=of(body, 3), path=str(third), slot=None))
    for drop in driver.all(do.DropLocal):
        tier.drop(Path(drop.path))
    assert tier.free_bytes() >= len(body)
    path = tier.store(of(body, 4), memoryview(body), nonces=("c4", "d4"))
    assert path.read_bytes() == body
    assert third.read_bytes() == body, "the newest that was there before is there still"
    assert not list(tmpfs.glob("tmp.*"))


def of(body: bytes, step: int) -> Shard:
    """Return a step whose image is this body."""
    return replace(shard(step), bytes=len(body), digest=digest(body))
