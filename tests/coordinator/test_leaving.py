"""Where ranks end that are about to be ended: one step to come for all, which stays unless a rank is past it."""

from __future__ import annotations

import msgspec
from tests.support.reigns import Reign, training

from toprope.coordinator.events import SeenDesired
from toprope.coordinator.wire import StepAsk


def ask(reign: Reign, rank: int, *, after: int, step: int) -> None:
    """Let a rank ask."""
    for node in reign.nodes.values():
        if rank in node.ranks:
            node.ranks[rank] = msgspec.structs.replace(node.ranks[rank], ask=StepAsk(after=after, step=step))
    reign.hear()


def test_a_step_that_one_rank_asks_for_is_named_to_all_and_said() -> None:
    reign = training()
    assert reign.desired.extra_step == 0
    ask(reign, 1, after=5, step=9)
    assert reign.desired.extra_step == 9
    assert "all save step 9 and end there" in reign.said[-1].text


def test_the_first_step_stays_whatever_others_ask_for_before_it() -> None:
    reign = training()
    ask(reign, 0, after=5, step=9)
    ask(reign, 1, after=5, step=8)
    ask(reign, 0, after=6, step=10)
    ask(reign, 1, after=8, step=12)
    assert reign.desired.extra_step == 9


def test_a_rank_that_has_gone_past_it_moves_it_to_the_latest_step_asked_for() -> None:
    reign = training()
    ask(reign, 0, after=5, step=9)
    ask(reign, 1, after=9, step=12)
    assert reign.desired.extra_step == 12
    ask(reign, 0, after=9, step=11)
    assert reign.desired.extra_step == 12


def test_it_is_that_of_one_attempt_only() -> None:
    reign = training()
    ask(reign, 0, after=5, step=9)
    reign.end_trainers()
    assert reign.ask("a", "b", launch_id="2b" * 16) is not None
    assert reign.state.attempt_number == 2
    assert reign.desired.extra_step == 0


def test_a_successor_names_the_step_that_was_named_before_it() -> None:
    reign = training()
    ask(reign, 0, after=5, step=9)
    ask(reign, 1, after=5, step=11)
    after = reign.successor()
    after.do(SeenDesired(desired=reign.desired, now_s=after.now_s))
    after.hear()
    assert after.desired.extra_step == 9


def test_a_successor_that_sees_no_document_has_the_asks() -> None:
    reign = training()
    ask(reign, 0, after=5, step=9)
    after = reign.successor()
    after.hear()
    assert after.desired.extra_step == 9


def test_a_document_of_another_attempt_says_nothing_of_this_one() -> None:
    reign = training()
    ask(reign, 0, after=5, step=9)
    old = reign.desired
    reign.end_trainers()
    assert reign.ask("a", "b", launch_id="3c" * 16) is not None
    after = reign.successor()
    after.do(SeenDesired(desired=old, now_s=after.now_s))
    after.hear()
    assert after.desired.extra_step == 0
