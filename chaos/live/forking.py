"""A client for the fork server: children that start in milliseconds, each with its exit status."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from toprope.chaos.live.processes import Killed, LiveError
from toprope.trainer_hooks.torchrun.parent import die_with_parent

_POLL_S = 0.01


class ForkServer:
    """The warm process, which has imported ``modules``. Use it in a ``with``."""

    def __init__(self, *modules: str, path: Sequence[Path] = ()) -> None:
        """Start it; its imports go on while this returns. ``path`` is put before its module path."""
        search = os.pathsep.join([*map(str, path), os.environ.get("PYTHONPATH", "")])
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "toprope.chaos.live.forkserver", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(os.environ) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": search.rstrip(os.pathsep)},
            preexec_fn=functools.partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - a few system calls; its imports may take seconds
        )
        self._ready = False
        self._pending = b""
        self.ended: dict[int, int] = {}

    def fork(self, target: str, arguments: Sequence[str], *, env: Mapping[str, str], log: Path) -> int:
        """Fork a child that calls ``target`` (``module:function``) with the arguments; return its process id."""
        if not self._ready:
            assert "ready" in self._answer(), "the first answer says that it is ready"
            self._ready = True
        order = {"target": target, "arguments": list(arguments), "env": dict(env), "log": str(log)}
        assert self._popen.stdin is not None
        self._popen.stdin.write(json.dumps(order).encode() + b"\n")
        self._popen.stdin.flush()
        while "status" in (answer := self._answer()):
            self.ended[answer["pid"]] = answer["status"]
        self.ended.pop(answer["pid"], None)  # of one that had this id before it, thousands of processes ago
        return answer["pid"]

    def poll(self) -> dict[int, int]:
        """Return the children that have ended so far, each with its status."""
        assert self._popen.stdout is not None
        os.set_blocking(self._popen.stdout.fileno(), False)
        try:
            while (line := self._line()) is not None:
                answer = json.loads(line)
                self.ended[answer["pid"]] = answer["status"]
        finally:
            os.set_blocking(self._popen.stdout.fileno(), True)
        return self.ended

    def kill(self, pid: int) -> int:
        """SIGKILL a child and return its status; that of one that has ended already is returned as it was."""
        if pid not in self.poll():
            os.kill(pid, signal.SIGKILL)
        return self.wait(pid)

    def wait(self, pid: int, *, timeout_s: float = 10.0) -> int:
        """Return the status of a child once it has ended.

        Raises:
            LiveError: it lives on after ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        while pid not in self.poll():
            if time.monotonic() > deadline:
                raise LiveError(f"the process with pid {pid} has not ended within {timeout_s} s")
            time.sleep(_POLL_S)
        return self.ended[pid]

    def _answer(self) -> dict[str, int]:
        line = self._line()
        if line is None:
            raise LiveError("the fork server has died")
        answer: dict[str, int] = json.loads(line)
        return answer

    def _line(self) -> bytes | None:
        """Return the next line; None when there is none yet (not blocking) or no more (blocking)."""
        assert self._popen.stdout is not None
        while b"\n" not in self._pending:
            try:
                chunk = os.read(self._popen.stdout.fileno(), 65536)
            except BlockingIOError:
                return None
            if not chunk:
                return None
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.close()
        self._popen.wait(30)
        self._popen.stdout.close()


class Forked:
    """One child of a fork server, as a process like any other."""

    def __init__(
        self, name: str, server: ForkServer, target: str, arguments: Sequence[str], *, log: Path, env: Mapping[str, str]
    ) -> None:
        """Fork it."""
        self.name = name
        self.log = log
        self._server = server
        log.parent.mkdir(parents=True, exist_ok=True)
        self.pid = server.fork(target, arguments, env=env, log=log)

    def status(self) -> int | None:
        """Return its exit status, negative for a signal, or None while it lives."""
        return self._server.poll().get(self.pid)

    def kill(self) -> Killed:
        """SIGKILL it; its status is that by which it ended, whether now or before."""
        return Killed(what=self.name, pid=self.pid, status=self._server.kill(self.pid))

    def stop(self, timeout_s: float = 10.0) -> int:
        """Ask it to end (SIGTERM), and after ``timeout_s`` kill it; return its exit status."""
        if self.status() is None:
            os.kill(self.pid, signal.SIGTERM)
        try:
            return self._server.wait(self.pid, timeout_s=timeout_s)
        except LiveError:
            return self._server.kill(self.pid)


def warm_for_services() -> ForkServer:
    """Return a server that has imported sidecar and coordinator."""
    return ForkServer("toprope.sidecar.cli", "toprope.coordinator.cli", "toprope.chaos.killpoints")


class ForkedServices:
    """Launches ``ckpt sidecar`` and ``ckpt coordinator`` from a fork server, with kill points where they are set."""

    def __init__(self, server: ForkServer) -> None:
        self._server = server

    def __call__(self, name: str, words: Sequence[str], *, log: Path, env: Mapping[str, str]) -> Forked:
        """Fork one."""
        return Forked(name, self._server, "toprope.chaos.killpoints:main", words, log=log, env=env)
