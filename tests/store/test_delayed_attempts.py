"""An attempt that was decided without the log: what may have come into the log since, and what may not."""

from __future__ import annotations

import msgspec
import pytest
from tests.support.fake_store import FakeStore
from tests.support.logs import SPEC, LogWriter, attempt, job, ready, uid

from toprope.store.log.chain import read_entries
from toprope.store.log.fold import JobState, violation
from toprope.store.log.records import Attempt, Elected, Held, Job, Metric, Pin, Record, Retire, Taint, Unpin
from toprope.store.log.snap import decode, encode
from toprope.store.look.show import record_lines
from toprope.store.names import snap_key

NONCE = "0" * 32


def log_of_two() -> LogWriter:
    """0 JOB, 1 ELECTED, 2 JOB, 3 ATTEMPT 1, 4 READY 10, 5 READY 20, 6 READY 30, 7 PIN 4."""
    log = LogWriter(FakeStore()).begin()
    log.add(attempt(1), ready(10), ready(20, parent=4), ready(30, parent=5), Pin(seq=4))
    return log


def delayed(number: int, *, decided_at: int, source: str = uid(1), step: int = 35) -> Attempt:
    return attempt(number, held=Held(attempt_uid=source, step=step), from_step=step, decided_at=decided_at)


def why_not(state: JobState, record: Record) -> str | None:
    envelope = {"term": state.term, "writer_id": state.writer_id, "nonce": NONCE, "prev": state.tail_sha256}
    return violation(state, msgspec.structs.replace(record, **envelope))


@pytest.mark.parametrize(
    "record",
    [
        Elected(),
        ready(40, parent=6),
        Pin(seq=5),
        Unpin(seq=4),
        Metric(seq=6, name="loss", value=2.0),
        Job(uid="0b" * 16, name="job", retain="last=3"),
        Taint(attempt=1, from_step=36, to_step=None, reason="later steps"),
    ],
    ids=lambda record: type(record).__name__,
)
def test_what_decides_nothing_about_it_may_come_first(record: Record) -> None:
    log = log_of_two()
    decided_at = log.state.n
    log.add(record)
    log.add(delayed(2, decided_at=decided_at))
    assert log.state.attempt_number == 2
    head = log.state.head
    assert head is not None
    assert log.state.readies[head].step == 30


RESTS_ON = "has changed what it rests on"


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (Retire(seqs=(4,)), RESTS_ON),
        (Taint(attempt=1, from_step=35, to_step=35, reason="its source"), "is tainted"),
        (job(spec="5c" * 32), "its spec is not the job's"),
        (attempt(2, held=Held(attempt_uid=uid(1), step=34), from_step=34), "attempt 2, expected 3"),
    ],
    ids=["Retire", "Taint", "Job", "Attempt"],
)
def test_what_decides_about_it_fences_it_off(record: Record, reason: str) -> None:
    log = log_of_two()
    log.add(Unpin(seq=4))
    late = delayed(2, decided_at=log.state.n)
    assert why_not(log.state, late) is None
    if isinstance(record, Job):
        record = msgspec.structs.replace(record, replaces=SPEC)
    log.add(record)
    assert reason in str(why_not(log.state, late))


def test_another_attempt_that_was_opened_meanwhile_fences_off_one_after_it() -> None:
    log = log_of_two()
    decided_at = log.state.n
    log.add(attempt(2, held=Held(attempt_uid=uid(1), step=35), from_step=35))
    assert RESTS_ON in str(why_not(log.state, delayed(3, decided_at=decided_at)))
    assert why_not(log.state, delayed(3, decided_at=log.state.n)) is None


def test_a_taint_of_an_earlier_attempt_fences_it_off() -> None:
    log = log_of_two()
    log.add(attempt(2, held=Held(attempt_uid=uid(1), step=35), from_step=35))
    decided_at = log.state.n
    late = delayed(3, decided_at=decided_at)
    assert why_not(log.state, late) is None
    log.add(Taint(attempt=1, from_step=5, to_step=5, reason="a person looks back"))
    assert "has changed what it rests on" in str(why_not(log.state, late))


def test_a_chain_comes_in_order_and_nothing_comes_between() -> None:
    log = log_of_two()
    at = log.state.n
    second = delayed(3, decided_at=at, source=uid(2), step=50)
    assert why_not(log.state, second) is not None
    log.add(delayed(2, decided_at=at), second)
    assert [one.attempt for one in log.state.attempts] == [1, 2, 3]
    log = log_of_two()
    log.add(attempt(2, held=Held(attempt_uid=uid(1), step=35), from_step=35))
    assert "has changed what it rests on" in str(why_not(log.state, second))


def test_it_was_decided_on_no_more_records_than_there_are_and_from_what_nodes_hold() -> None:
    log = log_of_two()
    assert "decided on 99 records" in str(why_not(log.state, delayed(2, decided_at=99)))
    from_ready = attempt(2, ready=6, from_step=30, decided_at=log.state.n)
    assert "not held by the nodes" in str(why_not(log.state, from_ready))


def test_a_fold_that_is_kept_knows_what_it_must_have_known() -> None:
    log = log_of_two()
    log.add(Unpin(seq=4), Retire(seqs=(4,)))
    kept = decode(encode(log.state), key=snap_key("job", log.state.n), job="job")
    assert kept == log.state
    assert kept.settled == log.state.n


def test_the_log_in_words_says_so() -> None:
    log = log_of_two()
    log.add(delayed(2, decided_at=log.state.n))
    (*_, last) = record_lines(tuple(entry for entry, _ in read_entries(log.store, "job")))
    assert "attempt 2, 2 ranks, from step 35, held by the nodes; decided without the log, on 8 records" in last.what
