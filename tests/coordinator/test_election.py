"""When a coordinator that stands by claims a term: what the log says, what the leader says, how long it is silent."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from toprope.coordinator.election import UNREAD_S, Election, patience_after
from toprope.coordinator.wire import Health, Role
from toprope.store.log.fold import JobState

LED = JobState(job="job", n=2, job_uid="0b" * 16, term=3, writer_id="one", url="http://one")


def election(state: JobState = LED, *, url: str = "http://two") -> Election:
    """Return what one that has just begun to follow knows."""
    return Election(url=url, patience_s=6.0, state=state, heard_s=0.0)


def health(role: Role = "leader", *, log_s: float = 0.5) -> Health:
    return Health(job="job", job_uid=LED.job_uid, role=role, url=LED.url, term=3, leader=LED.url, log_s=log_s)


def test_a_job_that_nobody_has_led_is_claimed_at_once() -> None:
    assert election(JobState(job="job")).reason(now_s=0.0) == "no coordinator leads this job"


def test_one_that_begins_again_where_it_led_claims_at_once() -> None:
    assert "served here, and it is gone" in election(url=LED.url).reason(now_s=0.0)


def test_a_leader_is_given_its_time_before_a_term_is_claimed() -> None:
    follower = election()
    assert follower.reason(now_s=5.9) == ""
    assert "term 3 at http://one has given no sign of life for 6.0 s" in follower.reason(now_s=6.0)


def test_a_leader_that_answers_is_followed() -> None:
    follower = election()
    follower.answered(health(), now_s=5.0)
    assert follower.reason(now_s=10.9) == ""
    assert follower.reason(now_s=11.0)


@pytest.mark.parametrize(
    "no_leader",
    [
        health("follower"),
        health("claiming"),
        health(log_s=UNREAD_S),
        msgspec.structs.replace(health(), url="http://three"),
        msgspec.structs.replace(health(), job_uid="0c" * 16),
    ],
    ids=["stands by", "claims", "cut off from the store", "another one", "another job"],
)
def test_that_something_answers_is_no_sign_of_a_leader(no_leader: Health) -> None:
    follower = election()
    follower.answered(no_leader, now_s=5.0)
    assert follower.reason(now_s=6.0)


def test_one_that_cannot_read_the_log_itself_waits_on() -> None:
    follower = election()
    follower.unread(now_s=5.0)
    assert follower.reason(now_s=10.9) == ""


def test_nobody_waits_long_for_a_leader_at_whose_address_nobody_serves() -> None:
    follower = election()
    follower.refused(now_s=1.0)
    assert follower.reason(now_s=2.1) == ""
    follower.refused(now_s=2.0)
    assert "nobody serves at http://one" in follower.reason(now_s=2.2)


def test_a_leader_that_serves_again_or_is_heard_by_the_broker_was_not_gone() -> None:
    follower = election()
    follower.refused(now_s=1.0)
    follower.silent()
    assert follower.reason(now_s=2.5) == ""
    follower.refused(now_s=3.0)
    follower.answered(health(), now_s=4.0)
    assert follower.reason(now_s=5.0) == ""


def test_a_new_leader_is_given_its_time_and_a_command_in_passing_is_none() -> None:
    follower = election()
    follower.read(replace(LED, n=3, term=4, passing=True), now_s=4.0)
    assert follower.reason(now_s=6.0)
    follower.read(replace(LED, n=4, term=5, url="http://three"), now_s=5.0)
    assert follower.reason(now_s=10.9) == ""


def test_a_claim_that_came_too_late_is_none() -> None:
    follower = election()
    claim = follower.claim(LED)
    assert claim is not None
    assert claim.url == "http://two"
    assert follower.claim(replace(LED, n=3, term=4, url="http://three")) is None


def test_one_whose_reigns_are_short_waits_twice_as_long_each_time_up_to_a_minute() -> None:
    waits = [5.0]
    for _ in range(5):
        waits.append(patience_after(waits[-1], reigned_s=3.0, at_first_s=5.0))
    assert waits == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    assert patience_after(60.0, reigned_s=60.0, at_first_s=5.0) == 5.0
