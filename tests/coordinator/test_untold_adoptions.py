"""A node that reports an adoption and can't be asked for it: waited for a while, asked for ever, and said aloud."""

from __future__ import annotations

from tests.coordinator.test_log_outage import AGAIN, THIRD, away, waits
from tests.support.reigns import Reign, shown

from toprope.coordinator.effects import Learn
from toprope.coordinator.events import Learned
from toprope.coordinator.outage import UNHEARD_MAX


def with_one_whose_port_is_shut() -> Reign:
    """Return a successor that hears of an adoption of node c, which nobody else has, and can't ask for it."""
    reign = away()
    assert reign.ask("a", "b", launch_id=AGAIN) is None
    reign.node("c")
    reign.adopt("c")
    reign.log_up = True
    after = reign.successor()
    after.held_back = {Learn}
    after.hear("a", "b", "c")
    return after


def unanswered(reign: Reign, times: int) -> None:
    """Let so many questions for what was adopted come to nothing; each is asked anew at a tick."""
    for _ in range(times):
        (question,) = reign.kept_back
        assert isinstance(question, Learn)
        reign.kept_back.clear()
        reign.do(Learned(node=question.node, adopted=None, now_s=reign.now_s))
        reign.wait(0.5)


def alarms(reign: Reign) -> list[str]:
    said = shown(reign.core, now_s=reign.now_s).alarms
    return [alarm for alarm in said if "node c has adopted attempt 2" in alarm]


def test_a_node_that_can_not_be_asked_holds_the_job_up_for_a_while_only() -> None:
    reign = with_one_whose_port_is_shut()
    unanswered(reign, UNHEARD_MAX - 1)
    assert "is being entered" in waits(reign.ask("a", "b", launch_id=THIRD))
    assert alarms(reign) == []
    unanswered(reign, 1)
    assert not reign.core.held_up
    assert reign.ask("a", "b", launch_id=THIRD) is not None
    assert reign.state.attempts[-1].launch_id == THIRD


def test_that_nothing_waits_for_it_is_said_once_and_shown_as_long_as_it_is_so() -> None:
    reign = with_one_whose_port_is_shut()
    unanswered(reign, UNHEARD_MAX + 5)
    (said,) = [one for one in reign.said if "node c has adopted attempt 2" in one.text]
    assert said.level == "error"
    assert alarms(reign) == [said.text]
    reign.nodes["c"].adopted.clear()
    reign.hear("c")
    assert alarms(reign) == []


def test_it_is_asked_on_and_what_it_tells_at_last_comes_into_the_log() -> None:
    reign = with_one_whose_port_is_shut()
    uid = reign.nodes["c"].adopted[0].uid
    unanswered(reign, UNHEARD_MAX + 5)
    reign.release()
    assert reign.state.attempts[-1].uid == uid
    assert alarms(reign) == []


def test_one_answer_begins_the_count_anew() -> None:
    reign = with_one_whose_port_is_shut()
    unanswered(reign, UNHEARD_MAX - 1)
    reign.do(Learned(node="c", adopted=(), now_s=reign.now_s))
    unanswered(reign, UNHEARD_MAX - 1)
    assert reign.core.held_up
