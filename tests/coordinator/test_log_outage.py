"""While the log can't be reached: which attempts are opened without it, what all must agree to, what the log takes."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest
from tests.support.reigns import JOB, FakeNode, Reign, copy_of, shown, training

from toprope.coordinator.core import Settings
from toprope.coordinator.effects import Append, Enter, Learn
from toprope.coordinator.events import Declared, LogMoved, OpenFailed
from toprope.coordinator.wire import AttemptView, Cadence, Kept, OpenAnswer
from toprope.store.log.chain import append
from toprope.store.log.records import Elected, Record, Struck, Taint

AGAIN = "2b" * 16
THIRD = "3c" * 16


def away(*, on_log_outage: Literal["wait", "proceed"] = "proceed", step: int = 6) -> Reign:
    """Return a reign whose trainers died while the log was away; step 6 of attempt 1 is in all memories."""
    cadence = Cadence(from_step=0, every=2, local_every=4, object_every=8)
    settings = Settings(job=JOB, url="http://c", cadence=cadence, proceeds=on_log_outage == "proceed")
    reign = Reign(settings=settings)
    for name in "ab":
        reign.node(name)
    assert reign.ask("a", "b") is not None
    reign.verdict("staged")
    reign.verdict("applied")
    if step:
        reign.hold(step)
    reign.end_trainers()
    reign.log_away()
    return reign


def opened(reign: Reign) -> AttemptView:
    """Return the attempt that is opened without the log, adopted by both nodes."""
    assert reign.ask("a", "b", launch_id=AGAIN) is None
    reign.adopt("a", "b")
    answer = reign.answers[reign.requests]
    assert answer.attempt is not None, answer
    return answer.attempt


def opened_twice(reign: Reign) -> tuple[AttemptView, AttemptView]:
    """Return two attempts that are opened without the log, adopted by both nodes: the second goes on from the first."""
    first = opened(reign)
    reign.verdict_of(first)
    for rank, name in enumerate("ab"):
        reign.nodes[name].copies.append(copy_of(first.uid, 8, rank, "memory", attempt=2))
    reign.end_trainers()
    assert reign.ask("a", "b", launch_id=THIRD) is None
    reign.adopt("a", "b")
    second = reign.answers[reign.requests].attempt
    assert second is not None
    return first, second


def waits(answer: OpenAnswer | None) -> str:
    assert answer is not None
    assert answer.code == "unavailable", answer
    return answer.text


def elsewhere(reign: Reign, *records: Record) -> None:
    """Let another coordinator append, which this one does not see yet."""
    state = reign.state
    term = state.term
    for record in records:
        done = append(reign.store, state, lambda _, record=record: record, term=term, writer_id=state.writer_id)  # type: ignore[misc]
        state, term = done.state, done.state.term


def see(reign: Reign) -> None:
    """Let the coordinator read what was appended elsewhere."""
    reign._append(lambda _: None)
    reign.term = reign.state.term
    reign.do(LogMoved(log_view=reign._log_view(), now_s=reign.now_s))


def test_without_leave_a_restore_waits_for_the_log() -> None:
    reign = away(on_log_outage="wait")
    assert "--on-log-outage is wait" in waits(reign.ask("a", "b", launch_id=AGAIN))
    assert reign.desired.proposed is None


def test_an_attempt_is_given_out_once_every_node_of_it_has_adopted_it() -> None:
    reign = away()
    assert reign.ask("a", "b", launch_id=AGAIN) is None
    reign.adopt("a")
    assert reign.requests not in reign.answers
    assert reign.desired.attempt is not None
    assert reign.desired.attempt.number == 1
    reign.adopt("b")
    view = reign.answers[reign.requests].attempt
    assert view is not None
    assert (view.number, view.source, view.from_step, view.provisional) == (2, "held", 6, True)
    assert [shard.sources[0].tier for shard in view.restore] == ["memory", "memory"]
    assert reign.desired.attempt == view
    assert reign.desired.logged == 1
    assert reign.state.attempt_number == 1


def test_it_is_appended_as_it_was_decided_when_the_log_is_back_and_goes_on() -> None:
    reign = away()
    view = opened(reign)
    decided_at = reign.state.n
    reign.verdict_of(view)
    reign.log_away("")
    record = reign.state.attempts[-1]
    assert (record.uid, record.decided_at, record.launch_id) == (view.uid, decided_at, AGAIN)
    assert reign.desired.attempt is not None
    assert (reign.desired.attempt.uid, reign.desired.attempt.phase) == (view.uid, "applied")
    assert not reign.desired.attempt.provisional
    assert (reign.desired.logged, reign.desired.proposed, reign.desired.fenced) == (2, None, ())


def test_nothing_of_it_becomes_ready_before_that() -> None:
    reign = away()
    view = opened(reign)
    reign.verdict_of(view)
    reign.log_up = True  # the store may be there again before the coordinator knows it
    for rank, name in enumerate("ab"):
        reign.nodes[name].copies.append(copy_of(view.uid, 8, rank, "object", attempt=2))
    reign.hear()
    reign.read_back()
    assert reign.ready_steps == []
    assert reign.desired.read_backs == ()
    reign.log_away("")
    reign.hear()
    reign.read_back()
    assert reign.ready_steps == [8]


def test_a_chain_of_them_is_appended_in_order() -> None:
    reign = away()
    first, second = opened_twice(reign)
    assert (second.number, second.source_attempt_uid, second.from_step) == (3, first.uid, 8)
    reign.log_away("")
    assert [one.uid for one in reign.state.attempts[1:]] == [first.uid, second.uid]
    assert reign.desired.attempt is not None
    assert reign.desired.attempt.uid == second.uid


@pytest.mark.parametrize(
    "records",
    [
        (Elected(url="http://other"),),
        (Taint(attempt=1, from_step=8, to_step=None, reason="NaN"),),
    ],
    ids=["elected", "later steps tainted"],
)
def test_what_decides_nothing_about_it_may_come_into_the_log_before_it(records: tuple[Record, ...]) -> None:
    reign = away()
    view = opened(reign)
    elsewhere(reign, *records)
    see(reign)
    reign.log_away("")
    assert reign.state.attempts[-1].uid == view.uid


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (Taint(attempt=1, from_step=4, to_step=None, reason="NaN"), "tainted"),
        (Taint(attempt=1, from_step=6, to_step=6, reason="NaN"), "tainted"),
    ],
    ids=["all since step 4", "its source"],
)
def test_one_whose_source_was_tainted_meanwhile_is_fenced_off(record: Record, why: str) -> None:
    reign = away()
    view = opened(reign)
    reign.verdict_of(view)
    elsewhere(reign, record)
    see(reign)
    reign.log_away("")
    assert reign.state.attempt_number == 1
    assert reign.desired.fenced == (view.uid,)
    assert reign.desired.attempt is not None
    assert reign.desired.attempt.number == 1
    assert any(
        why in said.text and "can't come into it: anything it saved is lost" in said.text
        for said in reign.said
        if said.level == "error"
    )
    assert any(
        "can't come into it: anything it saved is lost" in alarm for alarm in shown(reign.core, now_s=1.0).alarms
    )


def test_one_whose_number_was_taken_in_the_log_is_fenced_off_and_the_log_is_followed() -> None:
    reign = away()
    view = opened(reign)
    other = reign.successor()
    other.nodes = {name: FakeNode(name=name, job_uid=reign.state.job_uid) for name in "ab"}
    for name in "ab":
        other.hear(name)
    other.hold(6)
    assert other.ask("a", "b", launch_id=THIRD) is not None
    taken = other.state.attempts[-1]
    see(reign)
    assert reign.desired.fenced == (view.uid,)
    assert reign.desired.attempt is not None
    assert (reign.desired.attempt.number, reign.desired.attempt.uid) == (2, taken.uid)


def test_a_successor_learns_of_it_from_the_nodes_and_appends_it_before_all_else() -> None:
    reign = away()
    view = opened(reign)
    reign.verdict_of(view)
    reign.log_up = True
    after = reign.successor()
    after.held_back = {Learn}
    after.hear("a", "b")
    assert "is being entered" in waits(after.ask("a", "b", launch_id=THIRD))
    after.release()
    assert after.state.attempts[-1].uid == view.uid
    assert after.desired.attempt is not None
    assert after.desired.attempt.uid == view.uid
    answer = after.ask("a", "b", launch_id=THIRD)
    assert answer is not None
    assert answer.code == "busy"


def test_of_two_of_one_number_the_log_takes_the_one_that_more_nodes_adopted() -> None:
    reign = away()
    opened(reign)
    proposed = reign.nodes["a"].adopted[0]
    other = msgspec.structs.replace(proposed, record=msgspec.structs.replace(proposed.record, uid="0d" * 16))
    reign.node("c").adopted.append(other)
    reign.log_up = True
    after = reign.successor()
    after.held_back = {Enter}
    after.hear("c", "a", "b")
    after.release()
    after.wait(1.0)
    assert after.state.attempts[-1].uid == proposed.uid
    assert other.uid in after.desired.fenced


def test_what_was_decided_on_a_longer_log_is_left_to_those_who_know_it() -> None:
    other, reign = away(), away()
    opened(other)
    mine = other.nodes["a"].adopted[0]
    record = msgspec.structs.replace(mine.record, decided_at=reign.state.n + 1)
    reign.node("c").adopted.append(msgspec.structs.replace(mine, record=record))  # as proposed in a later term
    reign.hear("c")
    assert reign.desired.fenced == ()
    elsewhere(reign, Elected(url="http://other"))
    see(reign)
    assert record.uid in reign.core.outage.pending


def test_who_waits_for_what_was_proposed_is_told_when_the_log_can_not_take_it_and_may_ask_again() -> None:
    reign = away()
    reign.hold(4)
    assert reign.ask("a", "b", launch_id=AGAIN) is None
    number = reign.requests
    elsewhere(reign, Taint(attempt=1, from_step=6, to_step=None, reason="NaN"))
    see(reign)
    assert "ask again" in waits(reign.answers.get(number))
    reign.log_away("")
    assert reign.ask("a", "b", launch_id=THIRD) is not None
    assert (reign.state.attempts[-1].launch_id, reign.state.attempts[-1].from_step) == (THIRD, 4)


def test_a_successor_does_not_wait_for_what_only_a_node_has_adopted_that_is_gone() -> None:
    reign = away()
    assert reign.ask("a", "b", launch_id=AGAIN) is None
    reign.node("c")
    reign.adopt("c")
    reign.nodes["c"].up = False
    reign.log_up = True
    after = reign.successor()
    after.hear("a", "b", "c")
    assert "is being entered" in waits(after.ask("a", "b", launch_id=THIRD))
    after.wait(15.0)
    after.hear("a", "b")
    assert after.ask("a", "b", launch_id=THIRD) is not None
    assert after.state.attempts[-1].launch_id == THIRD


def test_it_begins_with_no_step_that_was_struck_off() -> None:
    reign = away()
    reign.hold(4)
    first = opened(reign)
    reign.verdict_of(first, ok=False, reason="its bytes are wrong")
    reign.end_trainers()
    assert reign.ask("a", "b", launch_id=AGAIN, round_number=1) is None
    proposed = reign.desired.proposed
    assert proposed is not None
    assert proposed.record.from_step == 4
    assert [one.step for one in proposed.record.struck] == [6]
    reign.adopt("a", "b")
    reign.log_away("")
    assert (first.uid, 6) not in reign.state.struck
    assert {step for _, step in reign.state.struck} == {6}
    assert isinstance(reign.state.attempts[-1].struck[0], Struck)


def test_a_step_that_is_ready_is_not_passed_over_for_an_older_one_in_memory() -> None:
    reign = away(step=0)
    reign.log_away("")
    for rank, name in enumerate("ab"):
        reign.nodes[name].copies.append(copy_of(reign.state.attempts[0].uid, 8, rank, "object"))
    reign.hear()
    reign.read_back()
    assert reign.ready_steps == [8]
    reign.hold(6)
    reign.log_away()
    assert "step 8 is READY" in waits(reign.ask("a", "b", launch_id=AGAIN))


def test_a_node_that_does_not_answer_must_be_declared_dead() -> None:
    reign = away()
    reign.node("c")
    reign.hold(6, tiers=("peer",))
    reign.lose("b")
    text = waits(reign.ask("a", "c", launch_id=AGAIN))
    assert "do not answer, and may be in another attempt by now: b; of each that is off" in text
    assert "ckpt declare-dead NODE --coordinator URL" in text
    reign.do(Declared(node="b", now_s=reign.now_s))
    assert reign.ask("a", "c", launch_id=AGAIN) is None
    reign.adopt("a", "c")
    assert reign.answers[reign.requests].attempt is not None


def test_a_node_that_was_declared_dead_and_answers_again_must_adopt_it_too() -> None:
    reign = away()
    reign.node("c")
    reign.hold(6, tiers=("peer",))
    reign.lose("b")
    reign.wait(2.0)
    reign.do(Declared(node="b", now_s=reign.now_s))
    assert set(reign.core.outage.dead) == {"b"}
    reign.nodes["b"].up = True
    reign.wait(4.0)  # it is asked again and again
    assert reign.core.outage.dead == {}
    assert reign.ask("a", "c", launch_id=AGAIN) is None
    reign.adopt("a", "c")
    assert reign.requests not in reign.answers
    reign.adopt("b")
    assert reign.answers[reign.requests].attempt is not None


def test_a_declaration_is_forgotten_with_the_world_that_it_was_about() -> None:
    reign = away()
    reign.node("c")
    reign.hold(6, tiers=("peer",))
    reign.lose("b")
    reign.do(Declared(node="b", now_s=reign.now_s))
    assert reign.ask("a", "c", launch_id=AGAIN) is None
    reign.adopt("a", "c")
    assert reign.answers[reign.requests].attempt is not None
    assert reign.core.outage.dead == {}


def test_all_nodes_that_do_not_answer_are_named_at_once() -> None:
    reign = away()
    for name in "cd":
        reign.node(name)
    for name in "ab":
        reign.lose(name)
    assert "do not answer, and may be in another attempt by now: a, b;" in waits(reign.ask("c", "d", launch_id=AGAIN))


def test_a_node_that_is_there_again_with_other_memory_need_not_be_declared_dead() -> None:
    reign = away()
    reign.hold(6, tiers=("peer",))
    copies = reign.nodes["a"].copies
    reign.lose("b")
    reign.wait(4.0)
    reign.node("b", boot_id="0e" * 16, incarnation="0f" * 16)
    reign.nodes["a"].copies = copies
    reign.hear()
    assert reign.ask("a", "b", launch_id=AGAIN) is None
    reign.adopt("a", "b")
    assert reign.answers[reign.requests].attempt is not None


def test_no_fresh_start_and_no_first_attempt_without_the_log() -> None:
    assert "no step of all ranks" in waits(away(step=0).ask("a", "b", launch_id=AGAIN))
    reign = Reign(settings=away().settings)
    for name in "ab":
        reign.node(name)
    reign.log_away()
    assert "the first one needs the log" in waits(reign.ask("a", "b"))


def test_one_that_was_being_appended_when_the_log_went_away_is_waited_for() -> None:
    reign = away()
    reign.log_away("")
    reign.held_back = {Append}
    assert reign.ask("a", "b", launch_id=AGAIN) is None
    append = reign.lost_append()
    reign.log_away()
    reign.do(OpenFailed(uid=append.uid, text="no answer", again=False, now_s=reign.now_s))
    reign.unsure = True
    assert "may be there yet" in waits(reign.ask("a", "b", launch_id=AGAIN))
    assert reign.desired.proposed is None
    reign.unsure = False
    assert reign.ask("a", "b", launch_id=AGAIN) is None
    assert reign.desired.proposed is not None


def test_steps_of_what_was_opened_without_the_log_are_protected_although_an_append_had_failed_before() -> None:
    reign = away()
    reign.log_away("")
    reign.held_back = {Append}
    assert reign.ask("a", "b", launch_id=AGAIN) is None
    append = reign.lost_append()
    reign.held_back.clear()
    reign.log_away()
    reign.do(OpenFailed(uid=append.uid, text="no answer", again=False, now_s=reign.now_s))
    view = opened(reign)
    reign.verdict_of(view)
    for rank, (own, other) in enumerate((("a", "b"), ("b", "a"))):
        reign.nodes[own].copies.append(copy_of(view.uid, 8, rank, "memory", attempt=2))
        reign.nodes[other].copies.append(copy_of(view.uid, 8, rank, "peer", attempt=2))
    reign.hear()
    assert reign.desired.protected_step == 8


def test_another_launch_waits_until_what_is_proposed_is_adopted() -> None:
    reign = away()
    assert reign.ask("a", "b", launch_id=AGAIN) is None
    assert reign.ask("a", "b", launch_id=AGAIN) is None
    proposed = "was proposed without the log, which is away, and waits for its nodes to adopt it"
    assert proposed in waits(reign.ask("a", "b", launch_id=THIRD))
    reign.adopt("a", "b")
    assert reign.answers[2].attempt == reign.answers[3].attempt


def test_what_is_proposed_when_the_log_is_back_is_appended_and_given_out() -> None:
    reign = away()
    assert reign.ask("a", "b", launch_id=AGAIN) is None
    number = reign.requests
    reign.adopt("a")
    reign.log_away("")
    assert reign.answers[number].attempt is not None
    assert reign.state.attempts[-1].launch_id == AGAIN


def test_nothing_is_tidied_away_before_it_is_in_the_log() -> None:
    reign = away()
    opened(reign)
    assert reign.core.held_up
    reign.log_away("")
    assert not reign.core.held_up


def test_the_outage_is_alarmed_and_what_waits_is_named() -> None:
    reign = away()
    assert reign.ask("a", "b", launch_id=AGAIN) is None
    reign.adopt("a")
    reign.wait(3.0)
    alarms = shown(reign.core, now_s=reign.now_s).alarms
    assert any(alarm.startswith("the job log has been away for 3 s") for alarm in alarms)
    assert "attempt 2 waits for these nodes to adopt it: b" in alarms
    reign.adopt("b")
    view = shown(reign.core, now_s=reign.now_s)
    assert view.attempt is not None
    assert view.attempt.provisional
    assert view.log_away_s == 3.0
    assert "attempt 2 was opened without the log, and is not in it yet" in view.alarms


def test_the_source_of_it_is_kept_until_a_later_step_is_protected() -> None:
    reign = away()
    view = opened(reign)
    assert Kept(attempt_uid=view.source_attempt_uid, step=6) in reign.desired.keep


def test_records_are_only_what_they_were_for_attempts_that_the_log_decided() -> None:
    reign = training()
    assert reign.state.attempts[0].decided_at is msgspec.UNSET
    assert b"decided_at" not in msgspec.json.encode(reign.state.attempts[0])
