"""Policies of retention: what they say, what they keep, and what no policy can retire."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.fake_store import FakeStore
from tests.support.logs import LogWriter, attempt, ready

from toprope.store.errors import UsageError
from toprope.store.keep.retention import Policy, make_retire, parse_policy, plan_retention
from toprope.store.log.fold import JobState, needed_by
from toprope.store.log.records import Metric, Pin, Taint


def job_of(steps: Sequence[int]) -> LogWriter:
    log = LogWriter(FakeStore()).begin()
    log.add(attempt(1))
    for step in steps:
        log.add(ready(step, parent=log.state.head))
    return log


def kept(state: JobState, policy: str) -> list[int]:
    return [verdict.step for verdict in plan_retention(state, parse_policy(policy)).kept]


def retired(state: JobState, policy: str) -> dict[int, str]:
    return {verdict.step: verdict.why for verdict in plan_retention(state, parse_policy(policy)).retired}


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("last=3", Policy(last=3)),
        ("every=1000, last=2", Policy(last=2, every=1000)),
        ("every=5", Policy(last=1, every=5)),
        ("within=90m", Policy(within_s=5400)),
        ("within=36h,last=2,every=9", Policy(last=2, every=9, within_s=129600)),
        ("within=2d", Policy(within_s=172800)),
        ("best=2:min:val_loss", Policy(best=2, lowest=True, metric="val_loss")),
        ("best=1:max:eval/acc,last=3", Policy(last=3, best=1, lowest=False, metric="eval/acc")),
        ("all", None),
        ("", None),
    ],
)
def test_a_policy_is_read(text: str, policy: Policy | None) -> None:
    assert parse_policy(text) == policy
    assert parse_policy(str(policy or "")) == policy


@pytest.mark.parametrize(
    "text",
    [
        "last",
        "last=",
        "last=0",
        "last=-1",
        "last=1,last=2",
        "age=3",
        "last=3;every=2",
        "3",
        "within=3",
        "within=h",
        "within=0h",
        "best=2",
        "best=0:min:loss",
        "best=2:val_loss",
        "best=2:low:val_loss",
        "best=2:min:",
        "best=2:min:a b",
        "best=1:min:a,best=1:max:a",
    ],
)
def test_what_is_no_policy_is_refused_with_what_is_one(text: str) -> None:
    with pytest.raises(UsageError, match="give last=N, every=K, within=TIME, best=N:min:METRIC"):
        parse_policy(text)


HOUR = 3600


def timed(*hours: float | None) -> JobState:
    """Return a job with READY steps 1, 2 and so on that were appended at these hours; None: no time is known."""
    log = LogWriter(FakeStore()).begin()
    log.add(attempt(1))
    for step, hour in enumerate(hours, start=1):
        one = ready(step, parent=log.state.head)
        log.add(one if hour is None else msgspec.structs.replace(one, at_s=1_800_000_000 + int(hour * HOUR)))
    return log.state


def test_what_is_of_the_last_hours_before_the_newest_is_kept() -> None:
    assert kept(timed(0, 1, 2, 3, 4, 5, 6, 7, 8), "within=4h") == [5, 6, 7, 8, 9]
    assert kept(timed(0, 1, 2, 3, 4, 5, 6, 7, 8), "within=4h,every=2") == [2, 4, 5, 6, 7, 8, 9]
    assert retired(timed(0, 1, 2, 3, 4, 5), "within=4h") == {1: "not kept by last=1,within=4h"}


@pytest.mark.parametrize(
    "hours",
    [
        (0, 1, 2, 3, 4, 5, 6, 7, 90_000),
        (0, 1, 2, 3, 4, -90_000, -89_999, -89_998, -89_997),
        (0, 1, 2, 3, 90_000, 5, 6, 7, 8),
        (None, None, None, None, None, None, None, None, 8),
    ],
    ids=["ahead at last", "back", "ahead and back", "no times"],
)
def test_a_clock_that_jumps_counts_as_a_quarter_of_the_time_at_most(hours: tuple[float | None, ...]) -> None:
    would_be = kept(timed(*range(9)), "within=4h")
    assert set(kept(timed(*hours), "within=4h")) >= set(would_be)


@pytest.mark.parametrize(
    "hours",
    [(0, 1, 2, 3, 4, -90_000, -89_999, -89_998, -89_997), (0, 1, 2, 3, 4, None, 6, 7, 8)],
    ids=["went back", "one is missing"],
)
def test_a_clock_that_went_back_or_a_time_that_is_missing_keeps_no_more_than_it_must(
    hours: tuple[float | None, ...],
) -> None:
    assert kept(timed(*hours), "within=4h") == [4, 5, 6, 7, 8, 9]


def test_a_pause_in_training_counts_as_a_quarter_of_the_time_at_most() -> None:
    assert kept(timed(0, 1, 2, 3, 103, 104), "within=4h") == [2, 3, 4, 5, 6]


def test_steps_are_ordered_as_numbers() -> None:
    state = job_of([8, 9, 10, 99999, 100000, 1000000]).state
    assert kept(state, "last=3") == [99999, 100000, 1000000]


def test_each_verdict_has_its_reason() -> None:
    log = job_of([10, 20, 30, 40])
    log.add(Pin(seq=4))
    plan = plan_retention(log.state, Policy(last=1))
    assert {verdict.step: verdict.why for verdict in plan.kept} == {
        10: "pinned",
        30: "the parent of head",
        40: "head",
    }
    assert {verdict.step: verdict.why for verdict in plan.retired} == {20: "not kept by last=1"}


def test_the_first_at_or_past_each_multiple_is_kept() -> None:
    state = job_of([400, 800, 1200, 1600, 2000, 2400, 2800, 3200]).state
    assert kept(state, "every=1000") == [1200, 2000, 2800, 3200]
    assert kept(state, "last=3,every=1000") == [1200, 2000, 2400, 2800, 3200]


def test_the_last_known_good_is_kept_whatever_was_tainted_after_it() -> None:
    log = job_of([10, 20, 30, 40, 50])
    log.add(Taint(attempt=1, from_step=25, to_step=None, reason="NaN"))
    assert kept(log.state, "last=1") == [20, 40, 50]
    assert retired(log.state, "last=1") == {10: "not kept by last=1", 30: "tainted"}


def test_what_a_rollback_left_behind_is_retired() -> None:
    log = job_of([10, 20, 30])
    log.add(attempt(2, ready=4, from_step=10), ready(15, number=2, parent=4), ready(18, number=2, parent=7 + 1))
    assert kept(log.state, "last=2") == [10, 15, 18]
    assert retired(log.state, "last=2") == {20: "left behind by a rollback", 30: "left behind by a rollback"}


def measured(*values: float | None, name: str = "val_loss") -> LogWriter:
    """Return a job with READY steps 1, 2 and so on, of these values; None: nobody has measured it."""
    log = job_of(range(1, len(values) + 1))
    for seq, value in zip(log.state.readies, values, strict=True):
        if value is not None:
            log.add(Metric(seq=seq, name=name, value=value))
    return log


def test_the_best_by_a_metric_are_kept_and_of_equal_ones_the_newer() -> None:
    state = measured(0.5, 0.1, 0.3, None, 0.1, 0.9, None, None).state
    assert kept(state, "best=1:min:val_loss") == [5, 7, 8]
    assert kept(state, "best=3:min:val_loss") == [2, 3, 5, 7, 8]
    assert kept(state, "best=1:max:val_loss,last=3") == [6, 7, 8]
    assert kept(state, "best=9:max:accuracy") == [7, 8]
    plan = plan_retention(state, parse_policy("best=1:min:val_loss"))
    assert plan.kept[0].why == "one of the 1 with the lowest val_loss, 0.1"


def test_the_best_is_what_was_measured_last_and_is_to_be_trusted() -> None:
    log = measured(0.5, 0.1, 0.3, 0.7, 0.8, 0.9)
    log.add(Metric(seq=5, name="val_loss", value=0.6), Metric(seq=6, name="other", value=0.01))
    assert kept(log.state, "best=1:min:val_loss") == [3, 5, 6]
    log.add(Taint(attempt=1, from_step=3, to_step=3, reason="the wrong data"))
    assert kept(log.state, "best=1:min:val_loss") == [1, 5, 6]


def test_no_policy_keeps_everything() -> None:
    state = job_of([10, 20, 30]).state
    assert kept(state, "all") == [10, 20, 30]
    assert make_retire(state) is None


@given(st.data())
def test_whatever_the_log_a_policy_retires_nothing_that_is_needed(data: st.DataObject) -> None:
    steps = data.draw(st.lists(st.integers(1, 500), min_size=1, max_size=12, unique=True).map(sorted))
    log = job_of(steps)
    for seq in data.draw(st.sets(st.sampled_from(list(log.state.readies)), max_size=3)):
        log.add(Pin(seq=seq))
    if data.draw(st.booleans()):
        log.add(Taint(attempt=1, from_step=data.draw(st.integers(1, 500)), to_step=None, reason="x"))
    policy = Policy(last=data.draw(st.integers(1, 4)), every=data.draw(st.sampled_from([0, 1, 7, 100])))
    plan = plan_retention(log.state, policy)
    assert not {verdict.seq for verdict in plan.retired} & set(needed_by(log.state))
    assert {verdict.seq for verdict in (*plan.kept, *plan.retired)} == set(log.state.live)
    assert all(verdict.why for verdict in (*plan.kept, *plan.retired))
