"""The job log: its encoding, reading it, and appending to it exactly once whatever is lost."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.fake_store import FakeStore, Fault
from tests.support.logs import LogWriter, attempt, job, ready

from toprope.store.conformance import ObjectStoreContract
from toprope.store.errors import CkptError, FencedError, LogCorruptError, UnavailableError
from toprope.store.log.chain import (
    BACK_OFF_S,
    Appended,
    Call,
    Create,
    Read,
    Sleep,
    append_steps,
    apply,
    drive,
    encode,
    perform,
    read_entries,
    read_log,
    run_steps,
)
from toprope.store.log.fold import JobState
from toprope.store.log.records import Elected, Job, Record, Taint
from toprope.store.names import Key, log_key
from toprope.store.objects.protocol import ObjectStore


class TestFakeStore(ObjectStoreContract):
    def make(self, tmp_path: Path) -> ObjectStore:
        return FakeStore()


def small_log() -> tuple[FakeStore, LogWriter]:
    store = FakeStore()
    log = LogWriter(store).begin()
    log.add(attempt(1), ready(10))
    return store, log


def run(store: FakeStore, steps: object, during: Callable[[Call], None] = lambda _: None) -> Appended:
    """Run append steps without waiting; ``during`` sees each call first."""

    def call(wanted: Call) -> bytes | None:
        during(wanted)
        return None if isinstance(wanted, Sleep) else perform(store, wanted)

    return run_steps(steps, call)  # type: ignore[arg-type] # the steps of any append


def test_the_sum_can_be_computed_with_json_and_hashlib_alone() -> None:
    record = Taint(attempt=1, from_step=2, to_step=None, reason='NaN, "é" \u2028 \x1f/\\ \U0001f9d7', nonce="ab" * 4)
    body = encode(record)
    fields = json.loads(body)
    total = fields.pop("sum")
    plain = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert hashlib.sha256(plain).hexdigest() == total
    assert fields["kind"] == "TAINT"


def test_each_record_names_the_one_before() -> None:
    store, log = small_log()
    before = ""
    for number in range(log.state.n):
        body = store.objects[log_key("job", number)]
        assert json.loads(body)["prev"] == before
        before = hashlib.sha256(body).hexdigest()
    assert log.state.tail_sha256 == before


def test_reading_gives_the_state_that_the_writer_had() -> None:
    store, log = small_log()
    assert read_log(store, "job") == log.state
    assert [(entry.number, entry.key) for entry, _ in read_entries(store, "job")] == [
        (number, log_key("job", number)) for number in range(5)
    ]
    assert read_log(store, "another") == JobState(job="another")


@pytest.mark.parametrize("number", range(5))
def test_every_flipped_byte_of_a_log_is_found(number: int) -> None:
    store, _ = small_log()
    key = log_key("job", number)
    good = store.objects[key]
    for at in range(len(good)):
        store.objects[key] = good[:at] + bytes([good[at] ^ (1 << at % 8)]) + good[at + 1 :]
        with pytest.raises(LogCorruptError, match=rf"^LOG_CORRUPT record {number} \({key}\): "):
            read_log(store, "job")


@pytest.mark.parametrize("number", range(4))
def test_whoever_begins_to_write_puts_nothing_in_the_place_of_a_missing_record(number: int) -> None:
    store, _ = small_log()
    del store.objects[log_key("job", number)]
    before = dict(store.objects)

    def begin(state: JobState) -> Record:
        return Elected() if state.n else Job(uid="0c" * 16, name="job")

    with pytest.raises(LogCorruptError, match=rf"^LOG_CORRUPT record {number} .*it is missing, although job/log/"):
        run(store, append_steps(JobState(job="job"), begin, term=0, writer_id="d"))
    assert store.objects == before


def test_a_log_that_grows_by_two_while_somebody_is_elected_has_no_hole() -> None:
    store, log = small_log()
    end = log.state.n

    def during(call: Call) -> None:
        if isinstance(call, Read) and call.key == log_key("job", end + 1) and log.state.n == end:
            log.add(*(Taint(attempt=1, from_step=step, to_step=step, reason="x") for step in (11, 12)))

    steps = append_steps(log.state, lambda _: Elected(), term=1, writer_id="d")
    done = run(store, steps, during)
    assert (done.seq, read_log(store, "job")) == (end + 2, done.state)


@pytest.mark.parametrize("number", range(4))
def test_a_missing_record_before_others_is_found(number: int) -> None:
    store, _ = small_log()
    del store.objects[log_key("job", number)]
    with pytest.raises(LogCorruptError, match=rf"^LOG_CORRUPT record {number} .*it is missing, although job/log/"):
        read_log(store, "job")


@pytest.mark.parametrize(
    "name", ["lost+found/x", "old/00000000000000000009.json", "00000000000000000009.json~", "notes"]
)
def test_a_file_that_someone_left_in_the_log_is_no_missing_record(name: str) -> None:
    store, _ = small_log()
    before = read_log(store, "job")
    store.objects[Key(f"job/log/{name}")] = b"not a record"
    assert read_log(store, "job") == before


def test_a_log_of_another_job_is_refused() -> None:
    store, _ = small_log()
    for number in range(5):
        store.objects[log_key("copy", number)] = store.objects[log_key("job", number)]
    with pytest.raises(LogCorruptError, match=r"it names job 'job' in the log of 'copy'"):
        read_log(store, "copy")


def test_a_record_that_is_too_long_is_refused_unread() -> None:
    with pytest.raises(LogCorruptError, match="at most 65536"):
        apply(JobState(job="job"), b'{"kind":"JOB"' + b" " * 65536 + b"}")


@given(
    st.binary(max_size=400)
    | st.text().map(str.encode)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["kind", "term", "sum"]), inner),
    ).map(lambda value: json.dumps(value).encode())
)
def test_random_bytes_are_never_a_record(body: bytes) -> None:
    with pytest.raises(LogCorruptError):
        apply(JobState(job="job"), body)


@given(st.data())
def test_a_record_with_one_field_changed_is_never_accepted(data: st.DataObject) -> None:
    store, _ = small_log()
    key = log_key("job", data.draw(st.integers(0, 4)))
    fields = json.loads(store.objects[key])
    name = data.draw(st.sampled_from(sorted(fields)))
    value = data.draw(st.none() | st.integers() | st.text() | st.just(str(fields[name]).upper()))
    changed = json.dumps(fields | {name: value}, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode(
        errors="surrogatepass"
    )
    if changed != store.objects[key]:
        store.objects[key] = changed
        with pytest.raises(LogCorruptError):
            read_log(store, "job")


def steps(log: LogWriter, record: Record, *, term: int | None = None) -> object:
    return append_steps(log.state, lambda _: record, term=log.term if term is None else term, writer_id=log.writer_id)


@pytest.mark.parametrize(
    "faults",
    [
        ["request lost"],
        ["reply lost"],
        ["late"],
        ["request lost", "reply lost"],
        ["request lost", "request lost", "request lost", "late"],
        ["late", "late", "reply lost"],
    ],
)
@pytest.mark.parametrize("lands_at", ["sleep", "end"])
def test_a_lost_reply_appends_exactly_once(faults: list[Fault], lands_at: str) -> None:
    store, log = small_log()
    store.faults.extend(faults)

    def during(call: Call) -> None:
        if isinstance(call, Sleep) and lands_at == "sleep":
            store.land()

    done = run(store, steps(log, ready(20, parent=4)), during)
    store.land()
    assert done.seq == 5
    assert store.created.count(log_key("job", 5)) == 1
    assert read_log(store, "job") == done.state
    assert sum(isinstance(entry.record, type(done.record)) for entry, _ in read_entries(store, "job")) == 2


def test_an_append_that_gives_up_may_land_and_is_recognised_by_the_next() -> None:
    store, log = small_log()
    store.faults.extend(["late"] * (len(BACK_OFF_S) + 1))
    with pytest.raises(UnavailableError, match=r"does not say whether .*: .*no answer yet"):
        run(store, steps(log, ready(20, parent=4)))
    store.land()

    def make(state: JobState) -> Record | None:
        return None if state.last_step == 20 else ready(20, parent=4)

    done = run(store, append_steps(log.state, make, term=1, writer_id="c1"))
    assert (done.seq, done.record, done.state.n, done.state.last_step) == (None, None, 6, 20)


def test_the_loser_of_a_slot_thinks_again() -> None:
    store, log = small_log()
    rival = LogWriter(store)
    rival.state, rival.term = log.state, log.term
    seen: list[int] = []

    def make(state: JobState) -> Record:
        seen.append(state.n)
        return ready(30, parent=state.head)

    def during(call: Call) -> None:
        if isinstance(call, Create) and call.key == log_key("job", 5) and rival.state.n == 5:
            rival.add(ready(20, parent=4))

    done = run(store, append_steps(log.state, make, term=1, writer_id="c1"), during)
    assert seen == [5, 6]
    assert (done.seq, done.state.head) == (6, 6)


def test_of_two_elections_each_gets_a_term_of_its_own() -> None:
    store, log = small_log()
    rival = LogWriter(store)
    rival.state, rival.writer_id = log.state, "c2"

    def during(call: Call) -> None:
        if isinstance(call, Create) and rival.state.n == 5:
            rival.add(Elected())

    done = run(store, steps(log, Elected()), during)
    assert (rival.term, done.state.term, done.state.writer_id) == (2, 3, "c1")


def test_a_replaced_writer_is_fenced() -> None:
    store, log = small_log()
    LogWriter(store).add(Elected())
    with pytest.raises(FencedError, match="term 2 of c1 has been elected"):
        run(store, steps(log, ready(20, parent=4)))
    assert read_log(store, "job").n == 6


def test_a_writer_that_is_overtaken_in_mid_append_is_fenced() -> None:
    store, log = small_log()
    rival = LogWriter(store)

    def during(call: Call) -> None:
        if isinstance(call, Create) and rival.term == 0:
            rival.add(Elected())

    with pytest.raises(FencedError):
        run(store, steps(log, ready(20, parent=4)), during)
    assert log_key("job", 6) not in store.objects


def test_a_damaged_log_takes_no_append() -> None:
    store, log = small_log()
    store.objects[log_key("job", 5)] = b"{}"
    with pytest.raises(LogCorruptError):
        run(store, steps(log, ready(20, parent=4)))
    assert len(store.objects) == 6


def test_reads_are_tried_again_and_given_up() -> None:
    store, log = small_log()
    store.reads_lost = len(BACK_OFF_S)
    assert run(store, steps(log, ready(20, parent=4))).seq == 5
    store.reads_lost = len(BACK_OFF_S) + 1
    with pytest.raises(UnavailableError):
        run(store, steps(log, ready(30, parent=5)))


def test_what_others_appended_is_read_from_the_medium_before_it_is_acted_on() -> None:
    store, log = small_log()
    calls: list[Call] = []
    run(store, append_steps(JobState(job="job"), lambda _: None, term=1, writer_id="c1"), calls.append)
    assert calls[-1] == Read(key=log_key("job", 4), uncached=True)
    calls.clear()
    run(store, append_steps(log.state, lambda _: None, term=1, writer_id="c1"), calls.append)
    assert calls == [Read(key=log_key("job", 5))]


def test_an_illegal_record_is_a_bug_of_the_writer_and_is_not_written() -> None:
    store, log = small_log()
    with pytest.raises(AssertionError, match="step 10 is not past step 10"):
        run(store, steps(log, ready(10, parent=4)))
    assert len(store.objects) == 5


def test_the_nonce_of_each_record_is_new() -> None:
    store, _ = small_log()
    nonces = [json.loads(body)["nonce"] for body in store.objects.values()]
    assert len(set(nonces)) == len(nonces)


async def test_the_same_steps_run_in_an_event_loop() -> None:
    store, log = small_log()
    store.faults.extend(["reply lost"])

    async def call(wanted: Call) -> bytes | None:
        await asyncio.sleep(0)
        return None if isinstance(wanted, Sleep) else perform(store, wanted)

    done = await drive(append_steps(log.state, lambda _: ready(20, parent=4), term=1, writer_id="c1"), call)
    assert read_log(store, "job") == done.state
    with pytest.raises(CkptError):
        await drive(append_steps(log.state, lambda _: ready(30, parent=5), term=0, writer_id="c1"), call)


def test_a_record_of_an_unknown_kind_or_with_an_unknown_field_is_refused() -> None:
    for change in ({"kind": "MERGE"}, {"colour": "red"}):
        fields = msgspec.to_builtins(job()) | {"nonce": "ab" * 16} | change
        fields.pop("sum")
        plain = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        body = json.dumps(fields | {"sum": hashlib.sha256(plain.encode()).hexdigest()}, sort_keys=True)
        with pytest.raises(LogCorruptError, match="not a record"):
            apply(JobState(job="job"), body.encode())
