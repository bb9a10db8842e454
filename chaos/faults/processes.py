"""Faults of processes and nodes: killed, crashed, told to end, stopped for a while, slowed down, out of memory."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from pathlib import Path

from toprope.chaos.faults.injector import Base, NotFiredError
from toprope.chaos.live.processes import wait_until
from toprope.chaos.site import state_of
from toprope.store.errors import UsageError

_DIES_S = 15.0
_PERIOD_S = 0.2
_CGROUPS = Path("/sys/fs/cgroup")


class _ByPid(Base):
    """A fault of one process."""

    pid = 0
    _ended = ""

    def aim(self) -> None:
        """Find whom it is meant for."""
        self.pid = self.site.pid(self.fault.target)

    def ended(self) -> str:
        """Return how it ended, once it has: remembered, for the next process in its place is not known by this id."""
        status = None if self._ended else self.site.status(self.pid)
        if status is not None:
            self._ended = f"pid {self.pid} ended with status {status}"
        return self._ended


class Signal(_ByPid):
    """Ends a process, or a node with all that runs on it; a service is started again when it is mended."""

    number_of = {"kill": signal.SIGKILL, "segfault": signal.SIGSEGV, "terminate": signal.SIGTERM}  # noqa: RUF012 - a constant
    _node_statuses: dict[str, int] | None = None

    def strike(self) -> None:
        """Send the signal; a killed process is seen dead before this returns."""
        kind, _, name = self.fault.target.partition(" ")
        if kind == "node":
            if self.fault.do != "kill":
                raise UsageError(f"{self.fault.do} of a node: a node can only be killed")
            self._node_statuses = self.site.kill_node(name)
            return
        self.aim()
        os.kill(self.pid, self.number_of[self.fault.do])
        if self.fault.do != "terminate":
            wait_until(self.ended, what=f"{self.fault.target} dies", timeout_s=_DIES_S)
        if kind != "rank":
            self.site.down.add(self.fault.target)

    def mend(self) -> None:
        """Start a service or a node again; a rank comes back with its world."""
        if self.fault.target not in self.site.down:
            return
        if self._node_statuses is None:
            wait_until(self.ended, what=f"{self.fault.target} has ended", timeout_s=_DIES_S)
        self.site.start(self.fault.target)

    def witness(self) -> str:
        """Return the wait status of each process."""
        if self._node_statuses is None:
            return self.ended()
        return ", ".join(f"{what} ended with status {status}" for what, status in self._node_statuses.items())


class Pause(_ByPid):
    """Stops a process (SIGSTOP) and lets it go on when it is mended."""

    _seen = ""

    def strike(self) -> None:
        """Stop it, and see it stopped."""
        self.aim()
        os.kill(self.pid, signal.SIGSTOP)
        wait_until(lambda: state_of(self.pid) == "T", what=f"{self.fault.target} stands still", timeout_s=_DIES_S)
        self._seen = f"pid {self.pid} was in state T"
        self._since_s = time.monotonic()

    def mend(self) -> None:
        """Let it go on."""
        if state_of(self.pid) == "T":
            os.kill(self.pid, signal.SIGCONT)
            self._seen += f" for {time.monotonic() - self._since_s:.1f} s"

    def witness(self) -> str:
        """Return the state that it was seen in."""
        return self._seen


class Slow(_ByPid):
    """Lets a process run only a share of the time (``how.share``): a straggler."""

    _stops = 0
    _stopped_s = 0.0
    _next_s = 0.0
    _since_s = 0.0

    def strike(self) -> None:
        """Begin."""
        self.aim()
        self.share = self.number("share", 0.4)
        if not 0.0 < self.share < 1.0:
            raise UsageError(f"slow: share {self.share} is not between 0 and 1")

    def tend(self) -> None:
        """Stop it, or let it go on, when it is time."""
        now_s = time.monotonic()
        if now_s < self._next_s or self.site.status(self.pid) is not None:
            return
        if self._since_s:
            self._go_on(now_s)
            self._next_s = now_s + _PERIOD_S * self.share
        else:
            os.kill(self.pid, signal.SIGSTOP)
            self._stops, self._since_s = self._stops + 1, now_s
            self._next_s = now_s + _PERIOD_S * (1 - self.share)

    def mend(self) -> None:
        """Let it run."""
        if self._since_s and self.site.status(self.pid) is None:
            self._go_on(time.monotonic())

    def _go_on(self, now_s: float) -> None:
        os.kill(self.pid, signal.SIGCONT)
        self._stopped_s += now_s - self._since_s
        self._since_s = 0.0

    def witness(self) -> str:
        """Return how often it was stopped."""
        if not self._stops:
            return ""
        return f"pid {self.pid} was stopped {self._stops} times, {self._stopped_s:.1f} s in all"


class _InGroup(_ByPid):
    """A fault by a cgroup (version 1) of this process alone; making one takes root."""

    _group: Path | None = None

    def join(self, controller: str, **limits: int) -> Path:
        """Make the group with its limits, put the process there and return the group."""
        self.aim()
        root = next((one for one in (_CGROUPS / controller, _CGROUPS) if (one / next(iter(limits))).exists()), None)
        if root is None:
            raise NotFiredError(f"this machine has no {controller} cgroup of version 1 to make one in")
        group = root / f"toprope-chaos-{secrets.token_hex(4)}"
        try:
            group.mkdir()
            self._group = group
            for name, value in limits.items():
                (group / name).write_text(str(value))
            (group / "cgroup.procs").write_text(str(self.pid))
        except OSError as error:
            raise NotFiredError(f"{group} can't be used: {error.strerror}; this takes root") from error
        return group

    def leave(self) -> None:
        """Put the process back where it was made to leave, if it lives, and remove the group."""
        if self._group is not None:
            with contextlib.suppress(OSError):
                (self._group.parent / "cgroup.procs").write_text(str(self.pid))
            with contextlib.suppress(OSError):
                self._group.rmdir()


class Quota(_InGroup):
    """Gives a process only a share of one processor (``how.share``), by a cgroup of its own."""

    _seen = ""

    def strike(self) -> None:
        """Begin."""
        share = self.number("share", 0.1)
        period_us = 100_000
        self.join("cpu", **{"cpu.cfs_period_us": period_us, "cpu.cfs_quota_us": int(share * period_us)})

    def mend(self) -> None:
        """Count how often it was throttled, and let it run."""
        if self._group is not None:
            words = (self._group / "cpu.stat").read_text().split()
            counted = dict(zip(words[::2], map(int, words[1::2]), strict=True))
            if counted["nr_throttled"]:
                waited_s = counted["throttled_time"] / 1e9
                self._seen = f"pid {self.pid} was throttled {counted['nr_throttled']} times, {waited_s:.1f} s in all"
        self.leave()

    def witness(self) -> str:
        """Return what the kernel counted."""
        return self._seen


class OutOfMemory(_InGroup):
    """Puts a process into a memory cgroup that is too small for it, so that the kernel's OOM killer ends it."""

    _kills = 0

    def strike(self) -> None:
        """Make the group and put it there."""
        group = self.join("memory", **{"memory.limit_in_bytes": int(self.number("bytes", 1 << 16))})
        wait_until(self.ended, what=f"the kernel ends {self.fault.target}", timeout_s=_DIES_S)
        counted = (group / "memory.oom_control").read_text().split()
        self._kills = int(counted[counted.index("oom_kill") + 1])
        if self.fault.target.partition(" ")[0] != "rank":
            self.site.down.add(self.fault.target)

    def mend(self) -> None:
        """Remove the group; start a service again."""
        self.leave()
        if self.fault.target in self.site.down:
            self.site.start(self.fault.target)

    def witness(self) -> str:
        """Return how it ended, and what the kernel counted."""
        return f"{self.ended()}; the kernel counts oom_kill {self._kills}" if self._kills else ""
