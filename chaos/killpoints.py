"""Points before and after every call of a port, at each of which a process can be made to die, to fail or to wait.

A process that runs under ``python -m toprope.chaos.killpoints sidecar|coordinator …`` (or calls ``points_from_env``)
appends the name of each point that it passes to the file ``CKPT_KILL_LOG``, and does at a point what it then finds in
the file ``CKPT_KILL_FILE``: by default it SIGKILLs itself there, the first time or when it comes by for the second or
third time, as the file says. A point is ``before:<port>.<method>`` or ``after:<port>.<method>``. The product has no
code for this: its runtimes let every port be wrapped.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import inspect
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, cast

import msgspec

from toprope.__main__ import main as ckpt
from toprope.chaos.clock import let_clock_jump
from toprope.chaos.defects import switch_off_from_env
from toprope.sidecar.ports import PeerError, SyncError
from toprope.store.errors import ThrottledError, UnavailableError

P = TypeVar("P")
LOG_VARIABLE = "CKPT_KILL_LOG"
CLOCK_VARIABLE = "CKPT_KILL_CLOCK"
"""Set where the wall clock is to follow the file, too."""
FILE_VARIABLE = "CKPT_KILL_FILE"
CLOCK = "clock"
"""The point that is passed whenever the wall clock is asked."""
STEP_ENDED = "step.ended"
"""The point that a trainer passes when an update is done, before the hook is told."""
SPOILT = "spoilt"
"""What a trainer notes once it has spoilt its numbers, with what they were and are."""
_POLL_S = 0.01
_HELD_S_MAX = 60.0
"""Whoever holds a process at a point lets it go again; should that one die, it goes on by itself."""

Action: TypeAlias = Literal[
    "kill",
    "stop",
    "hold",
    "delay",
    "ENOSPC",
    "EIO",
    "fsync",
    "unavailable",
    "throttled",
    "peer",
    "flip",
    "tear",
    "nan",
    "spike",
    "weight",
    "clock",
]


class Armed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What happens at a point.

    ``occurrence``: the how many-th time from now on that the point is passed; ``times``: how often from then on, 0 for
    always. ``match``: it counts only if this text is in what the call is given. ``seconds``: of a delay. ``serial``
    tells it from an equal one that was armed before.
    """

    point: str
    action: Action = "kill"
    occurrence: int = 1
    times: int = 1
    match: str = ""
    seconds: float = 0.0
    serial: int = 0


class Fired(msgspec.Struct, frozen=True, kw_only=True):
    """That something happened at a point, as the process noted it just before; ``at_s`` is monotonic time."""

    at_s: float
    point: str
    action: str
    detail: str


_ERRORS: dict[str, Callable[[str], Exception]] = {
    "ENOSPC": lambda point: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), point),
    "EIO": lambda point: OSError(errno.EIO, os.strerror(errno.EIO), point),
    "fsync": lambda point: SyncError(errno.EIO, os.strerror(errno.EIO), point),
    "unavailable": lambda point: UnavailableError(f"{point}: made to fail"),
    "throttled": lambda point: ThrottledError(f"{point}: made to fail, SlowDown"),
    "peer": lambda point: PeerError(f"{point}: made to fail"),
}


class KillPoints:
    """The points of this process; either file may be None."""

    def __init__(self, *, log: Path | None, armed: Path | None) -> None:
        self._file = armed
        self._came_by: Counter[Armed] = Counter()
        self._log = None if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def wrap(self, name: str, port: P) -> P:
        """Return something that behaves as the port does and passes a point before and after each call."""
        return cast("P", _Wrapped(self, name, port))

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, plain or a coroutine function, with a point before and after each call."""
        before, after = f"before:{name}", f"after:{name}"
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def later(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - passes all on
                armed = self._passing(before, arguments)
                await self._wait_async(armed)
                result = await function(*_acted(armed, arguments), **named)
                armed = self._passing(after, arguments)
                await self._wait_async(armed)
                return _changed(armed, arguments, result)

            return later

        @functools.wraps(function)
        def now(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - passes all on
            armed = self._passing(before, arguments)
            self._wait(armed)
            result = function(*_acted(armed, arguments), **named)
            armed = self._passing(after, arguments)
            self._wait(armed)
            return _changed(armed, arguments, result)

        return now

    def pass_point(self, point: str) -> None:
        """Note the point; die, fail or wait there if that is armed now."""
        armed = self._passing(point, ())
        self._wait(armed)
        _acted(armed, ())

    def asked(self, point: str, *about: str) -> Action | None:
        """Note the point, and return what is to be done there now by whoever passes it."""
        armed = self._passing(point, about)
        return None if armed is None else armed.action

    def tell(self, point: str, what: str, detail: str) -> None:
        """Note what was done at a point, where ``fired`` finds it."""
        self._note(f"{point} !{what} {detail}")

    def clock_off_s(self) -> float:
        """Return by how much the wall clock of this process is to be off now, noted when it is first so."""
        armed = [] if self._file is None else [one for one in armed_points(self._file) if one.point == CLOCK]
        for one in armed:
            if not self._came_by[one]:
                self._came_by[one] += 1
                self._note(f"{CLOCK} !{one.action} off by {one.seconds:g} s")
        return sum(one.seconds for one in armed)

    def _passing(self, point: str, arguments: tuple[Any, ...]) -> Armed | None:
        """Note the point and return what is to be done there, noted too; death and standstill come here."""
        self._note(point)
        for armed in [] if self._file is None else armed_points(self._file):
            if armed.point != point or (armed.match and armed.match not in _words(arguments)):
                continue
            self._came_by[armed] += 1
            count = self._came_by[armed] - armed.occurrence
            if count >= 0 and (armed.times == 0 or count < armed.times):
                self._note(f"{point} !{armed.action} {_words(arguments)}")
                _end_or_stop(armed.action)
                return armed
        return None

    def _note(self, text: str) -> None:
        if self._log is not None:
            os.write(self._log, f"{time.monotonic():.6f} {text}\n".encode())

    def _wait(self, armed: Armed | None) -> None:
        end = time.monotonic() + _seconds(armed)
        while time.monotonic() < end and self._still(armed):
            time.sleep(_POLL_S)

    async def _wait_async(self, armed: Armed | None) -> None:
        end = time.monotonic() + _seconds(armed)
        while time.monotonic() < end and self._still(armed):  # noqa: ASYNC110 - it waits for a file
            await asyncio.sleep(_POLL_S)

    def _still(self, armed: Armed | None) -> bool:
        """Say whether what makes it wait is still armed: who holds it lets go by taking that back."""
        return self._file is not None and armed in armed_points(self._file)


def _seconds(armed: Armed | None) -> float:
    if armed is None or armed.action not in {"delay", "hold"}:
        return 0.0
    return armed.seconds or _HELD_S_MAX


def _end_or_stop(action: Action) -> None:
    if action in {"kill", "stop"}:
        os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)


def _words(arguments: tuple[Any, ...]) -> str:
    """Return what says which call it is: keys, paths and addresses, and not bytes."""
    return " ".join(str(one) for one in arguments if isinstance(one, str | Path))


def _acted(armed: Armed | None, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what the call is given in the end; raise if it is to fail."""
    if armed is None:
        return arguments
    if armed.action in _ERRORS:
        raise _ERRORS[armed.action](armed.point)
    return tuple(_spoilt(armed.action, one) if _is_bytes(one) else one for one in arguments)


def _changed(armed: Armed | None, arguments: tuple[Any, ...], result: object) -> object:
    """Return what the call returns in the end; what it has filled is changed in place."""
    if armed is None:
        return result
    if armed.action in _ERRORS:
        raise _ERRORS[armed.action](armed.point)
    for filled in arguments:
        if armed.action == "flip" and isinstance(filled, memoryview) and not filled.readonly:
            filled[len(filled) // 2] ^= 1
    return _spoilt(armed.action, result) if _is_bytes(result) else result


def _is_bytes(value: object) -> bool:
    return isinstance(value, bytes | bytearray | memoryview) and len(value) > 0


def _spoilt(action: Action, body: Any) -> Any:  # noqa: ANN401 - bytes of whatever kind
    """Return a copy of the bytes with one bit flipped in the middle, or the first half of them."""
    if action == "tear":
        return body[: len(body) // 2]
    if action != "flip":
        return body
    copy = bytearray(body)
    copy[len(copy) // 2] ^= 1
    return memoryview(copy) if isinstance(body, memoryview) else bytes(copy)


class _Wrapped:
    """A port whose methods pass points."""

    def __init__(self, points: KillPoints, name: str, port: object) -> None:
        self._points = points
        self._name = name
        self._port = port

    def __getattr__(self, attribute: str) -> Any:  # noqa: ANN401 - whatever the port has
        found = getattr(self._port, attribute)
        return self._points.around(f"{self._name}.{attribute}", found) if callable(found) else found


def points_from_env() -> KillPoints:
    """Return the points as the environment sets them."""
    log, armed = os.environ.get(LOG_VARIABLE), os.environ.get(FILE_VARIABLE)
    return KillPoints(log=None if log is None else Path(log), armed=None if armed is None else Path(armed))


def arm(file: Path, point: str, occurrence: int = 1) -> None:
    """Let the process that watches this file die when it passes the point for the n-th time from now on."""
    arm_all(file, [Armed(point=point, occurrence=occurrence)])


def arm_all(file: Path, points: list[Armed]) -> None:
    """Let these things happen in the process that watches this file, in place of what was to happen there before."""
    temporary = file.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.encode(points))
    temporary.rename(file)


def disarm(file: Path) -> None:
    """Let the process that watches this file live."""
    arm_all(file, [])


def armed_points(file: Path) -> list[Armed]:
    """Return what is armed in a file; nothing when there is none."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[Armed])
    except FileNotFoundError:
        return []


def passed(log: Path) -> list[tuple[float, str]]:
    """Return the points in a log file, each with the monotonic time in seconds."""
    return [(float(words[0]), words[1]) for words in _lines(log) if len(words) == 2]  # noqa: PLR2004 - time and point


def fired(log: Path) -> list[Fired]:
    """Return what happened at points, as a log file has it."""
    return [
        Fired(at_s=float(words[0]), point=words[1], action=words[2].removeprefix("!"), detail=" ".join(words[3:]))
        for words in _lines(log)
        if len(words) > 2  # noqa: PLR2004 - time, point and what happened
    ]


def _lines(log: Path) -> list[list[str]]:
    return [line.split() for line in log.read_text().splitlines()] if log.exists() else []


def main(arguments: list[str] | None = None) -> None:
    """Run ``ckpt sidecar …`` or ``ckpt coordinator …`` with points around its ports."""
    words = sys.argv[1:] if arguments is None else arguments
    switch_off_from_env(words[0])
    points = points_from_env()
    if CLOCK_VARIABLE in os.environ:
        let_clock_jump(points.clock_off_s)
    sys.exit(ckpt(words, passed=points.wrap))


if __name__ == "__main__":
    main()
