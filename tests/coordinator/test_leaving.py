"""Where ranks end that are about to be ended: one step to come for all, which stays unless a rank is past it."""

from __future__ import annotations

import msgspec
import pytest
from tests.support.reigns import Reign, training

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


def tell(reign: Reign, *ranks: int) -> None:
    """Let nodes say which step they were told, as far as these ranks are theirs."""
    for node in reign.nodes.values():
        for rank in set(node.ranks) & set(ranks):
            node.ranks[rank] = msgspec.structs.replace(node.ranks[rank], extra_step=reign.desired.extra_step)


@pytest.mark.parametrize("ranks", [(0, 1), (0,), (1,)])
def test_a_successor_names_the_step_that_the_nodes_were_told_before_it(ranks: tuple[int, ...]) -> None:
    reign = training()
    ask(reign, 0, after=5, step=9)
    tell(reign, *ranks)
    ask(reign, 1, after=5, step=11)
    after = reign.successor()
    after.hear()
    assert after.desired.extra_step == 9


def test_a_successor_moves_it_for_a_rank_that_has_gone_past_it() -> None:
    reign = training()
    ask(reign, 0, after=5, step=9)
    tell(reign, 0)
    ask(reign, 1, after=9, step=12)
    after = reign.successor()
    after.hear()
    assert after.desired.extra_step == 12


def test_a_successor_whose_nodes_were_told_nothing_yet_has_the_asks() -> None:
    reign = training()
    ask(reign, 0, after=5, step=9)
    after = reign.successor()
    after.hear()
    assert after.desired.extra_step == 9


def test_what_was_told_of_another_attempt_says_nothing_of_this_one() -> None:
    reign = training()
    ask(reign, 0, after=5, step=9)
    tell(reign, 0, 1)
    reign.end_trainers()
    assert reign.ask("a", "b", launch_id="3c" * 16) is not None
    after = reign.successor()
    after.hear()
    assert after.desired.extra_step == 0
