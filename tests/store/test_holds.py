"""Holds: a reader's beats are found as long as it reads and gone after it, and only silence is taken for its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
from tests.support.fake_store import FakeStore, Fault
from tests.support.stores import JobBuilder, small_store

from toprope.store.errors import UnavailableError
from toprope.store.keep.holds import HoldWatch, holding, in_a_thread
from toprope.store.names import Key, hold_key, holds_prefix
from toprope.store.objects.protocol import ObjectStore


def holds_in(store: ObjectStore) -> list[Key]:
    return list(store.list(holds_prefix("job")))


class NoWriting(FakeStore):
    def refuse(self, key: Key, body: bytes | memoryview) -> None:
        raise UnavailableError(f"{key}: access denied")


def test_a_reader_that_may_not_write_works_without_a_hold_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore()
    job = small_store(store)
    monkeypatch.setattr(store, "create", partial(NoWriting.refuse, NoWriting()))
    said: list[str] = []
    with holding(store, job.log.state, 4, say=said.append) as state:
        assert state == job.log.state
    assert said == [
        "reading without a hold on READY 4, so that `ckpt gc` may delete it meanwhile: "
        + said[0].partition("meanwhile: ")[2]
    ]
    assert "access denied" in said[0]


@pytest.mark.parametrize("fault", ["request lost", "reply lost", "late"])
def test_a_hold_whose_first_beat_gets_no_answer_is_made_by_the_next(fault: Fault) -> None:
    store = FakeStore()
    job = small_store(store)
    store.faults.append(fault)
    said: list[str] = []
    with holding(store, job.log.state, 4, say=said.append):
        assert holds_in(store)[-1].endswith("1")
        store.land()
    assert (said, holds_in(store)) == ([], [])


def test_a_reader_that_got_no_answer_leaves_no_hold_behind_that_was_written_all_the_same() -> None:
    store = FakeStore()
    job = small_store(store)
    store.faults += ("reply lost", "late")
    said: list[str] = []
    with holding(store, job.log.state, 4, say=said.append):
        store.land()
        assert len(holds_in(store)) == 2
    assert (len(said), holds_in(store)) == (1, [])


def beat_for_ever(store: ObjectStore, job: JobBuilder, then: Callable[[], None]) -> None:
    with holding(store, job.log.state, 4, beating=partial(in_a_thread, every_s=0.001)):
        then()


def test_a_hold_beats_and_a_listing_always_finds_it() -> None:
    store = FakeStore()
    job = small_store(store)

    def watch() -> None:
        beats: set[Key] = set()
        while len(beats) < 5:
            there = holds_in(store)
            assert there
            beats.add(there[-1])

    beat_for_ever(store, job, watch)
    assert holds_in(store) == []


def stale(watch: HoldWatch, *keys: Key, at_s: float) -> tuple[Key, ...]:
    return watch.stale("job", keys, asked_s=at_s, listed_s=at_s)


def test_a_hold_is_left_behind_when_it_has_not_beaten_for_the_whole_time_of_the_collectors_own_clock() -> None:
    watch = HoldWatch(ttl_s=300)
    dead, alive = (partial(hold_key, "job", seq=4, hold_id=hold_id) for hold_id in ("dead", "beef"))
    assert stale(watch, dead(beat=7), alive(beat=0), at_s=1000) == ()
    assert stale(watch, dead(beat=7), alive(beat=1), at_s=1299) == ()
    assert stale(watch, dead(beat=7), alive(beat=1), at_s=1300) == (dead(beat=7),)
    assert stale(watch, dead(beat=8), alive(beat=1), at_s=1400) == ()
    assert stale(HoldWatch(ttl_s=300), dead(beat=8), at_s=10**9) == (), "it has only begun to look"


class SlowToList(FakeStore):
    """Takes so long to list, by the clock ``now_s``: a reader may beat just before an answer, or just after."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.takes_s = 0.0

    def list(self, prefix: str) -> Iterator[Key]:
        self.now_s += self.takes_s
        yield from super().list(prefix)


def test_the_time_that_a_listing_takes_does_not_count_as_the_silence_of_a_hold() -> None:
    store, watch = SlowToList(), HoldWatch(ttl_s=300)
    beat = hold_key("job", seq=4, hold_id="beef", beat=0)
    store.objects[beat] = b""

    def look(*, takes_s: float) -> tuple[Key, ...]:
        store.takes_s = takes_s
        return watch.look(store, "job", now_s=lambda: store.now_s)

    assert look(takes_s=290.0) == (beat,), "it may have beaten at second 290"
    store.now_s = 310.0
    assert look(takes_s=0.0) == (beat,)
    store.now_s = 580.0
    assert look(takes_s=20.0) == (beat,), "it has been silent for 290 s for sure"
    assert look(takes_s=0.0) == ()
    assert holds_in(store) == []
