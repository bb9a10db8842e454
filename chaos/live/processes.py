"""Processes that we start: each with its log, dead with us at the latest, killed by the tree."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from toprope.coordinator.adapters import broker
from toprope.trainer_hooks.torchrun.parent import die_with_parent

KEEPER = "toprope.trainer_hooks.torchrun.worker"
"""The module that stands between an agent and a rank."""
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)
_POLL_S = 0.02
_LOG_TAIL_BYTES = 4000


class LiveError(Exception):
    """A process died or did not come up; the message ends with the last lines of its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """A process that was killed, and the wait status that proves it (-9: by SIGKILL)."""

    what: str
    pid: int
    status: int


class Running(Protocol):
    """A process that we started, in whatever way."""

    name: str
    log: Path

    @property
    def pid(self) -> int:
        """Its process id."""

    def status(self) -> int | None:
        """Return its exit status, negative for a signal, or None while it lives."""

    def kill(self) -> Killed:
        """SIGKILL this process alone and reap it."""

    def stop(self, timeout_s: float = 10.0) -> int:
        """Ask it to end (SIGTERM), and after ``timeout_s`` kill it; return its exit status."""


class Process:
    """One process that we started. Its standard output and error go to ``log``."""

    def __init__(self, name: str, arguments: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None) -> None:
        """Start it; it gets SIGKILL when we die."""
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stream:
            self._popen = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env=dict(os.environ) | dict(env or {}),
                preexec_fn=functools.partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - one prctl call; these programs start no threads before it
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._popen.pid

    def status(self) -> int | None:
        """Return its exit status, negative for a signal, or None while it lives."""
        return self._popen.poll()

    def wait(self, timeout_s: float) -> int:
        """Return its exit status once it has ended.

        Raises:
            LiveError: it lives on after ``timeout_s``.
        """
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise LiveError(f"{self.name} (pid {self.pid}) still runs after {timeout_s} s{tail(self)}") from error

    def kill(self) -> Killed:
        """SIGKILL this process alone and reap it."""
        self._popen.kill()
        return Killed(what=self.name, pid=self.pid, status=self._popen.wait())

    def stop(self, timeout_s: float = 10.0) -> int:
        """Ask it to end (SIGTERM), and after ``timeout_s`` kill its tree; return its exit status."""
        self._popen.terminate()
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            kill_tree(self)
            return self._popen.wait()


def tail(process: Running) -> str:
    """Return the last lines of a process's log, for a message."""
    text = process.log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").rstrip() if process.log.exists() else ""
    return f"\n--- end of {process.log} ---\n{text}" if text else f" ({process.log} is empty)"


def kill_tree(process: Running) -> list[Killed]:
    """SIGKILL a process and all that descends from it, it first; return each with its wait status.

    Orphans must fall to us to be reaped: call ``become_subreaper`` first.
    """
    family = [(pid, command_of(pid)) for pid in descendants(process.pid)]
    killed = [process.kill()]
    for pid, _ in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    killed += [Killed(what=what, pid=pid, status=_reap(pid)) for pid, what in family]
    return killed


def become_subreaper() -> None:
    """Let orphans of processes that we started become our children, so that we learn how they ended."""
    if _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def descendants(pid: int) -> list[int]:
    """Return the processes that descend from ``pid``, nearest first. Sessions and groups do not matter."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        children = list(_children(waiting.pop(0)))
        found += children
        waiting += children
    return found


def command_of(pid: int) -> str:
    """Return what a process is: its script or program, its rank or that of its keeper; empty when it is gone."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    name = next((Path(word).name for word in words if word.endswith(".py")), Path(words[0]).name)
    rank = environment_of(pid).get("RANK")
    if rank is None:
        return name
    return f"keeper of rank {rank}" if KEEPER in words else f"rank {rank} ({name})"


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; empty when it is gone."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return dict(line.split("=", 1) for line in raw.split("\0") if "=" in line)


def wait_until(done: Callable[[], object], *, what: str, timeout_s: float, alive: Sequence[Running] = ()) -> None:
    """Poll until ``done()`` is true.

    Raises:
        LiveError: not within ``timeout_s``, or one of ``alive`` ended first.
    """
    deadline = time.monotonic() + timeout_s
    while not done():
        for process in alive:
            status = process.status()
            if status is not None:
                raise LiveError(f"{process.name} ended with status {status} before {what}{tail(process)}")
        if time.monotonic() > deadline:
            tails = "".join(tail(process) for process in alive)
            raise LiveError(f"not within {timeout_s} s: {what}{tails}")
        time.sleep(_POLL_S)


def wait_ready(process: Running, ready_file: Path, *, timeout_s: float = 30.0) -> dict[str, Any]:
    """Return what a service wrote into its ready file once it served."""
    wait_until(ready_file.exists, what=f"{process.name} is ready", timeout_s=timeout_s, alive=[process])
    ready: dict[str, Any] = json.loads(ready_file.read_text())
    return ready


@contextlib.contextmanager
def ending_well() -> Iterator[None]:
    """Let SIGTERM end us as Ctrl-C does: with all that we started."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def free_port() -> int:
    """Return a port that nothing listens on, on any address, kept for a server as ``broker.free_port`` keeps it."""
    return broker.free_port("")


def _children(pid: int) -> Iterator[int]:
    try:
        for task in sorted(Path(f"/proc/{pid}/task").iterdir()):
            yield from map(int, (task / "children").read_text().split())
    except (FileNotFoundError, ProcessLookupError):
        return


def _reap(pid: int) -> int:
    """Return the wait status of an orphan, which falls to us as soon as its parent is gone."""
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        try:
            reaped, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            if not Path(f"/proc/{pid}").exists():
                raise LiveError(f"pid {pid} was reaped by its own parent: its status is lost") from None
            reaped, status = 0, 0
        if reaped:
            return os.waitstatus_to_exitcode(status)
        time.sleep(_POLL_S)
    raise LiveError(f"pid {pid} was killed but has not come to us to be reaped within 10 s")
