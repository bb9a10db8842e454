"""A wall clock that can be made to jump, in one Python process; monotonic time, and all others, go on as before."""

from __future__ import annotations

import datetime as dt
import sys
import time
from collections.abc import Callable
from typing import Any, Self

_REAL = dt.datetime
_TIME, _TIME_NS = time.time, time.time_ns  # noqa: TID251 - what is to be off


class _AsReal(type):
    """Lets whatever is a ``datetime`` be taken for one of ours."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _REAL)


def let_clock_jump(off_s: Callable[[], float]) -> Callable[[], None]:
    """Let ``time.time`` and ``datetime.now`` be off by ``off_s()`` for all that has imported them; return undo."""

    class Shifted(_REAL, metaclass=_AsReal):
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> Self:
            return _REAL.now(tz) + dt.timedelta(seconds=off_s())  # type: ignore[return-value]

        @classmethod
        def utcnow(cls) -> Self:
            return cls.now(dt.UTC).replace(tzinfo=None)

    shifted = {
        id(_REAL): Shifted,
        id(_TIME): lambda: _TIME() + off_s(),
        id(_TIME_NS): lambda: _TIME_NS() + int(off_s() * 1e9),
    }
    undo: list[tuple[Any, str, object]] = []
    for module in [one for name, one in sys.modules.items() if name != __name__]:
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in shifted:
                undo.append((module, attribute, value))
                setattr(module, attribute, shifted[id(value)])

    def undone() -> None:
        for module, attribute, value in undo:
            setattr(module, attribute, value)

    return undone
