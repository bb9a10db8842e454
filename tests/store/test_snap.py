"""Folds that are kept of a log: the same as the log says, passed over when they are not, and never needed."""

from __future__ import annotations

import time

import msgspec
import pytest
from tests.support.fake_store import FakeStore
from tests.support.logs import SPEC, LogWriter, attempt, job, ready, uid

from toprope.store.errors import LogCorruptError
from toprope.store.log import ready_book
from toprope.store.log.chain import read_log, read_on
from toprope.store.log.fold import JobState
from toprope.store.log.records import Elected, Held, Metric, Pin, Retire, Struck, Taint
from toprope.store.log.snap import decode, encode, newest_snap, put_snap
from toprope.store.look.show import read_job, read_state
from toprope.store.names import Key, log_key, snap_key


class CountingStore(FakeStore):
    reads = 0

    def read(self, key: Key, *, start: int = 0, length: int | None = None, uncached: bool = False) -> bytes:
        self.reads += 1
        return super().read(key, start=start, length=length, uncached=uncached)


def eventful() -> tuple[CountingStore, LogWriter]:
    """Return a log with a record of each kind, and more READYs after it."""
    store = CountingStore()
    log = LogWriter(store).begin()
    log.add(attempt(1), ready(10), ready(20, parent=4), ready(30, parent=5), Pin(seq=4))
    log.add(Metric(seq=6, name="val_loss", value=2.0))
    log.add(ready(35, parent=6), Retire(seqs=(5,)))
    log.add(Taint(attempt=1, from_step=30, to_step=None, reason="NaN"))
    struck = (Struck(attempt_uid=uid(1), step=30, why="bad"),)
    log.add(attempt(2, held=Held(attempt_uid=uid(1), step=25), from_step=25, struck=struck))
    log.add(ready(40, number=2, parent=log.state.head))
    return store, log


def test_a_fold_that_is_kept_is_the_fold() -> None:
    _, log = eventful()
    assert decode(encode(log.state), key=snap_key("job", log.state.n), job="job") == log.state


def test_of_a_ready_no_more_is_kept_than_decides_something() -> None:
    _, log = eventful()
    older, newer = log.state.readies[4], log.state.readies[5]
    assert newer == msgspec.structs.replace(ready(20, parent=4), term=log.state.term)
    assert newer.attempt_uid is older.attempt_uid


def test_a_fold_of_an_earlier_version_which_kept_readies_whole_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    _, now = eventful()
    monkeypatch.setattr(ready_book, "_lean", lambda whole: whole)
    _, before = eventful()
    whole = encode(before.state)
    assert before.state.readies[4].prev.encode() in whole
    monkeypatch.undo()
    again = decode(whole, key=snap_key("job", before.state.n), job="job")
    assert again.readies == now.state.readies


def test_a_log_is_read_from_its_newest_fold_on() -> None:
    store, log = eventful()
    put_snap(store, log.state)
    put_snap(store, log.state)
    log.add(ready(50, number=2, parent=log.state.head))
    store.reads = 0
    assert read_state(store, "job") == log.state == read_log(store, "job")
    assert newest_snap(store, "job").n == log.state.n - 1
    store.reads = 0
    read_state(store, "job")
    assert store.reads < 10


@pytest.mark.parametrize("at", range(0, 2000, 37))
def test_a_fold_with_any_byte_changed_is_passed_over_with_a_warning(at: int, caplog: pytest.LogCaptureFixture) -> None:
    store, log = eventful()
    put_snap(store, log.state)
    key = snap_key("job", log.state.n)
    body = bytearray(store.objects[key])
    body[at % len(body)] ^= 1
    store.objects[key] = bytes(body)
    assert read_state(store, "job") == log.state
    assert newest_snap(store, "job") == JobState(job="job")
    assert "passed over, as the log tells it all" in caplog.text


def test_a_fold_of_another_log_is_passed_over_for_an_older_one_of_this() -> None:
    store, log = eventful()
    older = read_on(store, JobState(job="job"))
    put_snap(store, older)
    other = LogWriter(FakeStore())
    other.add(job(job_uid="0e" * 16), Elected(), job(spec=SPEC, job_uid="0e" * 16))
    other.add(attempt(1), *(ready(step) for step in (1,)))
    for step in range(2, 20):
        other.add(ready(step, parent=other.state.head))
    log.add(ready(50, number=2, parent=log.state.head))
    stray = read_on(other.store, JobState(job="job"))
    assert stray.n > older.n
    store.objects[snap_key("job", stray.n)] = encode(stray)
    store.objects[snap_key("job", older.n + 1)] = encode(older)
    assert newest_snap(store, "job") == older
    assert read_state(store, "job") == log.state


def test_no_fold_is_needed() -> None:
    store, log = eventful()
    assert not [key for key in store.objects if "/snap/" in key]
    assert read_state(store, "job") == log.state


def test_a_fold_of_more_records_than_there_are_proves_that_the_end_of_the_log_was_lost() -> None:
    store, log = eventful()
    put_snap(store, log.state)
    del store.objects[log_key("job", log.state.n - 1)]
    named = rf"LOG_CORRUPT record {log.state.n - 1} .*although {snap_key('job', log.state.n)} was made of it"
    for read in (newest_snap, read_state, read_job):
        with pytest.raises(LogCorruptError, match=named):
            read(store, "job")


def test_a_fold_that_is_none_proves_nothing_of_a_longer_log() -> None:
    store, log = eventful()
    store.objects[snap_key("job", log.state.n + 5)] = b"{}"
    assert read_job(store, "job").state == log.state


@pytest.mark.long
@pytest.mark.timeout(120)
def test_ten_thousand_records_are_read_in_seconds_and_with_a_fold_in_less() -> None:
    store = FakeStore()
    log = LogWriter(store).begin()
    log.add(attempt(1))
    live = []
    while log.state.n < 10_000:
        live.append(log.add(ready(log.state.n, parent=log.state.head)))
        if len(live) > 4:
            log.add(Retire(seqs=(live.pop(0),)))
    began = time.process_time()
    assert read_log(store, "job") == log.state
    whole_s = time.process_time() - began
    put_snap(store, log.state)
    began = time.process_time()
    assert read_state(store, "job") == log.state
    from_fold_s = time.process_time() - began
    assert whole_s < 5
    assert from_fold_s < whole_s / 4
