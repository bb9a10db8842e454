"""Faults that a process does to itself: calls that fail, wait or change bytes, a clock that jumps, wrong numbers."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import get_args

import msgspec

from toprope.chaos.faults.injector import Base
from toprope.chaos.journal import Event
from toprope.chaos.killpoints import CLOCK, SPOILT, STEP_ENDED, Action, Armed, Fired, arm_all, armed_points, fired
from toprope.store.errors import UsageError

AHEAD_STEPS = 3
"""So many steps after the newest one numbers are spoilt, so that all ranks hear of it in time."""
SPIKES = 1.5
"""A loss that is so much larger than the one before is a spike."""


class _AtPoint(Base):
    """A fault that a process does to itself, at one of its points."""

    _armed: Armed
    _since_s = 0.0
    targets: tuple[str, ...] = ()

    def arm(self, armed: Armed, *targets: str) -> None:
        """Let it do so from now on, or these. That it happens is seen later, in what the process notes."""
        self._since_s, self._armed, self.targets = time.monotonic(), armed, targets or (self.fault.target,)
        for file in map(self.site.armed, self.targets):
            arm_all(file, [*armed_points(file), armed])

    def mend(self) -> None:
        """Let it do so no more."""
        for file in map(self.site.armed, self.targets):
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


class _Spoils(_AtPoint):
    """A fault of numbers: what a trainer has at the end of an update is not what it should be."""

    def spoil(self, action: Action, *targets: str) -> None:
        """Let these ranks spoil it after one and the same step, which none of them has ended yet."""
        self._step = self.site.newest_step() + AHEAD_STEPS
        serial = time.monotonic_ns()
        self.arm(Armed(point=STEP_ENDED, action=action, match=f"/{self._step}/", serial=serial), *targets)

    def spoilt(self) -> str:
        """Return what the process has done, once it has."""
        noted = fired(self.site.passed(self.targets[0]))
        return next((one.detail for one in noted if one.action == SPOILT and one.at_s >= self._since_s), "")

    def steps(self) -> Iterator[Event]:
        """Yield the steps that were done since the fault was struck."""
        return (one for one in self.site.journal.events if one.event == "step" and one.monotonic_s >= self._since_s)


class NotANumber(_Spoils):
    """Lets one gradient of a rank be NaN; DDP carries it to all ranks."""

    def strike(self) -> None:
        """Arm it."""
        self.spoil("nan", self.fault.target)

    def witness(self) -> str:
        """Return the first step that lost no number, once it was poisoned."""
        lost = next((one for one in self.steps() if one.loss is None), None)
        if not self.spoilt() or lost is None:
            return ""
        return f"a gradient of {self.fault.target} was NaN, and rank {lost.rank} lost NaN in step {lost.step}"


class Spike(_Spoils):
    """Lets the loss of all ranks spike: after one step all weights are by far too large, on each rank the same."""

    def strike(self) -> None:
        """Arm it."""
        self.spoil("spike", *(f"rank {rank}" for rank in range(self.site.scenario.topology.world)))

    def witness(self) -> str:
        """Return what the step after it lost, if that is far more than the step before."""
        lost: dict[int, float] = {}
        for one in self.steps():
            if one.rank == 0:  # the first time counts: who goes back does the step again
                lost.setdefault(one.step, math.inf if one.loss is None else one.loss)
        before, after = lost.get(self._step), lost.get(self._step + 1)
        if not self.spoilt() or before is None or after is None or after < SPIKES * before:
            return ""
        return f"{self.spoilt()}; rank 0 lost {before:.3g} in it and {after:.3g} in the next"


class FlippedWeight(_Spoils):
    """Flips a bit of one weight of one replica, silently: from then on it differs from the others'."""

    def strike(self) -> None:
        """Arm it."""
        self.spoil("weight", self.fault.target)

    def witness(self) -> str:
        """Return what the weight was and is."""
        return f"{self.fault.target}: {self.spoilt()}" if self.spoilt() else ""


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
