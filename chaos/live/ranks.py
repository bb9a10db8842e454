"""Ranks without torchrun: forked from a warm process, placed on nodes, started anew all together when one dies."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from toprope.chaos.live.cluster import Cluster
from toprope.chaos.live.forking import ForkServer
from toprope.chaos.live.processes import LiveError, free_port
from toprope.chaos.live.training import example_script

_POLL_S = 0.01


def warm_for_training() -> ForkServer:
    """Return a server that has imported torch, what optimizers load on first use, the hook and the example."""
    return ForkServer("train", "torch._dynamo", "toprope.trainer_hooks.checkpointer", path=[example_script().parent])


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
    target: str = "train:main"
    """What each rank calls, in a module that ``server`` has imported."""
    env: Callable[[int], Mapping[str, str]] = lambda _: {}
    """What else a rank finds in its environment."""
    tells_out: bool = True
    """Whether a rank is told by ``--out`` where to write."""
    pids: dict[int, int] = field(default_factory=dict)
    starts: int = 0
    restarts_itself: bool = False
    """Whether ranks are started again without ``start``: by nobody here."""

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
            env |= self.env(rank)
            arguments = (*self.arguments, "--out", str(self.out)) if self.tells_out else self.arguments
            self.pids[rank] = self.server.fork(self.target, arguments, env=env, log=self.log(rank))

    def log(self, rank: int) -> Path:
        """Return where a rank's standard output and error go."""
        return self.directory / f"rank-{rank}.log"

    def kill(self, rank: int) -> int:
        """SIGKILL one rank and return its status."""
        return self.server.kill(self.pids[rank])

    def restart(self) -> None:
        """End what still runs and start all ranks anew."""
        self.stop()
        self.start()

    def stop(self) -> None:
        """SIGKILL every rank that lives."""
        for pid in self.pids.values():
            self.server.kill(pid)

    def statuses(self) -> dict[int, int]:
        """Return the ranks of this start that have ended, each with its status."""
        ended = self.server.poll()
        return {rank: ended[pid] for rank, pid in self.pids.items() if pid in ended}

    def ended(self) -> dict[int, int]:
        """Return the statuses of all ranks that have ended, of earlier starts too, by process id."""
        return self.server.poll()

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

    def _tails(self) -> str:
        logs = [self.log(rank) for rank in range(self.world)]
        return "\n".join(f"--- {log} ---\n{log.read_text()[-2000:]}" for log in logs if log.exists())
