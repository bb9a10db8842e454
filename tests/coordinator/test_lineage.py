"""What nodes list counts only for the attempt, the world and the digest that it is of."""

from __future__ import annotations

import pytest
from tests.support.reigns import LAUNCH, Reign, copy_of, training

from toprope.coordinator.events import CommitFailed
from toprope.coordinator.protection import Safety, keep
from toprope.coordinator.wire import AttemptView, Kept, ReadBack, Tier

OTHER, THIRD = "2b" * 16, "3c" * 16


def begun(reign: Reign, launch_id: str) -> AttemptView:
    """Restart the job on the same nodes and return its new attempt."""
    reign.end_trainers()
    answer = reign.ask("a", "b", launch_id=launch_id)
    assert answer is not None
    assert answer.attempt is not None, answer
    return answer.attempt


def uid_of(reign: Reign) -> str:
    assert reign.state.attempt is not None
    return reign.state.attempt.uid


def test_what_an_attempt_wrote_after_the_step_that_the_next_began_from_is_on_no_lineage() -> None:
    reign = training()
    first = uid_of(reign)
    reign.hold(2, tiers=("memory", "peer"))
    reign.hold(4, ranks=(0,))
    assert begun(reign, OTHER).from_step == 2
    reign.nodes["b"].copies.append(copy_of(first, 4, 1, "memory"))
    reign.hear()
    assert begun(reign, THIRD).from_step == 2


def list_for_a_world_of_three(reign: Reign, step: int, *tiers: Tier) -> None:
    """Let ranks 0 and 1 list copies that say that they are of three ranks."""
    for tier in tiers:
        for rank, name in enumerate(("a", "b") if tier != "peer" else ("b", "a")):
            reign.nodes[name].copies.append(copy_of(uid_of(reign), step, rank, tier, world=3))
    reign.hear()


def test_copies_of_another_world_are_not_begun_from() -> None:
    reign = training()
    reign.hold(2, tiers=("memory", "peer"))
    list_for_a_world_of_three(reign, 4, "memory", "peer")
    assert begun(reign, OTHER).from_step == 2


def test_copies_of_another_world_protect_nothing() -> None:
    reign = training()
    reign.hold(2, tiers=("memory", "peer"))
    list_for_a_world_of_three(reign, 4, "memory", "peer")
    assert reign.desired.protected_step == 2
    assert reign.desired.keep == (Kept(attempt_uid=uid_of(reign), step=2),)


def test_receipts_of_another_world_do_not_make_a_step() -> None:
    reign = training()
    list_for_a_world_of_three(reign, 8, "object")
    assert reign.desired.read_backs == ()
    assert reign.ready_steps == []


def test_a_receipt_of_a_rank_that_the_world_does_not_have_stands_for_none_that_is_missing() -> None:
    reign = training()
    reign.hold(8, tiers=("object",), ranks=(0,))
    reign.nodes["b"].copies.append(copy_of(uid_of(reign), 8, 5, "object"))
    reign.hear()
    assert reign.desired.read_backs == ()


def test_a_read_back_of_another_digest_than_the_receipts_vouches_for_nothing() -> None:
    reign = training()
    reign.hold(8, tiers=("object",))
    for task in reign.desired.read_backs:
        reign.nodes[task.node].read_backs.append(ReadBack(key=task.key, digest="ee" * 16, ok=True, found="ee" * 16))
    reign.hear()
    assert reign.ready_steps == []
    for node in reign.nodes.values():
        node.read_backs.clear()
    reign.read_back()
    assert reign.ready_steps == [8]


def test_a_commit_of_an_earlier_attempt_that_failed_says_nothing_of_this_ones() -> None:
    reign = training()
    reign.do(CommitFailed(attempt_uid="ee" * 16, step=8, text="moved", final=True, now_s=reign.now_s))
    reign.wait(3)
    reign.hold(8, tiers=("object",))
    reign.read_back()
    assert reign.ready_steps == [8]


@pytest.mark.parametrize(("at_hand", "kept"), [((2, 4), 4), ((2,), 2)])
def test_a_step_that_is_nowhere_any_more_is_kept_no_longer(at_hand: tuple[int, ...], kept: int) -> None:
    safety = Safety(protected_step=0, guarded_step=0, at_hand_step=2, at_hand=frozenset(at_hand))
    before = (Kept(attempt_uid=LAUNCH, step=4),)
    found = keep(safety, attempt_uid=LAUNCH, source=None, before=before, can_protect=True)
    assert found == (Kept(attempt_uid=LAUNCH, step=kept),)


def test_a_job_whose_only_step_is_in_doubt_is_not_begun_afresh() -> None:
    reign = training()
    reign.hold(2)
    reign.nodes["b"].copies.append(copy_of(uid_of(reign), 2, 0, "peer", digest_is="ff" * 16))
    reign.end_trainers()
    answer = reign.ask("a", "b", launch_id=OTHER)
    assert answer is not None
    assert (answer.code, "different digests" in answer.text) == ("nothing-left", True)
