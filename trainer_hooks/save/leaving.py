"""How a trainer leaves whose machine is to go: at a step that all ranks save, once that is safe elsewhere.

A signal or a call gives notice. This rank then asks for a step that lies far enough ahead for all ranks to hear of it
in time; the coordinator names one to all. A rank that hears of it too late asks for another one as soon as it hears,
for it may be in the midst of a step that others don't begin; those that wait at the first go on to the other.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from toprope.trainer_hooks.errors import PreemptedError, UsageError
from toprope.trainer_hooks.save.ending import Level, reaches
from toprope.trainer_hooks.save.saving import Saver

logger = logging.getLogger("toprope")
AGREE_S = 2.0
"""How long it may take until all ranks have heard of a step that one has asked for."""
SHORTEST_PACE_S = 0.001
UNKNOWN_PACE_S = 1.0
_POLL_S = 0.02


class Leaving:
    """What one process knows of its end. ``grace_s`` counts from when it was told, or heard that another rank was."""

    def __init__(self, *, grace_s: float, level: Callable[[], Level]) -> None:
        """Know of none. ``level`` says how safe the last snapshot is."""
        self._grace_s = grace_s
        self._level = level
        self._since_s: float | None = None
        self._step = 0
        self._ended_at_s = 0.0
        self._pace_s = UNKNOWN_PACE_S
        self._asked = 0
        self._reached = 0
        self._late = 0
        self._looking = threading.Lock()
        self._saver: Saver | None = None
        self._handler: Callable[[int, FrameType | None], None] | None = None
        self._before: Any = None  # what signal.signal() gives

    def begin(self, step: int, saver: Saver | None) -> None:
        """Train on from a step; ``saver`` is None when nobody is there to save to."""
        self._step, self._ended_at_s, self._pace_s = step, time.monotonic(), UNKNOWN_PACE_S
        self._asked = self._reached = self._late = 0
        self._saver = saver
        if saver is not None:
            saver.hear_extra(self._look)

    def notice(self) -> None:
        """Learn that this process is about to be ended. In a signal's handler and on any thread; nothing waits here."""
        if self._since_s is None:
            self._since_s = time.monotonic()
            if self._saver is not None:
                self._ask(self._saver)

    def _ask(self, saver: Saver) -> None:
        after = self._step
        self._asked = after + steps_ahead(pace_s=self._pace_s, begun_s=time.monotonic() - self._ended_at_s)
        saver.ask(after=after, step=self._asked)

    def end_step(self, step: int) -> None:
        """Note that a step has ended, and leave if it is the one.

        Raises:
            PreemptedError: this process is to end now.
            SupersededError: a later attempt was opened.
        """
        now_s, saver = time.monotonic(), self._saver
        self._pace_s, self._ended_at_s = now_s - self._ended_at_s, now_s
        if saver is not None and saver.extra_step == step:
            self._reached = step
        self._step = step  # what is heard from here on, _look() judges by this step
        if saver is not None:
            self._look()
        if self._since_s is None:
            return
        if saver is None:
            raise PreemptedError(f"ends after step {step}, of which nothing is saved: there is no sidecar")
        if self._reached == step:
            self._drain(step, saver, end_s=self._since_s + self._grace_s)
        elif saver.named_step() <= step:
            self._ask_again(step, saver, since_s=self._since_s)

    def _look(self) -> None:
        """Take in what the coordinator has named; on the training thread and on the one that hears of it."""
        saver = self._saver
        extra = saver.named_step() if saver is not None else 0
        if saver is None or not extra:
            return
        with self._looking:
            if self._since_s is None:
                self._since_s = time.monotonic()
                logger.warning("a rank is about to be ended: all save step %d and end there", extra)
            if extra <= self._step and extra not in {self._reached, self._late}:
                self._late = extra
                logger.warning("step %d, at which all ranks were to end, was over when this rank heard of it", extra)
                saver.pass_over(extra)
                self._ask(saver)

    def _ask_again(self, step: int, saver: Saver, *, since_s: float) -> None:
        if time.monotonic() - since_s >= self._grace_s:
            raise PreemptedError(
                f"ends after step {step}, which is not saved: no coordinator named a step for all ranks within the "
                f"grace of {self._grace_s:g} s"
            )
        if self._asked <= step:
            self._ask(saver)

    def _drain(self, step: int, saver: Saver, *, end_s: float) -> None:
        """Wait until the snapshot of this step is safe elsewhere; return only if all are to go on to a later one."""
        while True:
            saver.heed(step)
            if saver.extra_step > step:
                self._ended_at_s = time.monotonic()
                logger.warning("a rank was past step %d: all go on to step %d", step, saver.extra_step)
                return
            if saver.skipped_step == step:
                saver.retake(step)
            level = self._level() if saver.stats.snapshot_step == step else "nothing"
            if reaches(level, "protected"):
                raise PreemptedError(f"ends after step {step}, which is saved: {level}")
            if time.monotonic() >= end_s:
                raise PreemptedError(f"ends after step {step}, for its grace of {self._grace_s:g} s is over: {level}")
            time.sleep(_POLL_S)

    # The signal

    def listen(self) -> None:
        """Take SIGTERM for a notice from now on; whoever had a handler for it is called after that.

        Raises:
            UsageError: this is not the main thread, the only one that may.
        """
        if self._handler is not None:
            return
        must_be_main_thread()

        def handle(number: int, frame: FrameType | None) -> None:
            self.notice()
            if callable(self._before):
                self._before(number, frame)

        self._handler, self._before = handle, signal.signal(signal.SIGTERM, handle)

    def close(self) -> None:
        """Forget the saver, and give SIGTERM back if nobody else has taken it since."""
        self._saver = None
        if self._handler is not None and signal.getsignal(signal.SIGTERM) is self._handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)
        self._handler = None


def steps_ahead(*, pace_s: float, begun_s: float) -> int:
    """Return how many steps on that step lies which no rank ends before all can have heard of it.

    ``pace_s`` is how long a step takes, ``begun_s`` how long the current one has taken so far.
    """
    pace_s = max(pace_s, SHORTEST_PACE_S)
    return math.ceil((AGREE_S + min(begun_s, pace_s)) / pace_s)


def must_be_main_thread() -> None:
    """Check that a handler can be set here.

    Raises:
        UsageError: it can't.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "on_sigterm=True on another thread than the main one, which alone may handle signals: "
            "make the Checkpointer there, or call preempt() from your own handler"
        )
