"""The store that tries again, over one that throttles, falls silent and loses replies."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from pathlib import Path

import pytest
from tests.support.fake_store import FakeStore

from toprope.store.conformance import ObjectStoreContract
from toprope.store.errors import AlreadyExistsError, CkptError, ThrottledError, UnavailableError
from toprope.store.names import Key
from toprope.store.objects.protocol import ObjectStore
from toprope.store.objects.retry import BROKEN_MAX, BackOff, RetryStore

KEY = Key("job/a")


class MoodyStore(FakeStore):
    """Raises the next of ``moods`` on each call; an error of ``after`` is raised when the create has been done."""

    def __init__(self) -> None:
        super().__init__()
        self.moods: deque[CkptError] = deque()
        self.after: deque[CkptError] = deque()

    def create(self, key: Key, body: bytes | memoryview) -> None:
        self._act()
        super().create(key, body)
        if self.after:
            raise self.after.popleft()

    def read(self, key: Key, *, start: int = 0, length: int | None = None, uncached: bool = False) -> bytes:
        self._act()
        return super().read(key, start=start, length=length, uncached=uncached)

    def _act(self) -> None:
        if self.moods:
            raise self.moods.popleft()


class Rig:
    def __init__(self) -> None:
        self.inner = MoodyStore()
        self.slept: list[float] = []
        back_off = BackOff(throttled_s=(1.0, 2.0, 4.0), silent_s=(0.5,), sleep=self.slept.append, chance=lambda: 0.5)
        self.store = RetryStore(self.inner, back_off)


class TestRetryStore(ObjectStoreContract):
    def make(self, tmp_path: Path) -> ObjectStore:
        return RetryStore(FakeStore())


def test_a_throttled_create_is_tried_again_after_growing_jittered_delays() -> None:
    rig = Rig()
    rig.inner.moods += [ThrottledError("busy")] * 3
    rig.store.create(KEY, b"x")
    assert rig.inner.objects == {KEY: b"x"}
    assert rig.slept == [0.75, 1.5, 3.0]


def test_a_store_that_throttles_to_the_end_is_called_busy() -> None:
    rig = Rig()
    rig.inner.moods += [ThrottledError("busy")] * 4
    with pytest.raises(ThrottledError):
        rig.store.create(KEY, b"x")
    assert rig.inner.objects == {}


def test_a_create_whose_outcome_is_open_is_left_to_its_caller() -> None:
    rig = Rig()
    rig.inner.moods.append(UnavailableError("no answer"))
    with pytest.raises(UnavailableError):
        rig.store.create(KEY, b"x")
    assert rig.slept == []


def test_a_read_is_tried_again_when_no_answer_came() -> None:
    rig = Rig()
    rig.store.create(KEY, b"x")
    rig.inner.moods.append(UnavailableError("no answer"))
    assert rig.store.read(KEY) == b"x"
    rig.inner.moods += [UnavailableError("no answer")] * 2
    with pytest.raises(UnavailableError):
        rig.store.size(KEY)


def test_a_create_that_was_written_although_it_was_throttled_is_our_own() -> None:
    rig = Rig()
    rig.inner.after.append(ThrottledError("busy, but done"))
    rig.store.create(KEY, b"mine")
    assert rig.inner.created == [KEY]


@pytest.mark.parametrize("other", [b"them", b"longer"])
def test_after_throttling_the_object_of_another_is_not_taken_for_ours(other: bytes) -> None:
    rig = Rig()
    rig.inner.objects[KEY] = other
    rig.inner.moods.append(ThrottledError("busy"))
    with pytest.raises(AlreadyExistsError):
        rig.store.create(KEY, b"mine")


def test_without_throttling_an_equal_object_is_not_taken_for_ours() -> None:
    rig = Rig()
    rig.inner.objects[KEY] = b"mine"
    with pytest.raises(AlreadyExistsError):
        rig.store.create(KEY, b"mine")


class Stalling(FakeStore):
    """Breaks off each of its first ``breaks`` streams after one byte."""

    def __init__(self, breaks: int) -> None:
        super().__init__()
        self.breaks = breaks

    def stream(self, key: Key, *, start: int, length: int) -> Generator[memoryview, None, None]:
        if not self.breaks:
            yield from super().stream(key, start=start, length=length)
            return
        self.breaks -= 1
        yield memoryview(self.objects[key])[start : start + 1]
        raise UnavailableError("broke off")


@pytest.mark.parametrize("breaks", [BROKEN_MAX, BROKEN_MAX + 1])
def test_a_store_that_sends_a_little_and_breaks_off_is_not_asked_for_ever(breaks: int) -> None:
    body = bytes(range(100))
    inner = Stalling(breaks)
    inner.create(KEY, body)
    stream = RetryStore(inner, BackOff(sleep=lambda _: None)).stream(KEY, start=0, length=len(body))
    if breaks <= BROKEN_MAX:
        assert b"".join(stream) == body
        return
    with pytest.raises(UnavailableError, match="broke off"):
        b"".join(stream)
    assert inner.breaks == 0
