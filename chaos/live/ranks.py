"""Ranks without torchrun: forked from a warm process, placed on nodes, started anew all together when one dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from toprope.chaos.live.cluster import Cluster
from toprope.chaos.live.processes import LiveError, free_port
from toprope.chaos.live.training import example_script

_POLL_S = 0.01


class ForkServer:
    """The warm process. Use it in a ``with``."""

    def __init__(self) -> None:
        """Start it; the import of torch goes on while this returns."""
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "toprope.chaos.live.forkserver", str(example_script().parent)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(os.environ) | {"OMP_NUM_THREADS": "1"},
        )
        self._ready = False
        self._pending = b""
        self.ended: dict[int, int] = {}

    def fork(self, arguments: Sequence[str], *, env: Mapping[str, str], log: Path) -> int:
        """Fork a rank and return its process id."""
        if not self._ready:
            assert "ready" in self._answer(), "the first answer says that it is ready"
            self._ready = True
        order = {"arguments": list(arguments), "env": dict(env), "log": str(log)}
        assert self._popen.stdin is not None
        self._popen.stdin.write(json.dumps(order).encode() + b"\n")
        self._popen.stdin.flush()
        while "status" in (answer := self._answer()):
            self.ended[answer["pid"]] = answer["status"]
        return answer["pid"]

    def poll(self) -> dict[int, int]:
        """Return the ranks that have ended so far, each with its status."""
        assert self._popen.stdout is not None
        os.set_blocking(self._popen.stdout.fileno(), False)
        try:
            while (line := self._line()) is not None:
                answer = json.loads(line)
                self.ended[answer["pid"]] = answer["status"]
        finally:
            os.set_blocking(self._popen.stdout.fileno(), True)
        return self.ended

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


@dataclass(slots=True, kw_only=True)
class World:
    """A world of ranks, and its launcher: when a rank dies it ends the others and starts all again."""

    server: ForkServer
    directory: Path
    arguments: tuple[str, ...]
    world: int
    cluster: Cluster | None = None
    placement: Callable[[int], str] = lambda _: "a"
    """Which node a rank sits on."""
    pids: dict[int, int] = field(default_factory=dict)
    starts: int = 0

    @property
    def out(self) -> Path:
        """Where the ranks write their journals and final digests."""
        return self.directory / "run"

    def start(self) -> None:
        """Fork all ranks."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.starts += 1
        port = str(free_port())
        for rank in range(self.world):
            env = {"RANK": str(rank), "WORLD_SIZE": str(self.world), "LOCAL_RANK": str(rank)}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
            if self.cluster is not None:
                env["CKPT_SOCKET"] = str(self.cluster.nodes[self.placement(rank)].socket)
            arguments = (*self.arguments, "--out", str(self.out))
            self.pids[rank] = self.server.fork(arguments, env=env, log=self.log(rank))

    def log(self, rank: int) -> Path:
        """Return where a rank's standard output and error go."""
        return self.directory / f"rank-{rank}.log"

    def kill(self, rank: int) -> int:
        """SIGKILL one rank and return its status."""
        return self._end(self.pids[rank])

    def restart(self) -> None:
        """End what still runs and start all ranks anew."""
        self.stop()
        self.start()

    def stop(self) -> None:
        """SIGKILL every rank that lives."""
        for pid in self.pids.values():
            if pid not in self.server.poll():
                self._end(pid)

    def statuses(self) -> dict[int, int]:
        """Return the ranks of this start that have ended, each with its status."""
        ended = self.server.poll()
        return {rank: ended[pid] for rank, pid in self.pids.items() if pid in ended}

    def until(self, done: Callable[[], bool], *, what: str, timeout_s: float = 60.0) -> None:
        """Return when ``done()``.

        Raises:
            LiveError: a rank failed before, or it took longer than ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        while not done():
            failed = {rank: status for rank, status in self.statuses().items() if status != 0}
            if failed:
                raise LiveError(f"ranks ended before {what}: {failed}\n{self._tails()}")
            if time.monotonic() > deadline:
                raise LiveError(f"not within {timeout_s} s: {what}\n{self._tails()}")
            time.sleep(_POLL_S)

    def finish(self, *, timeout_s: float = 60.0) -> None:
        """Wait until every rank has ended well."""
        self.until(lambda: len(self.statuses()) == self.world, what="the end of training", timeout_s=timeout_s)

    def _end(self, pid: int) -> int:
        os.kill(pid, 9)
        deadline = time.monotonic() + 10.0
        while pid not in self.server.poll():
            if time.monotonic() > deadline:
                raise LiveError(f"rank with pid {pid} was killed but has not ended")
            time.sleep(_POLL_S)
        return self.server.ended[pid]

    def _tails(self) -> str:
        logs = [self.log(rank) for rank in range(self.world)]
        return "\n".join(f"--- {log} ---\n{log.read_text()[-2000:]}" for log in logs if log.exists())
