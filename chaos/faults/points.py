"""Faults that a process does to itself: calls that fail, wait or change bytes, a clock that jumps, a NaN gradient."""

from __future__ import annotations

import time
from typing import get_args

import msgspec

from toprope.chaos.faults.injector import Base
from toprope.chaos.killpoints import CLOCK, STEP_ENDED, Action, Armed, Fired, arm_all, armed_points, fired
from toprope.store.errors import UsageError


class _AtPoint(Base):
    """A fault that a process does to itself, at one of its points."""

    _armed: Armed
    _since_s = 0.0

    def arm(self, armed: Armed) -> None:
        """Let it do so from now on. That it happens is seen later, in what the process notes."""
        self._since_s, self._armed = time.monotonic(), armed
        file = self.site.armed(self.fault.target)
        arm_all(file, [*armed_points(file), armed])

    def mend(self) -> None:
        """Let it do so no more."""
        file = self.site.armed(self.fault.target)
        arm_all(file, [one for one in armed_points(file) if one != self._armed])

    def seen(self) -> list[Fired]:
        """Return what the process has noted of it."""
        noted = fired(self.site.passed(self.fault.target))
        wanted = (self._armed.point, self._armed.action)
        return [one for one in noted if one.at_s >= self._since_s and (one.point, one.action) == wanted]


class Clock(_AtPoint):
    """Lets the wall clock of a service jump by ``how.seconds``, and back when it is mended."""

    def strike(self) -> None:
        """Let it jump."""
        self.site.service(self.fault.target)
        off_s = self.number("seconds", 3600.0)
        self.arm(Armed(point=CLOCK, action="clock", seconds=off_s, serial=time.monotonic_ns()))

    def witness(self) -> str:
        """Return what the process found when it asked what time it is."""
        return f"the wall clock of {self.fault.target} was {self.seen()[0].detail}" if self.seen() else ""


class NotANumber(_AtPoint):
    """Lets one gradient of a rank be NaN in the step after the next that it ends; DDP carries it to all ranks."""

    def strike(self) -> None:
        """Arm it."""
        self.arm(Armed(point=STEP_ENDED, action="nan", serial=time.monotonic_ns()))

    def witness(self) -> str:
        """Return the first step that lost no number, once it was poisoned."""
        events = self.site.journal.events
        steps = [one for one in events if one.event == "step" and one.loss is None and one.monotonic_s >= self._since_s]
        if not self.seen() or not steps:
            return ""
        return f"a gradient of {self.fault.target} was NaN, and rank {steps[0].rank} lost NaN in step {steps[0].step}"


class Fail(_AtPoint):
    """Lets calls of a port fail, wait, or change the bytes that they carry.

    ``how.action`` is ``ENOSPC``, ``EIO``, ``fsync``, ``unavailable``, ``throttled``, ``peer``, ``delay``, ``flip``,
    ``tear``, ``stop`` or ``kill``; ``how.point`` is ``before:`` or ``after:`` and ``<port>.<method>``; ``how.times``
    how often (0: as long as it lasts), ``how.match`` what must be in its arguments, ``how.seconds`` how long a
    ``delay`` is.
    """

    def strike(self) -> None:
        """Arm it."""
        action = self.word("action", "EIO")
        if action not in get_args(Action):
            raise UsageError(f"fail: action {action!r}: give one of {', '.join(get_args(Action))}")
        armed = msgspec.convert(
            {
                "point": self.word("point"),
                "action": action,
                "times": int(self.number("times", 0)),
                "occurrence": int(self.number("occurrence", 1)),
                "match": self.word("match"),
                "seconds": self.number("seconds", 0.0),
                "serial": time.monotonic_ns(),
            },
            Armed,
        )
        if not self.fault.target.startswith("rank "):
            self.site.service(self.fault.target)
        self.arm(armed)

    def witness(self) -> str:
        """Return the first time that it happened, and how often."""
        seen = self.seen()
        return (
            f"{seen[0].point} {seen[0].action} {seen[0].detail[-80:]}".strip() + f", {len(seen)} times" if seen else ""
        )
