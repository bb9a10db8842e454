"""Kill points: before and after every call of a port, each a place where a process can be made to die.

A process that runs under ``python -m toprope.chaos.killpoints sidecar|coordinator …`` (or calls ``points_from_env``)
appends the name of each point that it passes to the file ``CKPT_KILL_LOG``, and SIGKILLs itself at the point that it
then finds in the file ``CKPT_KILL_FILE``, or when it comes by there for the second or third time, as the file says. A
point is ``before:<port>.<method>`` or ``after:<port>.<method>``. The product has no code for this: its runtimes let
every port be wrapped.
"""

from __future__ import annotations

import functools
import inspect
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from toprope.__main__ import main as ckpt

P = TypeVar("P")
LOG_VARIABLE = "CKPT_KILL_LOG"
FILE_VARIABLE = "CKPT_KILL_FILE"


class KillPoints:
    """The kill points of this process; either file may be None."""

    def __init__(self, *, log: Path | None, armed: Path | None) -> None:
        self._armed = armed
        self._came_by: Counter[tuple[str, int]] = Counter()
        self._log = None if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def wrap(self, name: str, port: P) -> P:
        """Return something that behaves as the port does and passes a point before and after each call."""
        return cast("P", _Wrapped(self, name, port))

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, plain or a coroutine function, with a point before and after each call."""
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def later(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - passes all on
                self.pass_point(f"before:{name}")
                result = await function(*arguments, **named)
                self.pass_point(f"after:{name}")
                return result

            return later

        @functools.wraps(function)
        def now(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - passes all on
            self.pass_point(f"before:{name}")
            result = function(*arguments, **named)
            self.pass_point(f"after:{name}")
            return result

        return now

    def pass_point(self, point: str) -> None:
        """Note the point; die if it is armed now."""
        if self._log is not None:
            os.write(self._log, f"{time.monotonic():.6f} {point}\n".encode())
        if self._armed is not None:
            armed, occurrence = armed_point(self._armed)
            self._came_by[armed, occurrence] += armed == point
            if self._came_by[armed, occurrence] >= occurrence > 0:
                os.kill(os.getpid(), signal.SIGKILL)


class _Wrapped:
    """A port whose methods pass kill points."""

    def __init__(self, points: KillPoints, name: str, port: object) -> None:
        self._points = points
        self._name = name
        self._port = port

    def __getattr__(self, attribute: str) -> Any:  # noqa: ANN401 - whatever the port has
        found = getattr(self._port, attribute)
        return self._points.around(f"{self._name}.{attribute}", found) if callable(found) else found


def points_from_env() -> KillPoints:
    """Return the kill points as the environment sets them."""
    log, armed = os.environ.get(LOG_VARIABLE), os.environ.get(FILE_VARIABLE)
    return KillPoints(log=None if log is None else Path(log), armed=None if armed is None else Path(armed))


def arm(file: Path, point: str, occurrence: int = 1) -> None:
    """Let the process that watches this file die when it passes the point for the n-th time from now on."""
    _set(file, f"{occurrence} {point}")


def disarm(file: Path) -> None:
    """Let the process that watches this file live."""
    _set(file, "0 -")


def armed_point(file: Path) -> tuple[str, int]:
    """Return the armed point and at which occurrence it kills: 0 when none is armed."""
    try:
        occurrence, point = file.read_text().split()
    except FileNotFoundError:
        return "", 0
    return point, int(occurrence)


def _set(file: Path, text: str) -> None:
    temporary = file.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.rename(file)


def passed(log: Path) -> list[tuple[float, str]]:
    """Return the points in a log file, each with the monotonic time in seconds."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [(float(at_s), point) for at_s, point in (line.split() for line in lines)]


def main(arguments: list[str] | None = None) -> None:
    """Run ``ckpt sidecar …`` or ``ckpt coordinator …`` with kill points around its ports."""
    words = sys.argv[1:] if arguments is None else arguments
    sys.exit(ckpt(words, passed=points_from_env().wrap))


if __name__ == "__main__":
    main()
