"""What the core sends to the other tiers, pulls from peers, reads back and tells."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from tests.support.core_driver import JOB_UID, UID, Driver, shard

from toprope.coordinator.wire import Cadence, Desired, Member, ReadBack, ReadBackTask
from toprope.sidecar import effects as do
from toprope.sidecar import events as on
from toprope.sidecar.values import coarseness, shard_of_page
from toprope.trainer_hooks.link import wire
from toprope.trainer_hooks.link.slot import Page, SlotState

OFTEN = Cadence(from_step=0, every=1, local_every=1, object_every=1)


def training(cadence: Cadence = OFTEN) -> Driver:
    driver = Driver()
    driver.train()
    driver.want(cadence=cadence)
    return driver


def test_a_due_step_goes_to_local_and_object_tier_and_others_do_not() -> None:
    driver = training(Cadence(from_step=0, every=1, local_every=2, object_every=4))
    driver.snapshot(0, 1)
    assert not driver.all(do.StoreLocal)
    assert not driver.all(do.StoreObject)
    driver.snapshot(1, 2)
    assert [effect.shard.step for effect in driver.all(do.StoreLocal)] == [2]
    assert driver.all(do.StoreObject) == []
    driver.snapshot(2, 4)
    assert [effect.shard.step for effect in driver.all(do.StoreObject)] == [4]


def test_a_step_that_its_trainer_asked_for_goes_to_each_tier_whatever_the_cadence() -> None:
    driver = training(Cadence(from_step=0, every=2, local_every=4, object_every=8))
    driver.seal(0, 7)
    page = Page(state=SlotState.HASHED, world=1, attempt=1, attempt_uid=UID, step=7, bytes=50, asked=True)
    driver.on(on.SlotHashed(slot=0, seq=1, shard=shard_of_page(page)))
    assert [effect.shard.step for effect in driver.all(do.StoreLocal)] == [7]
    assert [effect.shard.step for effect in driver.all(do.StoreObject)] == [7]


def test_each_tier_takes_one_shard_at_a_time_and_then_the_coarsest_that_waits() -> None:
    driver = training()
    driver.snapshot(0, 3)
    assert [effect.shard.step for effect in driver.all(do.StoreObject)] == [3]
    driver.snapshot(1, 4)
    driver.snapshot(2, 5)
    assert driver.all(do.StoreObject) == []
    driver.on(on.ObjectStored(slot=0, receipt=shard(3).copy("object")))
    assert [effect.shard.step for effect in driver.all(do.StoreObject)] == [4]


def test_a_slot_is_in_use_until_its_write_has_completed() -> None:
    driver = training()
    for slot, step in enumerate((1, 2, 3)):
        driver.snapshot(slot, step)
    driver.on(on.LocalStored(shard=shard(1), path="/l/1", slot=0))
    driver.keep(3)
    driver.tick(50.0)
    assert driver.granted() == [], "the object store still reads slot 0; slot 1 went to local meanwhile"
    driver.on(on.ObjectStored(slot=0, receipt=shard(1).copy("object")))
    assert driver.granted() == [0]


def test_a_disk_and_a_store_that_hang_lose_their_copies_and_not_the_trainer_its_slots() -> None:
    driver = training()
    for slot, step in enumerate((1, 2, 3)):
        driver.snapshot(slot, step)
    driver.keep(3)
    assert driver.granted() == [1]
    record = driver.core.slots.slots[0, 0]
    driver.tick(61.0)
    assert ([shout.what for shout in driver.all(do.Shout)], set(record.uses)) == (["use-deadline"], {"object"})
    driver.tick(240.0)
    assert ([shout.what for shout in driver.all(do.Shout)], set(record.uses)) == (["use-deadline"], set())
    driver.seal(1, 4, seq=2)
    assert driver.granted() == [0]
    driver.hashed(1, 4, seq=2)
    assert not driver.all(do.StoreLocal), "what hangs is given nothing more"
    assert not driver.all(do.StoreObject)
    driver.on(on.ObjectStored(slot=0, receipt=shard(1).copy("object")))
    assert driver.copies("object") == [], "its slot was written to meanwhile: nobody knows what lies there"
    assert [effect.shard.step for effect in driver.all(do.StoreObject)] == [4], "it answers: it goes on"


def test_a_large_shard_may_take_its_time() -> None:
    driver = training()
    driver.seal(0, 1)
    driver.on(on.SlotHashed(slot=0, seq=1, shard=replace(shard(1), bytes=10**9)))
    driver.tick(100.0)
    assert not driver.all(do.Shout)
    driver.tick(20.0)
    assert [shout.text for shout in driver.all(do.Shout)] == ["rank 0 slot 0: local took too long and lost its copy"]


def test_copies_of_an_earlier_job_of_this_name_are_told_of_and_left_alone() -> None:
    driver = Driver()
    for step in (7, 8, 9):
        driver.on(on.LocalStored(shard=shard(step, attempt=9, uid="77"), path=f"/old/{step}", slot=None, job_uid="99"))
    driver.on(on.LocalStored(shard=shard(1), path="/l/1", slot=None, job_uid=JOB_UID))
    driver.train()
    assert [shout.text.split()[0] for shout in driver.all(do.Shout)] == []
    driver.want(cadence=OFTEN)
    assert driver.copies("local") == [1]
    for slot, step in enumerate((2, 3)):
        driver.snapshot(slot, step)
        driver.on(on.LocalStored(shard=shard(step), path=f"/l/{step}", slot=slot))
    assert driver.all(do.DropLocal) == [do.DropLocal(path="/l/1")]
    assert driver.copies("local") == [2, 3]


def test_a_failed_upload_is_tried_again_after_a_while() -> None:
    driver = training()
    driver.snapshot(0, 1)
    driver.on(on.StoreFailed(tier="object", shard=shard(1), slot=0, reason="503"))
    assert driver.all(do.StoreObject) == []
    driver.tick(1.0)
    assert [effect.shard.step for effect in driver.all(do.StoreObject)] == [1]
    driver.on(on.StoreFailed(tier="object", shard=shard(1), slot=0, reason="503"))
    driver.tick(1.0)
    assert driver.all(do.StoreObject) == [], "the second wait is longer"


def test_a_disk_that_loses_writes_is_left_alone_each_time_longer_until_it_keeps_one() -> None:
    driver = training()
    driver.snapshot(0, 1)
    lost = on.StoreFailed(tier="local", shard=shard(1), slot=0, reason="sync failed twice", quarantine=True)
    for seconds in (60.0, 120.0, 240.0):
        driver.on(lost)
        driver.tick(seconds - 1.0)
        assert driver.all(do.StoreLocal) == []
        driver.tick(1.0)
        assert [effect.shard.step for effect in driver.all(do.StoreLocal)] == [1]
    driver.on(on.LocalStored(shard=shard(1), path="/l/1", slot=0))
    assert driver.copies("local") == [1]
    driver.on(on.ObjectStored(slot=0, receipt=shard(1).copy("object")))
    driver.snapshot(1, 2)
    assert [effect.shard.step for effect in driver.all(do.StoreLocal)] == [2], "it is healed"


def test_a_slot_is_not_held_for_a_disk_that_is_left_alone() -> None:
    driver = training()
    driver.snapshot(0, 1)
    driver.on(on.StoreFailed(tier="local", shard=shard(1), slot=0, reason="sync failed twice", quarantine=True))
    awaited = driver.core.tiers.awaited(driver.core.slots.hashed(), OFTEN, attempt_uid=UID)
    assert shard(1) not in awaited


def test_a_slot_found_damaged_while_it_was_stored_is_checked() -> None:
    driver = training()
    driver.snapshot(0, 1)
    driver.on(on.StoreFailed(tier="local", shard=shard(1), slot=0, reason="digest", damaged=True))
    assert [effect.digest for effect in driver.all(do.HashSlot)] == [shard(1).digest]


def test_shards_of_an_earlier_attempt_are_not_uploaded() -> None:
    driver = training()
    driver.snapshot(0, 1)
    driver.attempt(number=2, uid="2b", launch_id="bb", phase="opened")
    driver.on(on.StoreFailed(tier="object", shard=shard(1), slot=0, reason="503"))
    driver.tick(100.0)
    assert driver.all(do.StoreObject) == []


def test_coarseness_is_how_often_two_divides_the_interval_count() -> None:
    cadence = Cadence(from_step=100, every=5, local_every=10, object_every=20)
    assert [coarseness(cadence, step, every=20) for step in (120, 140, 160, 180, 260)] == [1, 2, 1, 3, 4]


# Peers


def holding() -> Driver:
    """Return node a as holder of node b's rank 1."""
    driver = Driver()
    driver.attempt(world=(Member(rank=0, node="a", boot_id="b0"), Member(rank=1, node="b", boot_id="b1")))
    driver.place("b", "a")
    return driver


def test_a_holder_follows_its_owners_and_pulls_the_newest_copy_of_each_rank() -> None:
    driver = holding()
    assert driver.all(do.Follow) == [do.Follow(owners=(("b", "http://b"),))]
    driver.owner(shard(1, rank=1).copy("memory"), shard(2, rank=1).copy("memory"), shard(3, rank=1).copy("local"))
    assert driver.all(do.Pull) == [do.Pull(url="http://b", shard=shard(2, rank=1), spare=0)]
    driver.owner(shard(3, rank=1).copy("memory"), version=2)
    assert driver.all(do.Pull) == [], "one at a time"
    driver.on(on.Pulled(shard=shard(2, rank=1), spare=0))
    assert driver.all(do.Pull) == [do.Pull(url="http://b", shard=shard(3, rank=1), spare=1)]
    assert driver.copies("peer") == [2]


def test_a_kept_peer_copy_is_never_overwritten() -> None:
    driver = holding()
    for step in (1, 2):
        driver.owner(shard(step, rank=1).copy("memory"), version=step)
        driver.on(on.Pulled(shard=shard(step, rank=1), spare=step - 1))
    driver.keep(1)
    driver.owner(shard(3, rank=1).copy("memory"), version=3)
    assert driver.all(do.Pull) == [], "step 2 still waits for its protection"
    driver.keep(2)
    assert driver.all(do.Pull) == [do.Pull(url="http://b", shard=shard(3, rank=1), spare=0)]


def test_a_failed_pull_is_counted_and_tried_again() -> None:
    driver = holding()
    driver.owner(shard(1, rank=1).copy("memory"))
    driver.on(on.PullFailed(shard=shard(1, rank=1), spare=0, reason="stalled"))
    assert [shout.what for shout in driver.all(do.Shout)] == ["peer-failed"]
    assert driver.copies("peer") == []
    driver.tick(1.0)
    assert driver.all(do.Pull) == [do.Pull(url="http://b", shard=shard(1, rank=1), spare=0)]


def test_copies_of_another_attempt_are_pulled_only_when_kept() -> None:
    driver = holding()
    old = shard(9, rank=1, uid="99", attempt=0)
    driver.owner(old.copy("memory"))
    assert driver.all(do.Pull) == []
    driver.keep(9, uid="99")
    assert driver.all(do.Pull) == [do.Pull(url="http://b", shard=old, spare=0)]


def test_copies_of_a_later_attempt_than_is_known_are_not_pulled() -> None:
    driver = holding()
    driver.owner(shard(1, rank=1, attempt=5).copy("memory"))
    assert driver.all(do.Pull) == []


def test_copies_of_a_dead_owner_stay_for_as_long_as_its_attempt_is_current() -> None:
    driver = holding()
    driver.owner(shard(1, rank=1).copy("memory"))
    driver.on(on.Pulled(shard=shard(1, rank=1), spare=0))
    driver.want(placement=())
    assert driver.all(do.RemoveSpares) == []
    driver.attempt(number=2, uid="2b", launch_id="bb")
    assert driver.all(do.RemoveSpares) == [do.RemoveSpares(rank=1, spares=(0,))]


# Documents


def test_a_document_that_is_older_or_of_another_job_changes_nothing() -> None:
    driver = Driver()
    driver.want()
    known = driver.core.desired
    for term, version, uid in ((1, 1, JOB_UID), (0, 99, JOB_UID), (9, 9, "ff")):
        other = Desired(job="job", job_uid=uid, term=term, version=version, url="", cadence=driver.desired.cadence)
        driver.on(on.DesiredArrived(desired=other))
        assert driver.core.desired is known


def test_the_version_grows_with_each_change_and_only_then() -> None:
    driver = training()
    before = driver.inventory.version
    driver.tick(1.0)
    assert driver.inventory.version == before
    driver.snapshot(0, 1)
    assert driver.inventory.version > before
    assert len(driver.all(do.Publish)) == 1


def test_nothing_is_published_before_it_is_known_which_job_this_is() -> None:
    driver = Driver()
    driver.hello()
    assert driver.all(do.Publish) == []
    assert driver.tick(1.0) == [do.FetchDesired()]


def test_a_sidecar_that_is_refused_ends() -> None:
    driver = Driver()
    driver.want(refused={"other": "no", "c0": "node a lives elsewhere"})
    assert driver.all(do.Exit) == [do.Exit(reason="node a lives elsewhere")]


def test_an_object_is_read_back_once_for_each_request_of_this_node() -> None:
    driver = Driver()
    mine = ReadBackTask(node="a", key="k", bytes=5, digest="d")
    driver.want(read_backs=(mine, ReadBackTask(node="b", key="l", bytes=5, digest="d")))
    assert driver.all(do.ReadObjectBack) == [do.ReadObjectBack(task=mine)]
    driver.tick(1.0)
    assert driver.all(do.ReadObjectBack) == []
    driver.on(on.ReadBackDone(result=ReadBack(key="k", digest="d", ok=True, found="d")))
    assert driver.inventory.read_backs == (ReadBack(key="k", digest="d", ok=True, found="d"),)
    driver.want(read_backs=())
    assert not driver.inventory.read_backs


def test_a_store_that_does_not_answer_is_asked_again() -> None:
    driver = Driver()
    task = ReadBackTask(node="a", key="k", bytes=5, digest="d")
    driver.want(read_backs=(task,))
    driver.on(on.ReadBackFailed(key="k"))
    assert driver.all(do.ReadObjectBack) == [do.ReadObjectBack(task=task)]
    assert driver.inventory.read_backs == ()


def test_a_trainer_is_told_of_each_change_once() -> None:
    driver = Driver()
    driver.train()
    driver.want(protected_step=5)
    assert [frame.protected_step for frame in driver.sent(wire.Desired)] == [5]
    driver.want(url="http://elsewhere")
    assert driver.sent(wire.Desired) == []


@given(order=st.permutations(range(6)), doubled=st.lists(st.integers(0, 5), max_size=6))
def test_doubled_and_reordered_documents_end_in_the_same_state(order: list[int], doubled: list[int]) -> None:
    documents = [
        Desired(
            job="job",
            job_uid=JOB_UID,
            term=1 + number // 3,
            version=1 + number % 3,
            url="",
            cadence=Cadence(from_step=0, every=1, local_every=1, object_every=1),
            protected_step=number,
        )
        for number in range(6)
    ]
    driver = Driver()
    for number in [*order, *doubled]:
        driver.on(on.DesiredArrived(desired=documents[number]))
    assert driver.core.desired == documents[5]


def test_frames_before_hello_are_refused() -> None:
    driver = Driver()
    driver.frame(wire.Size(bytes=5))
    assert [frame.code for frame in driver.sent(wire.Error)] == ["refused"]
    assert driver.all(do.Hangup) == [do.Hangup(connection=1)]


def test_a_trainer_of_another_job_version_or_rank_is_refused_by_name() -> None:
    driver = Driver()
    for changes, text in (
        (
            {"job": "other"},
            "this is the sidecar of job job, not of job other: name that job's own socket in CKPT_SOCKET",
        ),
        ({"version": 2}, "frames of version 2; this sidecar speaks 1"),
        ({"rank": 3}, "rank 3 of 1, launch 'aa'"),
    ):
        values = {"job": "job", "launch_id": "aa", "rank": 0, "world": 1, "pid": 1} | changes
        driver.frame(wire.Hello(**values))  # type: ignore[arg-type]
        assert [frame.text for frame in driver.sent(wire.Error)] == [text]


def test_a_step_of_which_the_hook_had_no_slot_is_in_the_inventory() -> None:
    driver = Driver()
    driver.train()
    driver.frame(wire.Skipped(attempt_uid=UID, step=4, reason="no free slot"))
    assert [(skip.step, skip.reason) for skip in driver.inventory.skipped] == [(4, "no free slot")]
    assert driver.inventory.ranks[0].step == 4


def test_trainers_are_told_which_tier_fails_and_that_it_does_no_more() -> None:
    driver = training()
    driver.snapshot(0, 1)
    driver.on(on.StoreFailed(tier="object", shard=shard(1), slot=0, reason="503"))
    assert [frame.trouble for frame in driver.sent(wire.Desired)] == ["the object tier fails: 503"]
    driver.tick(1.0)
    receipt = shard(1).copy("object", key="k")
    driver.on(on.ObjectStored(slot=0, receipt=receipt))
    assert [frame.trouble for frame in driver.sent(wire.Desired)] == [""]
