"""Attempts in a row that are opened without the log: each carries those before it, and an orphan holds nobody up."""

from __future__ import annotations

import msgspec
import pytest
from tests.coordinator.test_log_outage import AGAIN, THIRD, away, opened, opened_twice, waits
from tests.support.reigns import Reign

from toprope.coordinator import outage
from toprope.coordinator.effects import Enter, Learn
from toprope.coordinator.wire import Provisional


def chain_of_two() -> tuple[Reign, Provisional, Provisional]:
    """Return a reign with two attempts that the log does not have, both adopted by a and b."""
    reign = away()
    opened_twice(reign)
    one, two = reign.nodes["a"].adopted
    return reign, one, two


def only_the_newcomer_lives(reign: Reign, *adopted: Provisional) -> Reign:
    """Return a successor that hears one node only, which came last and adopted these."""
    reign.node("c").adopted.extend(adopted)
    for name in "ab":
        reign.nodes[name].up = False
    reign.log_up = True
    after = reign.successor()
    after.hear("c")
    return after


def test_a_proposal_carries_what_must_come_into_the_log_before_it() -> None:
    _, one, two = chain_of_two()
    assert one.before == ()
    assert two.before == (one,)
    assert two.parent == one.uid


def test_who_knows_the_last_of_a_chain_brings_all_of_it_into_the_log() -> None:
    reign, one, two = chain_of_two()
    after = only_the_newcomer_lives(reign, two)
    after.wait(6.0)
    assert [attempt.uid for attempt in after.state.attempts[1:]] == [one.uid, two.uid]
    assert not after.core.held_up


def test_an_attempt_whose_forerunner_nobody_knows_holds_no_launch_up() -> None:
    reign, one, two = chain_of_two()
    after = only_the_newcomer_lives(reign, msgspec.structs.replace(two, before=()))
    assert two.uid in after.core.outage.pending
    assert not after.core.held_up
    for name in "ab":
        after.nodes[name].up = True
        after.nodes[name].adopted.clear()
    after.hear()
    assert after.ask("a", "b", launch_id="4d" * 16) is not None
    assert after.state.attempt_number == 2
    assert after.desired.fenced == (two.uid,)
    assert one.uid not in after.core.outage.pending


def test_a_chain_that_fills_a_document_waits_for_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    reign = away()
    first = opened(reign)
    reign.verdict_of(first)
    reign.end_trainers()
    monkeypatch.setattr(outage, "CHAIN_BYTES_MAX", 100)
    assert "it must take the 1 attempts first" in waits(reign.ask("a", "b", launch_id=THIRD))
    reign.log_away("")
    assert [one.launch_id for one in reign.state.attempts[1:]] == [AGAIN]


def test_nothing_is_decided_beside_what_a_node_has_adopted_and_is_not_known_yet() -> None:
    reign, other = away(), away()
    opened(other)
    reign.held_back = {Learn}
    reign.nodes["b"].adopted.append(other.nodes["b"].adopted[0])
    reign.hear("b")
    assert "these nodes have adopted what is not known here yet: b" in waits(reign.ask("a", "b", launch_id=THIRD))
    assert reign.desired.proposed is None
    reign.release()
    assert reign.desired.proposed == other.nodes["b"].adopted[0]


def test_a_successor_says_nothing_before_what_it_learns_of_is_in_the_log() -> None:
    reign, one, two = chain_of_two()
    reign.log_up = True
    after = reign.successor()
    after.held_back = {Enter}
    after.hear()
    assert after.published == []
    after.release()
    assert [said.attempt.uid for said in after.published if said.attempt is not None] == [two.uid]
    assert one.uid in {attempt.uid for attempt in after.state.attempts}


def test_one_that_can_not_bring_it_in_speaks_all_the_same_after_a_while() -> None:
    reign, _, _ = chain_of_two()
    reign.log_up = True
    after = reign.successor()
    after.held_back = {Learn}
    after.hear()
    after.wait(4.0)
    assert after.published == []
    after.wait(2.0)
    assert after.published[-1].logged == 1
