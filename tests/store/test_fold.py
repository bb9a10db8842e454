"""The rules of legality of the job log, one by one, and what a fold says."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import pytest
from tests.support.fake_store import FakeStore
from tests.support.logs import SPEC, LogWriter, attempt, job, ready, uid

from toprope.store.log.fold import JobState, violation
from toprope.store.log.records import Elected, Held, Metric, Pin, Record, Retire, Struck, Taint, Unpin

NONCE = "0" * 32


def legal(state: JobState, record: Record) -> str | None:
    """Return what is wrong with the record once its envelope is that of the current writer."""
    term = state.term + 1 if isinstance(record, Elected) else state.term
    envelope = {"term": term, "writer_id": state.writer_id or "c1", "nonce": NONCE, "prev": state.tail_sha256}
    return violation(state, msgspec.structs.replace(record, **envelope))


def writer() -> LogWriter:
    return LogWriter(FakeStore()).begin()


def two_readies() -> LogWriter:
    """0 JOB, 1 ELECTED, 2 JOB, 3 ATTEMPT 1, 4 READY 10, 5 READY 20."""
    log = writer()
    log.add(attempt(1), ready(10), ready(20, parent=4))
    return log


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        ({"nonce": ""}, "nonce"),
        ({"nonce": "XYZ0123456"}, "nonce"),
        ({"prev": "0" * 64}, "the record before is another"),
        ({"term": 0}, "nobody has been elected"),
        ({"term": 2}, "the current term is 1"),
        ({"writer_id": "c2"}, "'c2' wrote it; 'c1' was elected"),
    ],
)
def test_the_envelope_of_a_record_is_checked(spoil: dict[str, object], rule: str) -> None:
    state = writer().state
    envelope = {"term": 1, "writer_id": "c1", "nonce": NONCE, "prev": state.tail_sha256}
    assert violation(state, msgspec.structs.replace(attempt(1), **envelope)) is None
    assert rule in str(violation(state, msgspec.structs.replace(attempt(1), **(envelope | spoil))))


def test_a_record_of_an_earlier_term_is_illegal_after_an_election() -> None:
    log = writer()
    log.writer_id = "c2"
    log.add(Elected())
    late = msgspec.structs.replace(attempt(1), term=1, writer_id="c1", nonce=NONCE, prev=log.state.tail_sha256)
    assert violation(log.state, late) == "it is of term 1, but the current term is 2"


def test_a_term_is_one_more_than_the_one_before() -> None:
    state = writer().state
    for term in (0, 1, 3):
        record = Elected(term=term, writer_id="c2", nonce=NONCE, prev=state.tail_sha256)
        assert violation(state, record) == f"term {term} is elected after term 1"
    assert violation(state, Elected(term=2, nonce=NONCE, prev=state.tail_sha256)) == "it has no writer_id"


FIRST = JobState(job="job")


@pytest.mark.parametrize(
    ("record", "rule"),
    [
        (Elected(term=1, writer_id="c1"), "a log begins with JOB"),
        (msgspec.structs.replace(job(), term=1), "its term is not 0"),
        (job("other"), "it names job 'other' in the log of 'job'"),
        (job(job_uid="no"), "its uid"),
        (msgspec.structs.replace(job(), format=2), "format 2; this version reads format 1"),
        (job(spec=SPEC), "record 0 sets no spec"),
    ],
)
def test_record_0_names_the_job(record: Record, rule: str) -> None:
    assert violation(FIRST, msgspec.structs.replace(job(), nonce=NONCE)) is None
    assert rule in str(violation(FIRST, msgspec.structs.replace(record, nonce=NONCE)))


def test_the_spec_is_set_once_and_by_the_same_job() -> None:
    log = LogWriter(FakeStore())
    log.add(job(), Elected())
    assert legal(log.state, attempt(1)) == "no spec has been set"
    assert "sets no spec" in str(legal(log.state, job()))
    assert "not 0b0b" in str(legal(log.state, job(spec=SPEC, job_uid="0c" * 16)))
    log.add(job(spec=SPEC))
    assert "the spec is set already" in str(legal(log.state, job(spec=SPEC)))
    assert log.state.spec_sha256 == SPEC


@pytest.mark.parametrize(
    ("record", "rule"),
    [
        (attempt(1, attempt=2), "attempt 2, expected 1"),
        (attempt(1, uid="UP"), "its uid"),
        (attempt(1, world_size=0), "a world of 0 ranks"),
        (attempt(1, round=-1), "round -1"),
        (attempt(1, spec_sha256="0" * 64), "its spec is not the job's"),
        (attempt(1, facts_sha256="0"), "it names no facts"),
        (attempt(1, from_step=5), "a fresh start from step 5"),
        (attempt(1, ready=3), "its source 3 is neither head nor an ancestor"),
        (attempt(1, held=Held(attempt_uid=uid(9), step=5), from_step=5), "unknown"),
        (attempt(1, held=Held(attempt_uid=uid(9), step=5), ready=1), "two sources"),
    ],
)
def test_the_first_attempt(record: Record, rule: str) -> None:
    state = writer().state
    assert legal(state, attempt(1)) is None
    assert rule in str(legal(state, record))


def test_an_attempt_is_one_more_than_the_last_with_a_new_uid_and_a_new_round() -> None:
    log = writer()
    log.add(attempt(1))
    assert legal(log.state, attempt(1)) == "attempt 1, expected 2"
    assert legal(log.state, attempt(3)) == "attempt 3, expected 2"
    assert "belongs to another" in str(legal(log.state, attempt(2, uid=uid(1))))
    launch = log.state.attempts[0].launch_id
    assert "has an attempt already" in str(legal(log.state, attempt(2, launch_id=launch)))
    assert legal(log.state, attempt(2, launch_id=launch, round=1)) is None
    assert log.state.attempt_of(launch_id=launch, round_number=0) == log.state.attempts[0]
    assert log.state.attempt_of(launch_id=launch, round_number=1) is None


def test_an_attempt_begins_from_head_or_a_live_ancestor() -> None:
    log = two_readies()
    assert legal(log.state, attempt(2, ready=5, from_step=20)) is None
    assert legal(log.state, attempt(2, ready=4, from_step=10)) is None
    assert "not that of READY 5, 20" in str(legal(log.state, attempt(2, ready=5, from_step=10)))
    assert "a fresh start although there are READY" in str(legal(log.state, attempt(2)))
    log.add(attempt(2, ready=4, from_step=10))
    assert (log.state.head, log.state.last_step) == (4, 10)
    assert "neither head nor an ancestor" in str(legal(log.state, attempt(3, ready=5, from_step=20)))


def test_an_attempt_does_not_begin_from_what_is_retired_tainted_or_struck() -> None:
    log = two_readies()
    log.add(ready(30, parent=5), Retire(seqs=(4,)))
    assert legal(log.state, attempt(2, ready=4, from_step=10)) == "its source 4 is retired"
    log.add(Taint(attempt=1, from_step=25, to_step=None, reason="NaN"))
    assert legal(log.state, attempt(2, ready=6, from_step=30)) == "its source 6 is tainted"
    struck = (Struck(attempt_uid=uid(1), step=20, why="lost"),)
    assert "struck off" in str(legal(log.state, attempt(2, ready=5, from_step=20, struck=struck)))


def test_what_was_struck_off_stays_so() -> None:
    log = two_readies()
    log.add(attempt(2, ready=4, from_step=10, struck=(Struck(attempt_uid=uid(1), step=20, why="lost"),)))
    log.add(attempt(3, ready=4, from_step=10, struck=(Struck(attempt_uid=uid(1), step=15, why="lost"),)))
    assert log.state.struck == {(uid(1), 20), (uid(1), 15)}
    held = Held(attempt_uid=uid(1), step=10)
    again = attempt(4, held=held, from_step=10, struck=(Struck(attempt_uid=uid(1), step=10, why="lost"),))
    assert "struck off" in str(legal(log.state, again))


def test_a_held_source_lies_on_the_lineage() -> None:
    log = two_readies()

    def held(number: int, step: int, *, by: int) -> Record:
        return attempt(number, held=Held(attempt_uid=uid(by), step=step), from_step=step)

    assert legal(log.state, held(2, 25, by=1)) is None
    assert "not on the lineage" in str(legal(log.state, held(2, 0, by=1)))
    assert "is not that of its source" in str(
        legal(log.state, attempt(2, held=Held(attempt_uid=uid(1), step=25), from_step=24))
    )
    log.add(held(2, 25, by=1))
    assert (log.state.head, log.state.last_step) == (5, 25)
    assert legal(log.state, held(3, 25, by=1)) is None
    assert legal(log.state, held(3, 30, by=2)) is None
    assert "not on the lineage" in str(legal(log.state, held(3, 26, by=1)))
    assert "not on the lineage" in str(legal(log.state, held(3, 25, by=2)))
    log.add(Taint(attempt=1, from_step=25, to_step=25, reason="spike"))
    assert "is tainted" in str(legal(log.state, held(3, 25, by=1)))


def test_the_head_after_a_held_source_is_the_newest_ready_that_it_follows() -> None:
    log = two_readies()
    log.add(attempt(2, held=Held(attempt_uid=uid(1), step=15), from_step=15))
    assert log.state.head == 4
    assert [seq for seq, _ in log.state.restorable()] == [4]
    log.add(attempt(3, held=Held(attempt_uid=uid(1), step=5), from_step=5))
    assert log.state.head is None


@pytest.mark.parametrize(
    ("record", "rule"),
    [
        (ready(30, parent=5, number=2), "it is of attempt 2; the current is 1"),
        (msgspec.structs.replace(ready(30, parent=5), attempt_uid=uid(7)), "it is of attempt uid"),
        (ready(20, parent=5), "step 20 is not past step 20"),
        (ready(15, parent=5), "step 15 is not past step 20"),
        (ready(30, parent=4), "its parent is 4, but head is 5"),
        (ready(30), "its parent is None, but head is 5"),
        (ready(30, parent=5, manifest="no"), "it names no manifest"),
        (ready(30, parent=5, size_bytes=-1), "-1 bytes"),
    ],
)
def test_ready_follows_head(record: Record, rule: str) -> None:
    state = two_readies().state
    assert legal(state, ready(30, parent=5)) is None
    assert rule in str(legal(state, record))


def test_nothing_is_ready_before_an_attempt() -> None:
    assert legal(writer().state, ready(1)) == "READY before any attempt"


def test_an_attempt_fences_the_ready_of_the_one_before() -> None:
    log = two_readies()
    log.add(attempt(2, ready=5, from_step=20))
    assert "the current is 2" in str(legal(log.state, ready(30, parent=5)))
    assert legal(log.state, ready(30, parent=5, number=2)) is None


def test_nothing_tainted_becomes_ready() -> None:
    log = two_readies()
    log.add(Taint(attempt=1, from_step=25, to_step=35, reason="spike"))
    assert legal(log.state, ready(30, parent=5)) == "step 30 is tainted"
    assert legal(log.state, ready(36, parent=5)) is None
    log.add(Taint(attempt=1, from_step=50, to_step=None, reason="NaN"))
    assert legal(log.state, ready(36, parent=5)) == "a taint ended attempt 1"


def test_a_taint_names_a_range_of_an_attempt() -> None:
    state = two_readies().state
    for number, begin, end in ((0, 0, None), (2, 0, None), (1, -1, None), (1, 5, 4)):
        assert legal(state, Taint(attempt=number, from_step=begin, to_step=end, reason="x")) is not None
    assert legal(state, Taint(attempt=1, from_step=5, to_step=5, reason="x")) is None


def test_pins_name_a_live_ready() -> None:
    log = two_readies()
    assert "no live READY" in str(legal(log.state, Pin(seq=3)))
    assert "not pinned" in str(legal(log.state, Unpin(seq=4)))
    log.add(Pin(seq=4))
    assert legal(log.state, Unpin(seq=4)) is None
    log.add(Unpin(seq=4))
    assert log.state.pins == frozenset()


def test_a_metric_is_a_finite_number_of_a_live_ready() -> None:
    log = two_readies()
    assert "no live READY" in str(legal(log.state, Metric(seq=3, name="loss", value=1.0)))
    assert "no usable name" in str(legal(log.state, Metric(seq=4, name="a b", value=1.0)))
    assert "its loss is inf" in str(legal(log.state, Metric(seq=4, name="loss", value=math.inf)))
    log.add(Metric(seq=4, name="loss", value=1.0), Metric(seq=4, name="loss", value=2.0))
    assert log.state.values_of("loss") == {4: 2.0}


def retire_cases() -> list[tuple[Callable[[LogWriter], object], int, str]]:
    return [
        (lambda _: None, 6, "head"),
        (lambda _: None, 5, "the parent of head"),
        (lambda log: log.add(Pin(seq=4)), 4, "pinned"),
        (lambda _: None, 3, "no live READY"),
        (lambda log: log.add(Taint(attempt=1, from_step=15, to_step=40, reason="x")), 4, "the newest untainted READY"),
        (lambda log: log.add(attempt(2, ready=4, from_step=10), ready(11, parent=4, number=2)), 4, "the parent of"),
        (
            lambda log: log.add(
                attempt(2, ready=4, from_step=10), ready(11, parent=4, number=2), ready(12, parent=8, number=2)
            ),
            4,
            "the source of the current attempt",
        ),
    ]


@pytest.mark.parametrize(("before", "seq", "rule"), retire_cases())
def test_what_is_needed_is_not_retired(before: Callable[[LogWriter], object], seq: int, rule: str) -> None:
    log = two_readies()
    log.add(ready(30, parent=5))
    before(log)
    assert rule in str(legal(log.state, Retire(seqs=(seq,))))


def test_what_is_not_needed_is_retired_once() -> None:
    log = two_readies()
    log.add(ready(30, parent=5))
    assert legal(log.state, Retire(seqs=())) is not None
    assert legal(log.state, Retire(seqs=(4, 4))) is not None
    log.add(Retire(seqs=(4,)))
    assert log.state.live == (5, 6)
    assert "no live READY" in str(legal(log.state, Retire(seqs=(4,))))
    assert [seq for seq, _ in log.state.restorable()] == [6, 5]
