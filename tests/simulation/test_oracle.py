"""What the oracle says of holds that somebody else than their reader deletes."""

from __future__ import annotations

import random
from contextlib import closing

from toprope.chaos.sim.loop import SimLoop
from toprope.chaos.sim.oracle import HOLD_TTL_S, Oracle
from toprope.chaos.sim.store import SimStore
from toprope.chaos.sim.trace import Trace
from toprope.store.names import Key, hold_key


class Watched:
    """An oracle that is told what befalls holds, at the time ``now_s``."""

    def __init__(self) -> None:
        self.now_s = 0.0
        trace = Trace(lambda: self.now_s)
        with closing(SimLoop(random.Random(0))) as loop:
            self.store = SimStore(loop, trace, fault=0.0, cut=lambda _who: False)
        self.oracle = Oracle("job", self.store, trace, stop=lambda: None)

    def beats(self, hold_id: str, *, beat: int, at_s: float) -> Key:
        self.now_s = at_s
        key = hold_key("job", seq=4, hold_id=hold_id, beat=beat)
        self.store.on_create(key, b"", "reader1")
        return key

    def verdict_on_deleting(self, key: Key, *, at_s: float) -> str:
        self.now_s = at_s
        self.store.on_delete(key, "c1")
        return "" if self.oracle.violation is None else self.oracle.violation.invariant


def test_a_hold_is_silent_though_its_reader_beats_for_another_one() -> None:
    watched = Watched()
    left = watched.beats("dead", beat=0, at_s=0.0)
    for beat in range(4):
        watched.beats("beef", beat=beat, at_s=1.0 + 2.0 * beat)
    assert watched.verdict_on_deleting(left, at_s=HOLD_TTL_S) == ""


def test_the_silence_of_one_hold_is_no_excuse_to_delete_another() -> None:
    watched = Watched()
    watched.beats("dead", beat=0, at_s=0.0)
    beaten = watched.beats("beef", beat=0, at_s=HOLD_TTL_S + 1.0)
    assert watched.verdict_on_deleting(beaten, at_s=2 * HOLD_TTL_S) == "I8"


def test_an_old_beat_that_lands_late_does_not_end_a_silence() -> None:
    watched = Watched()
    watched.beats("beef", beat=1, at_s=0.0)
    late = watched.beats("beef", beat=0, at_s=HOLD_TTL_S / 2)
    assert watched.verdict_on_deleting(late, at_s=HOLD_TTL_S) == ""


def test_an_old_beat_that_lands_late_does_not_make_a_silence() -> None:
    watched = Watched()
    newest = watched.beats("beef", beat=2, at_s=0.0)
    watched.beats("beef", beat=1, at_s=HOLD_TTL_S - 2.0)
    watched.beats("beef", beat=3, at_s=HOLD_TTL_S - 1.0)
    assert watched.verdict_on_deleting(newest, at_s=HOLD_TTL_S + 1.0) == "I8"
