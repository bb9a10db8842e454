"""What a coordinator remembers of steps while none becomes READY: the newest, and the newest that is complete."""

from __future__ import annotations

import pytest
from tests.support.reigns import FakeNode, copy_of, training

from toprope.coordinator.commits import Commits, steps_max
from toprope.coordinator.effects import Effect, Say
from toprope.coordinator.events import CommitFailed
from toprope.coordinator.wire import Copy

KEPT = steps_max(2)


def commits() -> tuple[Commits, str]:
    state = training().state
    attempt = state.attempt
    assert attempt is not None
    return Commits(attempt=attempt, last_step=0, retry_s=2.0, read_back_deadline_s=30.0), attempt.uid


def tell(book: Commits, *copies: Copy) -> None:
    book.collect(FakeNode(name="a", job_uid="0b" * 16, copies=list(copies)).inventory())


def steer(book: Commits) -> list[Effect]:
    return book.steer(last_step=0, readers=("a", "b"), now_s=0.0)


def test_of_many_steps_the_oldest_are_passed_over_but_the_newest_complete_one_is_not() -> None:
    book, uid = commits()
    tell(book, copy_of(uid, 1, 0, "object"), copy_of(uid, 1, 1, "object"))
    for step in range(2, 400):
        tell(book, copy_of(uid, step, 0, "object"))
    assert sorted(book.receipts) == [1, *range(400 - KEPT, 400)]
    assert {one.step for one in book.copies()} == set(book.receipts)
    assert len(book._written) == KEPT + 2
    tell(book, copy_of(uid, 50, 0, "object"), copy_of(uid, 50, 1, "object"))
    assert 50 not in book.receipts
    tell(book, copy_of(uid, 399, 1, "object"))
    for step in range(400, 402):
        tell(book, copy_of(uid, step, 0, "object"))
    assert 1 not in book.receipts
    assert 399 in book.receipts


def test_the_step_that_is_being_read_back_is_not_passed_over() -> None:
    book, uid = commits()
    tell(book, copy_of(uid, 1, 0, "object"), copy_of(uid, 1, 1, "object"))
    steer(book)
    assert book.under_way == 1
    for step in range(2, 400):
        tell(book, copy_of(uid, step, 0, "object"), copy_of(uid, step, 1, "object"))
    assert sorted(book.receipts) == [1, *range(400 - KEPT, 400)]
    assert book.under_way == 1


def test_a_step_that_is_dead_is_not_kept_in_the_place_of_one_that_can_become_ready() -> None:
    book, uid = commits()
    for step in (1, 2):
        tell(book, copy_of(uid, step, 0, "object"), copy_of(uid, step, 1, "object"))
    book.failed(CommitFailed(attempt_uid=uid, step=2, text="its bytes are wrong", final=True, now_s=0.0))
    for step in range(3, 400):
        tell(book, copy_of(uid, step, 0, "object"))
    assert sorted(book.receipts) == [1, *range(400 - KEPT, 400)]
    steer(book)
    assert book.under_way == 1


def test_a_rank_that_is_many_steps_behind_still_completes_them() -> None:
    book, uid = commits()
    for step in range(1, 201):
        tell(book, copy_of(uid, step, 0, "object"))
    tell(book, copy_of(uid, 1, 1, "object"))
    steer(book)
    assert book.under_way == 1


@pytest.mark.parametrize(("world", "steps"), [(1, 256), (390, 256), (1000, 100), (3125, 32), (100_000, 32)])
def test_of_few_ranks_more_steps_are_remembered(world: int, steps: int) -> None:
    assert steps_max(world) == steps


def test_that_steps_are_given_up_while_none_is_complete_is_said_aloud_once() -> None:
    book, uid = commits()
    tell(book, copy_of(uid, 1, 1, "object"))
    for step in range(2, KEPT + 1):
        tell(book, copy_of(uid, step, 0, "object"))
    assert steer(book) == []
    said: list[Effect] = []
    for step in range(KEPT + 1, KEPT + 9):
        tell(book, copy_of(uid, step, 0, "object"))
        said += steer(book)
    (say,) = said
    assert isinstance(say, Say)
    assert say.level == "error"
    assert "step 1 and those before are given up; furthest behind is rank 1, which wrote step 1 last" in say.text


def test_nothing_is_said_while_a_step_that_can_become_ready_is_kept() -> None:
    book, uid = commits()
    tell(book, copy_of(uid, 1, 0, "object"), copy_of(uid, 1, 1, "object"))
    for step in range(2, 400):
        tell(book, copy_of(uid, step, 0, "object"))
    assert not any(isinstance(effect, Say) for effect in steer(book))
