"""What the core stages for a restore and what trainers are told, as sentences."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.core_driver import UID, Driver, shard

from toprope.coordinator.wire import OpenAnswer, RestoreShard, Source
from toprope.sidecar import effects as do
from toprope.sidecar import events as on
from toprope.sidecar.restore_book import RestoreBook
from toprope.sidecar.values import RESTORE_PATIENCE_S, Way
from toprope.trainer_hooks.link import wire

NEW = "2b" * 16
WANTED = RestoreShard(
    rank=0,
    bytes=50,
    digest=shard(1).digest,
    sources=(
        Source(tier="memory", node="a", url="http://a"),
        Source(tier="peer", node="b", url="http://b"),
        Source(tier="object", key="k"),
    ),
)
JOIN = wire.Join(attempt_uid=NEW, ask=1, wants=(wire.Want(rank=0, tensors=(wire.ALL,)),))
STAGED = wire.StagedShard(rank=0, path="/p", bytes=50, digest=shard(1).digest, tier="peer", node="b")


def opened(phase: str = "opened") -> Driver:
    """Return a node whose trainer of launch bb has joined attempt 2, to be restored from step 1 of attempt 1."""
    driver = Driver()
    driver.want()
    driver.hello(launch_id="bb")
    reopen(driver, phase)
    driver.frame(JOIN)
    return driver


def reopen(
    driver: Driver,
    phase: str,
    *,
    uid: str = NEW,
    number: int = 2,
    wanted: RestoreShard = WANTED,
    **changes: Any,  # noqa: ANN401 - fields of AttemptView
) -> None:
    """Let attempt 2 be in this phase."""
    driver.attempt(
        number=number,
        uid=uid,
        launch_id="bb",
        source="held",
        source_attempt_uid=UID,
        from_step=1,
        restore=(wanted,),
        phase=phase,
        **changes,
    )


def test_each_shard_is_staged_once_by_the_ways_of_the_decision() -> None:
    driver = opened()
    (stage,) = driver.all(do.Stage)
    assert stage.ways == (
        Way(kind="node", tier="peer", node="b", url="http://b"),
        Way(kind="object", tier="object", key="k"),
    )
    driver.hello(connection=2, launch_id="bb", rank=1, world=2)
    driver.frame(JOIN, connection=2)
    assert driver.all(do.Stage) == []


def test_own_copies_of_that_digest_come_first_nearest_first() -> None:
    driver = Driver()
    driver.train()
    driver.snapshot(0, 1)
    driver.on(on.LocalStored(shard=shard(1), path="/l/1", slot=None))
    driver.on(on.SpareSeen(rank=0, spare=1, shard=shard(1, digest="f" * 32)))
    reopen(driver, "opened")
    driver.hello(connection=2, launch_id="bb")
    driver.frame(JOIN, connection=2)
    (stage,) = driver.all(do.Stage)
    assert [(way.kind, way.tier, way.path) for way in stage.ways[:2]] == [
        ("here", "memory", "/slots/0/0"),
        ("here", "local", "/l/1"),
    ]
    assert [way.kind for way in stage.ways[2:]] == ["node", "object"], "a copy of another digest is no way"


@pytest.mark.parametrize("tier", ["memory", "peer", "local"])
def test_a_copy_that_the_coordinator_has_not_heard_of_is_staged_with_its_own_length(tier: str) -> None:
    driver = Driver()
    driver.train()
    if tier == "memory":
        driver.snapshot(0, 1)
    elif tier == "peer":
        driver.on(on.SpareSeen(rank=0, spare=1, shard=shard(1)))
    else:
        driver.on(on.LocalStored(shard=shard(1), path="/l/1", slot=None))
    reopen(driver, "opened", wanted=RestoreShard(rank=0, bytes=0, digest=shard(1).digest, sources=()))
    driver.hello(connection=2, launch_id="bb")
    driver.frame(JOIN, connection=2)
    (stage,) = driver.all(do.Stage)
    assert [(way.kind, way.tier) for way in stage.ways] == [("here", tier)]
    assert stage.shard.bytes == shard(1).bytes, "of no bytes it would be another digest, and the good copy given up"


def test_a_shard_that_nobody_has_yet_is_looked_for_again_wherever_it_turns_up() -> None:
    driver = Driver()
    driver.want()
    driver.hello(launch_id="bb")
    reopen(driver, "opened", wanted=RestoreShard(rank=0, bytes=0, digest=shard(1).digest, sources=()))
    driver.frame(JOIN)
    (stage,) = driver.all(do.Stage)
    assert stage.ways == ()
    driver.on(on.StageFailed(attempt_uid=NEW, rank=0, reason="nobody has it just now", again=True))
    reopen(driver, "opened")
    driver.tick(1.0)
    assert [(stage.shard, len(stage.ways)) for stage in driver.all(do.Stage)] == [(WANTED, 2)]


def wants(*tensors: str) -> tuple[wire.Want, ...]:
    return (wire.Want(rank=0, tensors=tensors),)


def test_only_what_the_ranks_of_this_node_want_is_staged_together_and_once() -> None:
    driver = Driver()
    driver.want()
    driver.hello(launch_id="bb")
    driver.hello(connection=2, launch_id="bb", rank=1, world=2)
    reopen(driver, "opened")
    driver.frame(wire.Join(attempt_uid=NEW, ask=1))
    assert driver.all(do.Stage) == [], "nothing is wanted"
    assert [staged.shards for staged in driver.sent(wire.Staged)] == [()]
    driver.frame(wire.Join(attempt_uid=NEW, ask=2, wants=wants("a")))
    (first,) = driver.all(do.Stage)
    assert (first.tensors, first.part) == (frozenset({"a"}), 1)
    driver.frame(wire.Join(attempt_uid=NEW, ask=1, wants=wants("b")), connection=2)
    assert driver.all(do.Stage) == [], "one at a time"
    driver.on(on.ShardStaged(attempt_uid=NEW, shard=STAGED, tensors=frozenset({"a"})))
    assert driver.sent(wire.Staged) == [wire.Staged(attempt_uid=NEW, ask=2, shards=(STAGED,))]
    (second,) = driver.all(do.Stage)
    assert (second.tensors, second.part) == (frozenset({"a", "b"}), 2), "into another file: the first one is being read"
    driver.on(on.ShardStaged(attempt_uid=NEW, shard=STAGED, tensors=frozenset({"a", "b"})))
    assert driver.sent(wire.Staged, connection=2) == [wire.Staged(attempt_uid=NEW, ask=1, shards=(STAGED,))]
    driver.frame(wire.Join(attempt_uid=NEW, ask=3, wants=wants("b")))
    assert driver.all(do.Stage) == [], "it is here"
    assert driver.sent(wire.Staged) == [wire.Staged(attempt_uid=NEW, ask=3, shards=(STAGED,))]


def test_a_shard_that_is_here_whole_serves_every_want_and_all_of_it_is_asked_for_once() -> None:
    driver = opened()
    (stage,) = driver.all(do.Stage)
    assert stage.tensors == {wire.ALL}
    driver.on(on.ShardStaged(attempt_uid=NEW, shard=STAGED))
    for ask, tensors in ((2, ("a",)), (3, (wire.ALL,)), (4, ())):
        driver.frame(wire.Join(attempt_uid=NEW, ask=ask, wants=wants(*tensors)))
        assert driver.all(do.Stage) == []
        assert driver.sent(wire.Staged) == [wire.Staged(attempt_uid=NEW, ask=ask, shards=(STAGED,))]


def test_a_rank_that_the_source_does_not_have_is_not_waited_for() -> None:
    driver = opened()
    driver.frame(wire.Join(attempt_uid=NEW, ask=2, wants=(wire.Want(rank=7),)))
    assert [staged.shards for staged in driver.sent(wire.Staged)] == [()]


def test_nothing_is_staged_before_a_rank_has_joined() -> None:
    driver = Driver()
    driver.want()
    reopen(driver, "opened")
    assert driver.all(do.Stage) == []


def test_the_trainer_goes_step_by_step_as_all_ranks_do() -> None:
    driver = opened()
    assert driver.sent(wire.Staged) == []
    driver.on(on.ShardStaged(attempt_uid=NEW, shard=STAGED))
    assert driver.sent(wire.Staged) == [wire.Staged(attempt_uid=NEW, ask=1, shards=(STAGED,))]
    driver.frame(wire.Verdict(attempt_uid=NEW, phase="staged", ok=True))
    assert driver.sent(wire.Go) == []
    verdict = driver.inventory.ranks[0].verdict
    assert verdict is not None
    assert (verdict.phase, verdict.ok) == ("staged", True)
    reopen(driver, "staged")
    assert driver.sent(wire.Go) == [wire.Go(attempt_uid=NEW, phase="staged", ok=True)]
    reopen(driver, "applied")
    assert driver.sent(wire.Go) == [wire.Go(attempt_uid=NEW, phase="applied", ok=True)]
    driver.tick(1.0)
    assert driver.all(do.Send) == []


def test_a_late_document_still_tells_both_phases_in_order() -> None:
    driver = opened("applied")
    driver.on(on.ShardStaged(attempt_uid=NEW, shard=STAGED))
    assert [go.phase for go in driver.sent(wire.Go)] == ["staged", "applied"]


def test_a_shard_that_cannot_be_had_is_the_verdict_of_the_rank() -> None:
    driver = opened()
    driver.on(on.StageFailed(attempt_uid=NEW, rank=0, reason="peer of b: gone"))
    verdict = driver.inventory.ranks[0].verdict
    assert verdict is not None
    assert (verdict.attempt_uid, verdict.ok, verdict.reason) == (NEW, False, "rank 0: peer of b: gone")
    assert not verdict.unanswered


def test_a_shard_whose_holder_does_not_answer_is_tried_again_and_costs_no_verdict() -> None:
    driver = opened()
    driver.on(on.StageFailed(attempt_uid=NEW, rank=0, reason="peer of b: no answer", again=True))
    assert [state.verdict for state in driver.inventory.ranks] == [None]
    driver.tick(0.5)
    assert driver.all(do.Stage) == []
    driver.tick(0.5)
    assert [stage.shard for stage in driver.all(do.Stage)] == [WANTED]
    driver.tick(5.0)
    assert driver.all(do.Stage) == [], "it is being tried"
    driver.tick(RESTORE_PATIENCE_S)
    driver.on(on.StageFailed(attempt_uid=NEW, rank=0, reason="peer of b: no answer", again=True))
    verdict = driver.inventory.ranks[0].verdict
    assert verdict is not None
    assert (verdict.ok, verdict.unanswered, verdict.reason) == (False, True, "rank 0: peer of b: no answer")


def test_a_shard_is_tried_again_for_as_long_as_this_sidecar_was_told() -> None:
    book = RestoreBook(attempt_uid=NEW, began_s=100.0)
    failed = on.StageFailed(attempt_uid=NEW, rank=0, reason="peer of b: no answer", again=True)
    book.on_failed(failed, now_s=149.0, patience_s=50.0)
    assert book.verdict(NEW) is None
    book.on_failed(failed, now_s=150.0, patience_s=50.0)
    assert book.verdict(NEW) is not None


@pytest.mark.parametrize("misfit", [False, True])
def test_a_failed_attempt_sends_every_trainer_back(*, misfit: bool) -> None:
    driver = opened()
    reopen(driver, "failed", reason="rank 1 has none", misfit=misfit)
    over = wire.Go(attempt_uid=NEW, phase="staged", ok=False, reason="rank 1 has none", misfit=misfit)
    assert driver.sent(wire.Go) == [over]
    driver.tick(1.0)
    assert driver.all(do.Send) == []


def test_an_attempt_that_is_replaced_while_it_is_restored_sends_its_trainer_back() -> None:
    driver = opened()
    reopen(driver, "opened", uid="3c" * 16, number=3)
    (go,) = driver.sent(wire.Go)
    assert (go.attempt_uid, go.ok) == (NEW, False)


def test_an_attempt_that_was_replaced_before_it_was_heard_of_here_does_not_keep_a_trainer_waiting() -> None:
    driver = Driver()
    driver.want()
    driver.hello(launch_id="bb")
    reopen(driver, "opened", uid="3c" * 16, number=3)
    driver.frame(JOIN)
    for _ in range(2):
        driver.on(on.DesiredConfirmed())
        assert driver.sent(wire.Go) == []
    driver.on(on.DesiredConfirmed())
    assert [go.ok for go in driver.sent(wire.Go)] == [False]


def test_while_a_trainer_waits_for_its_attempt_the_coordinator_is_asked() -> None:
    driver = Driver()
    driver.want()
    driver.tick(10.0)
    driver.hello(launch_id="bb")
    driver.frame(JOIN)
    assert driver.all(do.FetchDesired) == [do.FetchDesired()]
    driver.tick(0.1)
    assert driver.all(do.FetchDesired) == [], "but not without pause"
    driver.tick(0.3)
    assert driver.all(do.FetchDesired) == [do.FetchDesired()]


def test_open_is_answered_when_the_document_with_that_attempt_is_here() -> None:
    driver = Driver()
    driver.want()
    driver.hello(launch_id="bb")
    reopen(driver, "opened")
    view = driver.desired.attempt
    fresh = Driver()
    fresh.want()
    fresh.hello(launch_id="bb")
    fresh.on(on.OpenAnswered(connection=1, answer=OpenAnswer(attempt=view)))
    assert fresh.sent(wire.Attempt) == []
    reopen(fresh, "opened")
    (answer,) = fresh.sent(wire.Attempt)
    assert (answer.uid, answer.from_step, answer.source) == (NEW, 1, "held")


def test_errors_of_the_coordinator_are_passed_on() -> None:
    driver = Driver()
    driver.want()
    driver.hello()
    driver.on(on.OpenAnswered(connection=1, answer=OpenAnswer(code="busy", text="rank 0 lives on b")))
    assert driver.sent(wire.Error) == [wire.Error(code="busy", text="rank 0 lives on b")]


def test_staged_files_are_dropped_once_the_attempt_is_applied_or_over() -> None:
    for end in ("applied", "failed"):
        driver = opened()
        reopen(driver, end)
        assert driver.all(do.DropStage) == [do.DropStage(keep="")]


def test_a_damaged_own_copy_is_listed_no_more() -> None:
    driver = Driver()
    driver.train()
    driver.snapshot(0, 1)
    driver.on(on.LocalStored(shard=shard(1), path="/l/1", slot=None))
    driver.on(on.SpareSeen(rank=0, spare=0, shard=shard(1)))
    for tier in ("memory", "peer", "local"):
        assert driver.copies(tier) == [1]
        driver.on(on.CopyDoubted(attempt_uid=UID, step=1, rank=0, tier=tier))
        assert driver.copies(tier) == []
