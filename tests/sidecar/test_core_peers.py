"""Which copy may go for another, and what is believed of others: the core's rules, as sentences."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from tests.support.core_driver import JOB_UID, UID, Driver, shard

from toprope.coordinator.wire import Inventory, Member
from toprope.sidecar import effects as do
from toprope.sidecar import events as on
from toprope.sidecar.restore_book import RestoreBook
from toprope.trainer_hooks.link import wire


def holding(*steps: int) -> Driver:
    """Return node a as holder of node b's rank 1, with copies of these steps."""
    driver = Driver()
    driver.attempt(world=(Member(rank=0, node="a", boot_id="b0"), Member(rank=1, node="b", boot_id="b1")))
    driver.place("b", "a")
    for number, step in enumerate(steps):
        driver.owner(shard(step, rank=1).copy("memory"), version=step)
        driver.on(on.Pulled(shard=shard(step, rank=1), spare=number))
    return driver


def offer(driver: Driver, step: int) -> list[int]:
    """Let the owner list a step; return the spares that something is pulled into."""
    driver.owner(shard(step, rank=1).copy("memory"), version=step)
    return [pull.spare for pull in driver.all(do.Pull)]


def test_no_document_is_asked_for_before_all_that_lies_in_memory_was_looked_at() -> None:
    driver = Driver()
    driver.on(on.SpareSeen(rank=1, spare=0, shard=shard(1, rank=1)))
    assert driver.all(do.FetchDesired) == [], "a document would have the spares that were not looked at yet filled"
    driver.tick()
    assert driver.all(do.FetchDesired) == [do.FetchDesired()]


def test_a_kept_copy_is_never_overwritten_however_old() -> None:
    driver = holding(1, 2)
    driver.keep(1)
    driver.tick(1000.0)
    assert offer(driver, 3) == [1], "step 2 has waited long enough; step 1 is kept"
    driver.on(on.Pulled(shard=shard(3, rank=1), spare=1))
    driver.keep(3)
    assert offer(driver, 4) == [0]


def test_a_copy_that_somebody_reads_is_not_overwritten() -> None:
    driver = holding(1, 2)
    driver.keep(2)
    driver.on(on.ServeBegan(serve=7, attempt_uid=UID, step=1, rank=1))
    assert offer(driver, 3) == []
    driver.on(on.ServeEnded(serve=7))
    assert [pull.spare for pull in driver.all(do.Pull)] == [0]


def test_a_damaged_copy_that_is_still_read_is_not_overwritten() -> None:
    driver = holding(1, 2)
    driver.on(on.ServeBegan(serve=7, attempt_uid=UID, step=1, rank=1))
    driver.on(on.CopyDoubted(attempt_uid=UID, step=1, rank=1, tier="peer"))
    assert offer(driver, 3) == []
    driver.on(on.ServeEnded(serve=7))
    assert [pull.spare for pull in driver.all(do.Pull)] == [0]


def test_an_owner_of_another_job_is_not_copied_from() -> None:
    driver = holding()
    foreign = Inventory(
        job="job",
        job_uid="99" * 16,
        node="b",
        boot_id="b1",
        incarnation="c1",
        version=1,
        url="http://b",
        domain={},
        copies=(shard(1, rank=1).copy("memory"),),
    )
    driver.on(on.OwnerSeen(inventory=foreign))
    assert driver.all(do.Pull) == []
    driver.on(on.OwnerSeen(inventory=msgspec.structs.replace(foreign, job_uid=JOB_UID)))
    assert len(driver.all(do.Pull)) == 1


def test_what_was_staged_for_another_attempt_says_nothing_of_this_one() -> None:
    book = RestoreBook(attempt_uid=UID)
    late = wire.StagedShard(rank=0, path="/p", bytes=50, digest="d", tier="peer", node="b")
    book.on_staged(on.ShardStaged(attempt_uid="99" * 16, shard=late))
    book.on_failed(on.StageFailed(attempt_uid="99" * 16, rank=0, reason="gone"), now_s=0.0, patience_s=1.0)
    assert (book.staged, book.failed, book.verdict(UID)) == ({}, {}, None)
    book.on_staged(on.ShardStaged(attempt_uid=UID, shard=late))
    assert book.staged == {0: late}


def test_a_holder_takes_the_step_that_all_go_for_before_later_ones_and_gives_up_a_later_one_for_it() -> None:
    driver = holding()
    driver.want(aim=2)
    driver.owner(shard(2, rank=1).copy("memory"), shard(3, rank=1).copy("memory"))
    assert [pull.shard.step for pull in driver.all(do.Pull)] == [2]
    driver.on(on.Pulled(shard=shard(2, rank=1), spare=0))
    assert [pull.shard.step for pull in driver.all(do.Pull)] == [3]
    driver.on(on.Pulled(shard=shard(3, rank=1), spare=1))
    driver.keep(2)
    driver.want(aim=4)
    driver.owner(shard(4, rank=1).copy("memory"), shard(5, rank=1).copy("memory"), version=2)
    assert [(pull.shard.step, pull.spare) for pull in driver.all(do.Pull)] == [(4, 1)]


def test_the_step_that_all_go_for_is_never_overwritten_however_long_it_takes() -> None:
    driver = Driver()
    driver.train()
    driver.place("a", "b")
    for slot, step in enumerate((1, 2)):
        driver.snapshot(slot, step)
    driver.want(aim=1)
    driver.tick(1000.0)
    driver.snapshot(2, 3)
    assert driver.granted() == [1], "step 2 has waited long enough; step 1 is gone for"


def test_a_copy_of_a_rank_that_others_hold_now_is_given_up_once_a_later_step_is_kept() -> None:
    driver = holding(1, 2)
    driver.want(placement=())
    driver.keep(2)
    assert [(gone.rank, gone.spares) for gone in driver.all(do.RemoveSpares)] == [(1, (0,))]
    driver.keep(3)
    assert [(gone.rank, gone.spares) for gone in driver.all(do.RemoveSpares)] == [(1, (1,))]


def test_of_many_ranks_the_newest_snapshots_are_pulled_first() -> None:
    driver = Driver()
    driver.attempt()
    driver.place("b", "a")
    driver.owner(shard(1, rank=1).copy("memory"), shard(3, rank=2).copy("memory"), shard(2, rank=3).copy("memory"))
    assert [pull.shard.step for pull in driver.all(do.Pull)] == [3, 2, 1]


def test_a_copy_is_held_for_a_peer_for_as_long_as_its_size_may_take() -> None:
    driver = Driver()
    driver.train()
    driver.place("a", "b")
    driver.seal(0, 1)
    large = replace(shard(1), bytes=100 * 10**9)
    driver.on(on.SlotHashed(slot=0, seq=1, shard=large))
    driver.tick(30.0 + 5000.0 - 1.0)
    assert driver.all(do.Shout) == [], "20 MB each second, and half a minute"
    driver.tick(1.0)
    assert [shout.what for shout in driver.all(do.Shout)] == ["use-deadline"]


def no_room_for(driver: Driver) -> list[str]:
    """Return the owners for whom there is no room, as it is published."""
    return list(driver.inventory.no_room_for)


def test_who_has_no_room_for_all_copies_of_an_owner_says_so_until_it_has() -> None:
    driver = holding()
    offer(driver, 1)
    failed = on.PullFailed(shard=shard(1, rank=1), spare=0, reason="does not fit")
    driver.on(failed)
    assert no_room_for(driver) == []
    driver.on(replace(failed, no_room=True))
    assert no_room_for(driver) == ["b"]
    driver.on(on.MemorySeen(free=99))
    assert no_room_for(driver) == ["b"], "two spares of 50 bytes each"
    driver.on(on.MemorySeen(free=100))
    assert no_room_for(driver) == []


def test_room_that_is_taken_by_copies_of_an_owner_counts_as_room_for_it() -> None:
    driver = holding(1)
    driver.on(on.PullFailed(shard=shard(2, rank=1), spare=1, reason="does not fit", no_room=True))
    driver.on(on.MemorySeen(free=49))
    assert no_room_for(driver) == ["b"]
    driver.on(on.MemorySeen(free=50))
    assert no_room_for(driver) == []
