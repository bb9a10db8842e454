"""What a coordinator remembers of steps while none becomes READY: the newest, and the newest that is complete."""

from __future__ import annotations

from tests.support.reigns import FakeNode, copy_of, training

from toprope.coordinator.commits import STEPS_MAX, Commits
from toprope.coordinator.wire import Copy


def commits() -> tuple[Commits, str]:
    state = training().state
    attempt = state.attempt
    assert attempt is not None
    return Commits(attempt=attempt, last_step=0, retry_s=2.0, read_back_deadline_s=30.0), attempt.uid


def tell(book: Commits, *copies: Copy) -> None:
    book.collect(FakeNode(name="a", job_uid="0b" * 16, copies=list(copies)).inventory())


def test_of_many_steps_the_oldest_are_passed_over_but_the_newest_complete_one_is_not() -> None:
    book, uid = commits()
    tell(book, copy_of(uid, 1, 0, "object"), copy_of(uid, 1, 1, "object"))
    for step in range(2, 200):
        tell(book, copy_of(uid, step, 0, "object"))
    assert sorted(book.receipts) == [1, *range(200 - STEPS_MAX, 200)]
    assert {one.step for one in book.copies()} == set(book.receipts)
    assert len(book._written) == STEPS_MAX + 2
    tell(book, copy_of(uid, 50, 0, "object"), copy_of(uid, 50, 1, "object"))
    assert 50 not in book.receipts
    tell(book, copy_of(uid, 199, 1, "object"))
    for step in range(200, 202):
        tell(book, copy_of(uid, step, 0, "object"))
    assert 1 not in book.receipts
    assert 199 in book.receipts


def test_the_step_that_is_being_read_back_is_not_passed_over() -> None:
    book, uid = commits()
    tell(book, copy_of(uid, 1, 0, "object"), copy_of(uid, 1, 1, "object"))
    book.steer(last_step=0, readers=("a", "b"), now_s=0.0)
    assert book.under_way == 1
    for step in range(2, 200):
        tell(book, copy_of(uid, step, 0, "object"), copy_of(uid, step, 1, "object"))
    assert sorted(book.receipts) == [1, *range(200 - STEPS_MAX, 200)]
    assert book.under_way == 1
