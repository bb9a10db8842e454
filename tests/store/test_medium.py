"""What is acted on was read from the medium, and a store that does not answer is given time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.fake_store import FakeStore
from tests.support.logs import LogWriter, attempt, ready

from toprope.store.errors import LogCorruptError, UnavailableError
from toprope.store.log.chain import BACK_OFF_S, Call, Read, Sleep, append_steps, perform, read_log, run_steps
from toprope.store.names import Key, log_key
from toprope.store.objects.directory import DirectoryStore


class TwoFacedStore(FakeStore):
    """Its cache holds other bytes than its medium."""

    def __init__(self) -> None:
        super().__init__()
        self.medium: dict[Key, bytes] = {}

    def read(self, key: Key, *, start: int = 0, length: int | None = None, uncached: bool = False) -> bytes:
        if uncached and key in self.medium:
            return self.medium[key]
        return super().read(key, start=start, length=length, uncached=uncached)


def two_faced_log() -> tuple[TwoFacedStore, LogWriter]:
    store = TwoFacedStore()
    log = LogWriter(store).begin()
    log.add(attempt(1), ready(10))
    return store, log


def test_a_log_whose_last_record_is_another_on_the_medium_is_not_believed() -> None:
    store, _ = two_faced_log()
    tail = log_key("job", 4)
    store.medium[tail] = store.objects[tail].replace(b'"step":10', b'"step":11')
    assert store.medium[tail] != store.objects[tail]
    with pytest.raises(LogCorruptError, match=r"LOG_CORRUPT record 4 .*the medium holds other bytes than the cache"):
        read_log(store, "job")
    store.medium[tail] = store.objects[tail]
    assert read_log(store, "job").n == 5


def calls_of_an_append(store: FakeStore, log: LogWriter) -> list[Call]:
    """Append a record, noting each call; the calls of one that gave up too."""
    calls: list[Call] = []

    def call(wanted: Call) -> bytes | None:
        calls.append(wanted)
        return None if isinstance(wanted, Sleep) else perform(store, wanted)

    steps = append_steps(log.state, lambda _: ready(20, parent=4), term=1, writer_id=log.writer_id)
    try:
        run_steps(steps, call)
    except UnavailableError:
        calls.append(Sleep(seconds=-1))
    return calls


def test_a_lost_reply_is_looked_up_past_the_cache() -> None:
    store, log = two_faced_log()
    store.faults.extend(["reply lost"])
    assert Read(key=log_key("job", 5), uncached=True) in calls_of_an_append(store, log)
    assert read_log(store, "job").last_step == 20


def test_a_store_that_does_not_answer_is_given_longer_and_longer() -> None:
    store, log = two_faced_log()
    store.faults.extend(["request lost"] * (len(BACK_OFF_S) + 1))
    waits = [call.seconds for call in calls_of_an_append(store, log) if isinstance(call, Sleep)]
    assert waits == [*BACK_OFF_S, -1]
    assert list(BACK_OFF_S) == sorted(BACK_OFF_S)
    assert len(store.objects) == 5


@pytest.mark.parametrize("uncached", [True, False])
def test_an_uncached_read_goes_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, uncached: bool
) -> None:
    store, key, body = DirectoryStore(tmp_path), Key("job/x"), bytes(range(256)) * 50
    store.create(key, body)
    past_it: list[bool] = []

    def noting(name: str, past: Callable[[int], bool]) -> None:
        function = getattr(os, name)

        def call(descriptor: int, *rest: object) -> object:
            if past(descriptor):
                past_it.append(True)
            return function(descriptor, *rest)

        monkeypatch.setattr(os, name, call)

    noting("preadv", lambda descriptor: bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT))
    noting("posix_fadvise", lambda _: True)  # where O_DIRECT is refused
    assert store.read(key, start=3, length=9000, uncached=uncached) == body[3:9003]
    assert bool(past_it) is uncached
