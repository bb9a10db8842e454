"""The S3 store on a strict server that fails on demand."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from tests.support.logs import LogWriter, job
from tests.support.strict_s3 import (
    ACCESS_KEY,
    SECRET_KEY,
    Call,
    Fault,
    Rule,
    Stored,
    StrictS3,
    Upload,
    write_credentials,
)
from urllib3.connection import HTTPConnection

from toprope.store.conformance import ObjectStoreContract
from toprope.store.digest import digest, digest_of_object
from toprope.store.errors import (
    AlreadyExistsError,
    CkptError,
    CorruptObjectError,
    NoStoreError,
    UnavailableError,
    UsageError,
)
from toprope.store.log.chain import Sleep, append_steps, perform, read_log, run_steps
from toprope.store.log.records import Elected
from toprope.store.names import Key
from toprope.store.objects import opening, s3
from toprope.store.objects.opening import open_store, sweep_uploads
from toprope.store.objects.parts import Limits
from toprope.store.objects.protocol import ObjectStore
from toprope.store.objects.retry import BackOff, RetryStore
from toprope.store.objects.s3 import S3Store
from toprope.store.objects.s3_clients import Clients
from toprope.store.objects.s3_location import parse_location

KEY = Key("job/a")
PART = 1000
IN_PARTS = Limits(part_bytes=PART, min_part_bytes=1, max_parts=50, max_object_bytes=50 * PART)
LARGE = bytes(range(250)) * 4 * 12 + b"tail"  # 12 parts and a short one
FORK = multiprocessing.get_context("fork")
AT_ONCE = BackOff(sleep=lambda _: None)


def store_on(
    server: StrictS3, *, limits: Limits | None = None, prefix: str = "", back_off: BackOff = AT_ONCE, **options: str
) -> S3Store:
    location = parse_location(server.root(prefix, **options))
    return S3Store(Clients(location=location, read_timeout_s=5), limits=limits, back_off=back_off)


class OnAStrictServer(ObjectStoreContract):
    race_rounds = 3

    @pytest.fixture(autouse=True)
    def _server(self, strict: StrictS3) -> None:
        self.server = strict

    def make(self, tmp_path: Path) -> ObjectStore:
        return store_on(self.server, prefix="a/prefix")


class TestS3Store(OnAStrictServer):
    pass


class TestS3StoreInParts(OnAStrictServer):
    """Each object of two bytes and more goes up in parts."""

    def make(self, tmp_path: Path) -> ObjectStore:
        self.server.min_part_bytes = 1
        return store_on(self.server, limits=Limits(part_bytes=1, min_part_bytes=1, max_parts=3))


class TestOpenedS3Store(OnAStrictServer):
    def make(self, tmp_path: Path) -> ObjectStore:
        return open_store(self.server.root("prefix"), write=True)


@pytest.mark.fault("B124")
class TestS3StoreWhereChecksumHeadersAreRefused(OnAStrictServer):
    def make(self, tmp_path: Path) -> ObjectStore:
        self.server.checksums = "refused"
        self.server.min_part_bytes = 1
        limits = Limits(part_bytes=100, min_part_bytes=1)
        return store_on(self.server, limits=limits, checksums="when_required")


@pytest.mark.fault("B124")
class TestS3StoreWhereChecksumsAreIgnored(OnAStrictServer):
    def make(self, tmp_path: Path) -> ObjectStore:
        self.server.checksums = "ignored"
        self.server.min_part_bytes = 1
        return store_on(self.server, limits=Limits(part_bytes=100, min_part_bytes=1))


# Parts


def in_parts(server: StrictS3) -> S3Store:
    server.min_part_bytes = PART
    return store_on(server, limits=IN_PARTS)


def test_a_large_object_goes_up_in_parts_with_checksums_that_the_server_checks(strict: StrictS3) -> None:
    store = in_parts(strict)
    store.create(KEY, memoryview(LARGE))
    assert store.read(KEY) == LARGE
    parts = strict.asked("UploadPart")
    assert sorted(call.part for call in parts) == list(range(1, 14))
    assert all("x-amz-checksum-crc32" in call.headers for call in parts)
    (complete,) = strict.asked("CompleteMultipartUpload")
    assert complete.headers["if-none-match"] == "*"


@pytest.mark.fault("B126")
def test_what_is_too_large_is_refused_before_a_byte_is_sent(strict: StrictS3) -> None:
    with pytest.raises(UsageError, match="too many"):
        in_parts(strict).create(KEY, bytes(50 * PART + 1))
    assert strict.calls == []
    in_parts(strict).create(KEY, bytes(50 * PART))
    assert len(strict.asked("UploadPart")) == 50


def test_more_than_is_read_at_once_is_refused_before_it_comes(
    strict: StrictS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(strict.root())
    store.create(KEY, bytes(102))
    monkeypatch.setattr("toprope.store.objects.protocol.MAX_WHOLE_BYTES", 100)
    for start in (0, 1):
        with pytest.raises(CorruptObjectError, match="at most 100 are read at once"):
            store.read(KEY, start=start)
    assert (len(store.read(KEY, start=2)), len(store.read(KEY, length=102))) == (100, 102)


def test_a_part_that_fails_is_sent_again_alone(strict: StrictS3) -> None:
    store = in_parts(strict)
    strict.rules += [
        Rule(operation="UploadPart", fault="503 SlowDown", times=2, when=lambda call: call.part == 3),
        Rule(operation="UploadPart", fault="reply lost", when=lambda call: call.part == 4),
        Rule(operation="UploadPart", fault="request lost", when=lambda call: call.part == 5),
    ]
    store.create(KEY, LARGE)
    assert store.read(KEY) == LARGE
    sent = [call.part for call in strict.asked("UploadPart")]
    assert [sent.count(number) for number in (2, 3, 4, 5, 6)] == [1, 3, 2, 2, 1]


@pytest.mark.fault("B127")
def test_an_upload_that_fails_is_aborted_even_if_the_abort_fails_once(strict: StrictS3) -> None:
    store = in_parts(strict)
    strict.rules += [
        Rule(operation="UploadPart", fault="500 InternalError", times=99, when=lambda call: call.part == 3),
        Rule(operation="AbortMultipartUpload", fault="500 InternalError"),
    ]
    with pytest.raises(UnavailableError):
        store.create(KEY, LARGE)
    assert strict.uploads == {}
    assert strict.objects == {}
    assert len(strict.asked("UploadPart")) < 60


def test_an_upload_that_fails_lets_go_of_the_callers_memory(strict: StrictS3) -> None:
    memory = bytearray(LARGE)
    view = memoryview(memory)
    strict.rules.append(Rule(operation="UploadPart", fault="500 InternalError", times=99))
    with pytest.raises(UnavailableError) as caught:
        in_parts(strict).create(KEY, view)
    view.release()
    memory.append(0)  # BufferError if anybody had a view of it still, as a slot could then not be unmapped
    assert "500" in str(caught.value)


def test_an_upload_that_another_swept_is_given_up(strict: StrictS3, caplog: pytest.LogCaptureFixture) -> None:
    strict.on_call = lambda call: strict.uploads.clear() if call.part == 3 else None
    with pytest.raises(UnavailableError, match="no longer known"):
        in_parts(strict).create(KEY, LARGE)
    assert strict.objects == {}
    assert caplog.text == ""  # nothing is left that would have to be swept


@pytest.mark.fault("B127")
def test_an_upload_that_is_cancelled_is_aborted(strict: StrictS3) -> None:
    def cancel(_: float) -> None:
        raise KeyboardInterrupt

    store = store_on(strict, limits=IN_PARTS, back_off=BackOff(sleep=cancel))
    strict.rules.append(Rule(operation="UploadPart", fault="503 SlowDown", when=lambda call: call.part == 3))
    with pytest.raises(KeyboardInterrupt):
        store.create(KEY, LARGE)
    assert strict.uploads == {}


@pytest.mark.fault("B127")
def test_what_a_killed_uploader_left_is_swept_after_the_grace(strict: StrictS3) -> None:
    store = in_parts(strict)

    def kill_at_part_3(call: Call) -> None:
        if call.part == 3 and child.pid is not None:
            os.kill(child.pid, signal.SIGKILL)

    strict.on_call = kill_at_part_3
    child = FORK.Process(target=store.create, args=(KEY, LARGE))
    child.start()
    child.join(30)
    assert child.exitcode == -signal.SIGKILL
    assert len(strict.uploads) == 1
    assert sweep_uploads(strict.root(), "job") == ()  # it could be another one's, and alive
    strict.clock_ahead = timedelta(minutes=14)
    assert store.sweep_uploads("job/", grace=timedelta(minutes=10)) == (KEY,)
    assert strict.uploads == {}


@pytest.mark.fault("B127")
@pytest.mark.parametrize("honoured", [True, False])
def test_uploads_of_other_jobs_are_not_swept(strict: StrictS3, *, honoured: bool) -> None:
    strict.page = 2
    strict.honours_prefixes = honoured
    store = store_on(strict, prefix="root")
    keys = ["root/job/a", "root/job/a", "root/job/b", "root/job-1/a", "root/job1/a", "root/a/job/a", "job/a"]
    strict.uploads = {
        f"{number:032x}": Upload(key=key, metadata={}, checksums=False, initiated=strict.now() - timedelta(days=2))
        for number, key in enumerate(keys)
    }
    strict.uploads["young"] = Upload(key="root/job/c", metadata={}, checksums=False, initiated=strict.now())
    strict.rules.append(Rule(operation="AbortMultipartUpload", fault="500 InternalError"))
    assert store.sweep_uploads("job/", grace=timedelta(days=1)) == ("job/a", "job/a", "job/b")
    left = sorted(upload.key for upload in strict.uploads.values())
    assert left == sorted([*keys[3:], "root/job/c"])


# Whose object is it?


def test_a_put_that_was_done_although_the_server_says_it_exists_is_ours(strict: StrictS3) -> None:
    strict.rules.append(Rule(operation="PutObject", fault="done, then 412 PreconditionFailed"))
    store_on(strict).create(KEY, b"mine")  # a gateway lost the first reply and asked again
    assert strict.objects[KEY].body == b"mine"


def test_equal_bytes_of_another_writer_are_not_ours(strict: StrictS3) -> None:
    store_on(strict).create(KEY, b"same")
    with pytest.raises(AlreadyExistsError):
        store_on(strict).create(KEY, b"same")


@pytest.mark.parametrize("fault", ["request lost", "reply lost", "500 InternalError", "409 ConditionalRequestConflict"])
def test_a_put_without_a_clear_answer_is_tried_once_and_left_open(strict: StrictS3, fault: Fault) -> None:
    strict.rules.append(Rule(operation="PutObject", fault=fault))
    with pytest.raises(UnavailableError):
        store_on(strict).create(KEY, b"mine")
    assert len(strict.asked("PutObject")) == 1


@pytest.mark.parametrize(
    "fault", ["reply lost", "done, then 404 NoSuchUpload", "done, then 412 PreconditionFailed", "503 SlowDown"]
)
def test_an_upload_that_was_completed_is_known_by_its_id(strict: StrictS3, fault: Fault) -> None:
    strict.rules.append(Rule(operation="CompleteMultipartUpload", fault=fault))
    in_parts(strict).create(KEY, LARGE)
    assert strict.objects[KEY].body == LARGE
    assert strict.uploads == {}


@pytest.mark.parametrize("fault", ["request lost", "lands late", "500 InternalError", "409 ConditionalRequestConflict"])
def test_an_upload_that_was_not_completed_never_will_be(strict: StrictS3, fault: Fault) -> None:
    strict.rules.append(Rule(operation="CompleteMultipartUpload", fault=fault))
    with pytest.raises(UnavailableError):
        in_parts(strict).create(KEY, LARGE)
    strict.land()
    assert strict.uploads == {}
    assert strict.objects == {}


def test_an_upload_that_lands_just_before_it_is_aborted_is_ours(strict: StrictS3) -> None:
    strict.rules.append(Rule(operation="CompleteMultipartUpload", fault="lands late"))
    strict.on_call = lambda call: strict.land() if call.operation == "AbortMultipartUpload" else None
    in_parts(strict).create(KEY, LARGE)
    assert strict.objects[KEY].body == LARGE


def test_an_upload_that_loses_its_key_to_another_is_aborted(strict: StrictS3) -> None:
    store = in_parts(strict)
    store.create(KEY, b"theirs")
    with pytest.raises(AlreadyExistsError):
        store.create(KEY, LARGE)
    assert strict.uploads == {}
    assert store.read(KEY) == b"theirs"


@pytest.mark.fault("B117")
@pytest.mark.parametrize("size", [500, 2 * PART + 1])
def test_of_two_that_commit_the_same_key_one_wins_in_each_round(strict: StrictS3, size: int) -> None:
    stores = [in_parts(strict), in_parts(strict)]
    start = threading.Barrier(2)

    def commit(writer: int, key: Key) -> bool:
        start.wait()
        try:
            stores[writer].create(key, bytes([writer]) * size)
        except AlreadyExistsError:
            return False
        return True

    with ThreadPoolExecutor(2) as pool:
        for number in range(100 if size < PART else 30):
            key = Key(f"job/manifests/{number}")
            won = list(pool.map(commit, (0, 1), (key, key)))
            assert sorted(won) == [False, True]
            assert strict.objects[key].body == bytes([won.index(True)]) * size


# The job log over it


def add_term(store: ObjectStore, writer: str) -> int | None:
    """Append an election without waiting where an append would."""
    steps = append_steps(read_log(store, "job"), lambda _: Elected(), term=0, writer_id=writer)
    return run_steps(steps, lambda call: None if isinstance(call, Sleep) else perform(store, call)).seq


def begun(server: StrictS3) -> S3Store:
    store = store_on(server)
    LogWriter(store, "job").add(job("job"))
    return store


@pytest.mark.fault("B116")
def test_a_conflict_is_asked_again_and_commits_once(strict: StrictS3) -> None:
    store = begun(strict)
    strict.rules.append(Rule(operation="PutObject", fault="409 ConditionalRequestConflict"))
    assert add_term(store, "a") == 1
    assert read_log(store, "job").n == 2


@pytest.mark.fault("B116")
def test_conflicts_without_end_are_a_busy_store_and_no_lost_race(strict: StrictS3) -> None:
    store = begun(strict)
    strict.rules.append(Rule(operation="PutObject", fault="409 ConditionalRequestConflict", times=99))
    with pytest.raises(UnavailableError):
        add_term(store, "a")
    with pytest.raises(UnavailableError, match="busy with another write"):
        store.create(KEY, b"x")
    assert read_log(store, "job").n == 1


@pytest.mark.parametrize("fault", ["reply lost", "request lost", "lands late", "503 SlowDown", "500 InternalError"])
def test_a_record_is_appended_once_whatever_is_lost(strict: StrictS3, fault: Fault) -> None:
    store = begun(strict)
    strict.rules.append(Rule(operation="PutObject", fault=fault, times=2))
    assert add_term(store, "a") == 1
    strict.land()
    state = read_log(store, "job")
    assert (state.n, state.writer_id) == (2, "a")


# Reading


@pytest.mark.fault("B122")
def test_ranges_of_two_versions_are_never_joined(strict: StrictS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toprope.store.digest.CHUNK_BYTES", 500)
    store, replacement = store_on(strict), b"\x07" * len(LARGE)
    store.create(KEY, LARGE)

    def replace(call: Call) -> None:
        if call.headers.get("range", "").startswith("bytes=1000-"):
            strict.objects[KEY].body, strict.objects[KEY].etag = replacement, '"another"'

    strict.on_call = replace
    with pytest.raises(CorruptObjectError, match="was replaced"):
        digest_of_object(store, KEY)
    assert digest_of_object(store, KEY) == digest(replacement)


def test_an_answer_that_ends_early_is_no_object(strict: StrictS3) -> None:
    store = store_on(strict)
    store.create(KEY, LARGE)
    strict.rules.append(Rule(operation="GetObject", fault="body cut short", times=2))
    for length in (None, 700):
        with pytest.raises(UnavailableError):
            store.read(KEY, length=length)
    assert store.read(KEY) == LARGE


def test_a_part_can_be_read_in_each_way_that_signers_and_senders_have() -> None:
    """With awscrt installed botocore signs by it, and that reads into memory of its own, of just the length it has."""
    body = s3._Reader(memoryview(LARGE))
    into = bytearray(1000)
    parts = []
    while count := body.readinto(memoryview(into)):
        parts.append(bytes(into[:count]))
    assert b"".join(parts) == LARGE
    assert body.seek(0) == 0
    assert b"".join(iter(lambda: bytes(body.read(16)), b"")) == LARGE


def test_an_answer_that_ends_early_fills_nothing_that_is_believed(strict: StrictS3) -> None:
    store = store_on(strict)
    store.create(KEY, LARGE)
    strict.rules.append(Rule(operation="GetObject", fault="body cut short", times=1))
    pieces = list[bytes]()
    with pytest.raises(UnavailableError, match=rf"ended at byte \d+ of {len(LARGE)}"):
        pieces.extend(map(bytes, store.stream(KEY, start=0, length=len(LARGE))))
    assert LARGE.startswith(b"".join(pieces))
    assert b"".join(map(bytes, store.stream(KEY, start=0, length=len(LARGE)))) == LARGE


def test_after_an_answer_that_ends_early_only_the_rest_is_asked_for(
    strict: StrictS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toprope.store.objects.pieces.STREAM_BYTES", 1000)
    store = RetryStore(store_on(strict), AT_ONCE)
    store.create(KEY, LARGE)
    strict.rules.append(Rule(operation="GetObject", fault="body cut short", times=2))
    pieces = list(map(bytes, store.stream(KEY, start=2, length=len(LARGE) - 4)))
    assert b"".join(pieces) == LARGE[2:-2]
    assert max(map(len, pieces)) <= 1000
    half, quarter = 2 + (len(LARGE) - 4) // 2, 2 + (len(LARGE) - 4) * 3 // 4
    asked = [call.headers["range"] for call in strict.asked("GetObject")]
    assert asked == [f"bytes={start}-{len(LARGE) - 3}" for start in (2, half, quarter)]


def test_a_stream_that_is_left_early_leaves_nothing_of_it_to_the_next(
    strict: StrictS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toprope.store.objects.pieces.STREAM_BYTES", 1000)
    store = store_on(strict)
    store.create(KEY, LARGE)
    stream = store.stream(KEY, start=0, length=len(LARGE))
    assert next(stream) == LARGE[:1000]
    stream.close()
    assert b"".join(map(bytes, store.stream(KEY, start=0, length=len(LARGE)))) == LARGE


@pytest.mark.parametrize("hidden", [(), ("_fp",), ("_raw_stream",)], ids=["as it is", "no _fp", "no _raw_stream"])
def test_ranges_that_are_streamed_share_a_connection(
    strict: StrictS3, monkeypatch: pytest.MonkeyPatch, hidden: tuple[str, ...]
) -> None:
    connects: list[object] = []
    honest = HTTPConnection.connect

    def counted(connection: HTTPConnection) -> None:
        connects.append(connection)
        honest(connection)

    def looked_up(thing: object, name: str, *default: object) -> object:
        return default[0] if name in hidden else getattr(thing, name, *default)

    monkeypatch.setattr(HTTPConnection, "connect", counted)
    monkeypatch.setattr(s3, "getattr", looked_up, raising=False)
    store = store_on(strict)
    store.create(KEY, LARGE)
    before, found = len(connects), b""
    for start in range(0, len(LARGE), 300):
        found += b"".join(map(bytes, store.stream(KEY, start=start, length=min(300, len(LARGE) - start))))
    assert found == LARGE
    assert len(connects) - before <= 1


def test_an_answer_that_does_not_tell_its_length_is_none(strict: StrictS3) -> None:
    store = store_on(strict)
    store.create(KEY, LARGE)
    strict.rules.append(Rule(operation="GetObject", fault="no length told"))
    with pytest.raises(UnavailableError, match="without 'ContentLength'"):
        store.read(KEY)
    assert store.read(KEY) == LARGE


def test_a_server_that_ignores_ranges_is_no_source(strict: StrictS3) -> None:
    strict.honours_ranges = False
    store = store_on(strict)
    store.create(KEY, LARGE)
    assert store.read(KEY, length=len(LARGE)) == LARGE
    for start, length in ((0, 5), (5, 5), (len(LARGE) - 5, 5)):
        with pytest.raises(UnavailableError, match="does not send the range"):
            store.read(KEY, start=start, length=length)


def test_an_object_that_rotted_in_the_store_is_corrupt(strict: StrictS3) -> None:
    store = store_on(strict)
    store.create(KEY, b"as it was")
    strict.objects[KEY].body = b"as it is."
    with pytest.raises(CorruptObjectError):
        store.read(KEY)


def test_a_listing_of_more_than_a_page_is_whole(strict: StrictS3) -> None:
    keys = [Key(f"job/shards/a1/s000000010/rank-{rank:05d}") for rank in range(1205)]
    for key in keys:
        strict.objects[f"p/{key}"] = Stored(body=b"", etag='"e"', metadata={})
    strict.rules.append(Rule(operation="ListObjectsV2", fault="503 SlowDown"))
    assert list(store_on(strict, prefix="p").list("job/shards/")) == keys
    assert len(strict.asked("ListObjectsV2")) == 3


@pytest.mark.usefixtures("no_waiting")
def test_a_missing_bucket_is_no_missing_object(strict: StrictS3) -> None:
    root = strict.root().replace("bucket/", "bucket-2/", 1)
    store = S3Store(Clients(location=parse_location(root)), back_off=AT_ONCE)
    for look in (partial(store.read, KEY), partial(store.size, KEY), partial(store.create, KEY, b"")):
        with pytest.raises(UnavailableError, match="no such bucket"):
            look()
    for write in (False, True):
        with pytest.raises(UnavailableError, match="no such bucket"):
            open_store(root, write=write)


@pytest.mark.usefixtures("no_waiting")
def test_a_missing_bucket_is_told_of_where_the_server_only_says_that_it_failed(strict: StrictS3) -> None:
    strict.rules.append(Rule(operation="PutObject", fault="500 InternalError", times=2))
    with pytest.raises(NoStoreError, match=r"store s3://bucket-2/ at \S+: there is no such bucket; check its name"):
        open_store(strict.root().replace("bucket/", "bucket-2/", 1), write=True)
    with pytest.raises(UnavailableError, match="answered 500 InternalError") as failed:
        open_store(strict.root(), write=True)
    assert not isinstance(failed.value, NoStoreError), "waiting may help"


@pytest.mark.usefixtures("no_waiting")
def test_a_store_that_answers_is_not_asked_after(strict: StrictS3) -> None:
    with pytest.raises(NoStoreError) as refused:
        open_store(strict.root().replace("bucket/", "bucket-2/", 1))
    assert "does it run" not in str(refused.value)


@pytest.mark.parametrize("write", [False, True])
def test_whoever_waits_for_a_silent_store_is_told_so(
    strict: StrictS3, monkeypatch: pytest.MonkeyPatch, *, write: bool
) -> None:
    monkeypatch.setattr(opening, "_SILENT_S", 0.05)
    told, said = threading.Event(), list[str]()

    class Tell(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            told.set()

    heard: list[bool] = []
    strict.on_call = lambda _call: heard.append(told.wait(5))
    logging.getLogger("toprope.store").addHandler(handler := Tell())
    try:
        open_store(strict.root(), write=write)
    finally:
        logging.getLogger("toprope.store").removeHandler(handler)
    assert heard[0]
    (once,) = said
    assert "has not answered for 0.05 s; it is waited for" in once


def test_a_key_that_is_too_long_is_refused_before_it_is_sent(strict: StrictS3) -> None:
    store = store_on(strict, prefix="/".join(["p" * 200] * 5))
    with pytest.raises(UsageError, match="S3 allows 1024"):
        store.create(Key("job/" + "k" * 100), b"")
    assert strict.calls == []


# Damage and credentials on the way


def test_bytes_that_change_on_the_way_are_refused_by_the_server(strict: StrictS3) -> None:
    strict.rules.append(Rule(operation="PutObject", fault="body damaged"))
    with pytest.raises(UnavailableError):
        store_on(strict).create(KEY, b"whole")
    assert strict.objects == {}
    strict.rules.append(Rule(operation="UploadPart", fault="body damaged", when=lambda call: call.part == 2))
    in_parts(strict).create(KEY, LARGE)
    assert strict.objects[KEY].body == LARGE


@pytest.mark.fault("B125")
def test_credentials_that_expire_during_an_upload_are_read_again(strict: StrictS3, tmp_path: Path) -> None:
    def expire(call: Call) -> None:
        if call.part >= 7 and not strict.expired:
            strict.expired.add(ACCESS_KEY)
            write_credentials(tmp_path / "credentials", "AKIAFRESH")

    strict.on_call = expire
    store = in_parts(strict)
    store.create(KEY, bytes(20 * PART))
    assert len(strict.objects[KEY].body) == 20 * PART
    sent = strict.asked("UploadPart")
    again = {call.part for call in sent if call.access_key == "AKIAFRESH"}
    first = {call.part for call in sent if call.access_key == ACCESS_KEY}
    assert len(sent) == 20 + len(again & first)
    assert again & first <= set(range(7, 21)) | first
    store.read(KEY)


@pytest.mark.fault("B125")
def test_credentials_that_stay_expired_are_named(strict: StrictS3) -> None:
    strict.expired.add(ACCESS_KEY)
    with pytest.raises(UnavailableError, match="have expired"):
        store_on(strict).create(KEY, b"")


@pytest.mark.fault("B125")
@pytest.mark.parametrize(("minutes", "how"), [(-20, r"1[12]\d\d s ahead of"), (20, r"1[12]\d\d s behind")])
def test_a_wrong_clock_is_called_one_with_the_offset(strict: StrictS3, minutes: int, how: str) -> None:
    strict.clock_ahead = timedelta(minutes=minutes)
    with pytest.raises(UnavailableError, match=f"this machine's clock is {how} the store's"):
        store_on(strict).create(KEY, b"")


def _upload_eight(store: S3Store, name: str) -> None:
    for number in range(8):
        store.create(Key(f"job/{name}/{number}"), LARGE if number == 7 else b"x")


@pytest.mark.fault("B118")
def test_a_store_that_was_used_before_a_fork_works_on_both_sides(strict: StrictS3) -> None:
    store = in_parts(strict)
    store.create(KEY, LARGE)
    children = [FORK.Process(target=_upload_eight, args=(store, f"child-{number}")) for number in range(4)]
    for child in children:
        child.start()
    _upload_eight(store, "parent")
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * 4
    assert len(strict.objects) == 1 + 5 * 8


# Opening


def test_a_server_that_ignores_conditions_is_refused(strict: StrictS3) -> None:
    strict.honours_conditions = False
    with pytest.raises(UsageError, match="ignores 'If-None-Match"):
        open_store(strict.root(), write=True)
    assert strict.objects == {}
    open_store(strict.root())  # to read is safe


def test_opening_to_write_leaves_nothing_behind(strict: StrictS3) -> None:
    open_store(strict.root("x"), write=True)
    assert len(strict.asked("PutObject")) == 2
    assert strict.objects == {}


@pytest.mark.usefixtures("no_waiting")
def test_a_server_that_refuses_checksums_gets_a_hint(strict: StrictS3) -> None:
    strict.checksums = "refused"
    with pytest.raises(UnavailableError, match="add checksums=when_required"):
        open_store(strict.root(), write=True)
    open_store(strict.root(checksums="when_required"), write=True)


def test_the_endpoint_of_the_environment_is_used(strict: StrictS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", strict.endpoint)
    open_store("s3://bucket/x?path_style=1", write=True).create(KEY, b"")
    assert list(strict.objects) == [f"x/{KEY}"]


@pytest.mark.usefixtures("no_waiting")
def test_a_store_that_cannot_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch, strict: StrictS3) -> None:
    cases: tuple[tuple[str, type[CkptError], str], ...] = (
        (strict.root(endpoint="http://127.0.0.1:9"), UnavailableError, "no answer from store s3://bucket/"),
        (strict.root(profile="nobody"), UsageError, "profile"),
    )
    for root, kind, text in cases:
        with pytest.raises(kind, match=text) as caught:
            open_store(root, write=True)
        assert "\n" not in str(caught.value)
        assert gc.isenabled(), "it rests while the client is made"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.delenv("AWS_PROFILE")
    with pytest.raises(UsageError, match="no usable credentials"):
        open_store(strict.root(), write=True)


@pytest.mark.usefixtures("no_waiting")
def test_no_secret_is_logged_or_said(strict: StrictS3, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.DEBUG)
    (tmp_path / "credentials").write_text(
        f"[default]\naws_access_key_id = AKIAUNKNOWN\naws_secret_access_key = {SECRET_KEY}\n"
        "aws_session_token = canary-of-a-token\n"
    )
    with pytest.raises(UnavailableError, match="refuses access") as caught:
        open_store(strict.root(), write=True)
    said = str(caught.value) + repr(open_store) + caplog.text
    for secret in (SECRET_KEY, "canary-of-a-token", "AKIAUNKNOWN", "Signature="):
        assert secret not in said


def test_1205_objects_are_listed_and_deleted_a_thousand_at_a_time(strict: StrictS3) -> None:
    store, keys = store_on(strict), [Key(f"job/shards/{number}") for number in range(1205)]
    for key in [*keys, Key("job/other")]:
        strict.objects[key] = Stored(body=b"", etag='"e"', metadata={})
    assert len(list(store.list("job/shards/"))) == 1205
    store.delete(keys)
    assert list(strict.objects) == ["job/other"]
    assert len(strict.asked("DeleteObjects")) == 2


def test_a_server_that_deletes_only_one_by_one_is_asked_so(strict: StrictS3) -> None:
    store, keys = store_on(strict), [Key(f"job/shards/{number}") for number in range(3)]
    for key in keys:
        strict.objects[key] = Stored(body=b"", etag='"e"', metadata={})
    strict.rules.append(Rule(operation="DeleteObjects", fault="500 InternalError"))
    store.delete(keys)
    assert strict.objects == {}
    assert [call.key for call in strict.asked("DeleteObject")] == keys
