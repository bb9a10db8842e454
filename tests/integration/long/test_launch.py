"""``ckpt launch`` with two agents as two nodes: what is killed is started again each time, and sooner if warm."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.support.source import ROOT

from toprope.chaos.live.processes import (
    Process,
    become_subreaper,
    descendants,
    tail,
    wait_ready,
    wait_until,
)

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(900)]
NODES = "ab"
AGAIN_S = 180.0
"""The machine may be busy: torch alone takes seconds to import in each process."""
FOUND_S = 60.0
"""Within this a world is found again, whatever agent was killed at whatever moment."""


@dataclass(frozen=True, slots=True)
class Line:
    word: str
    rank: int
    world: int
    pid: int
    node: str


@dataclass(slots=True)
class Launched:
    """Two agents that meet at a store of its own."""

    directory: Path
    words: tuple[str, ...]
    nodes: str
    endpoint: str = ""
    store: Process | None = None
    agents: dict[str, Process] = field(default_factory=dict)

    def start_store(self) -> None:
        ready = self.directory / "ready.json"
        words = ["rendezvous", "--listen", "127.0.0.1:0", "--ready-file", str(ready)]
        self.store = Process(
            "rendezvous", [sys.executable, "-m", "toprope", *words], log=self.directory / "rendezvous.log"
        )
        self.endpoint = f"127.0.0.1:{wait_ready(self.store, ready, timeout_s=AGAIN_S)['port']}"

    def start(self, node: str, *, module: str = "toprope") -> None:
        torchrun = ["torchrun", f"--nnodes={self.nodes}", "--nproc-per-node=1", "--max-restarts=20", "--rdzv-id=job"]
        torchrun += ["--rdzv-conf=keep_alive_max_attempt=10"]  # a busy machine lets an agent be silent for long
        torchrun += [f"--log-dir={self.directory / 'torchrun'}", str(ROOT / "tests/support/reducing_rank.py")]
        torchrun += [str(self.journal), str(self.stop_file)]
        launch = ["launch", "--rendezvous", self.endpoint, "--ends", str(self.ends_file), *self.words, "--"]
        self.agents[node] = Process(
            f"agent of node {node}",
            [sys.executable, "-m", module, *launch, *torchrun],
            log=self.directory / f"agent-{node}.log",
            env={"NODE": node, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )

    @property
    def journal(self) -> Path:
        return self.directory / "journal"

    @property
    def stop_file(self) -> Path:
        return self.directory / "stop"

    @property
    def ends_file(self) -> Path:
        return self.directory / "ends"

    def lines(self) -> list[Line]:
        text = self.journal.read_text() if self.journal.exists() else ""
        split = (line.split() for line in text.splitlines(keepends=True) if line.endswith("\n"))
        return [Line(word, int(rank), int(world), int(pid), node) for word, rank, world, pid, node in split]

    def ends(self) -> list[str]:
        text = self.ends_file.read_text() if self.ends_file.exists() else ""
        return [json.loads(line)["why"] for line in text.splitlines()]

    def training(self, world: int, *, nodes: str) -> dict[str, int]:
        """Return the ranks that train now and live, by node, if that is a whole world on just these nodes."""
        latest = {line.node: line for line in self.lines() if line.word == "trains"}
        living = {node: line for node, line in latest.items() if alive(line.pid)}
        whole = set(living) == set(nodes) and all(line.world == world for line in living.values())
        return {node: line.pid for node, line in living.items()} if whole else {}

    def trains(self, world: int, *, nodes: str = NODES, not_before: dict[str, int] | None = None) -> dict[str, int]:
        """Wait until a world of ranks trains that are others than before; return their process ids by node."""
        found: dict[str, int] = {}

        def done() -> bool:
            found.clear()
            found.update(self.training(world, nodes=nodes))
            return bool(found) and not set(found.values()) & set((not_before or {}).values())

        what = f"a world of {world} on {nodes} trains"
        try:
            wait_until(done, what=what, timeout_s=AGAIN_S)
        except Exception as error:
            error.add_note("".join(tail(agent) for agent in self.agents.values()))
            error.add_note(self.journal.read_text() if self.journal.exists() else "no rank has begun")
            raise
        return found

    def finish(self) -> None:
        self.stop_file.touch()
        assert {node: agent.wait(AGAIN_S) for node, agent in self.agents.items()} == dict.fromkeys(self.agents, 0)


def alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def timed(wait: Callable[[], object]) -> float:
    began_s = time.monotonic()
    wait()
    return time.monotonic() - began_s


@contextmanager
def launched(directory: Path, *words: str, nodes: str) -> Iterator[Launched]:
    become_subreaper()
    job = Launched(directory, words, nodes)
    try:
        job.start_store()
        for node in NODES:
            job.start(node)
        yield job
    finally:
        for process in (*job.agents.values(), job.store):
            if process is not None and process.status() is None:
                os.kill(process.pid, signal.SIGCONT)
                process.kill()


def test_a_rank_that_is_killed_is_started_again_each_time(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with launched(tmp_path, nodes="2") as job:
        ranks = job.trains(2)
        for number in range(3):
            os.kill(ranks["ab"[number % 2]], signal.SIGKILL)
            before = ranks
            took_s = timed(lambda before=before: ranks.update(job.trains(2, not_before=before)))  # type: ignore[misc]
            record_property(f"restart {number + 1} of a killed rank, s", f"{took_s:.1f}")
        job.finish()
        log = (tmp_path / "agent-a.log").read_text() + (tmp_path / "agent-b.log").read_text()
    assert "ended by SIGKILL after" in log
    assert job.ends().count("by itself") >= 3


def test_a_killed_rank_that_is_forked_from_a_warm_process_is_back_without_importing_torch(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with launched(tmp_path, "--warm", "torch,torch.distributed", nodes="2") as job:
        ranks = job.trains(2)
        for number in range(3):
            before = dict(ranks)
            os.kill(ranks["ab"[number % 2]], signal.SIGKILL)
            took_s = timed(lambda before=before: ranks.update(job.trains(2, not_before=before)))  # type: ignore[misc]
            record_property(f"restart {number + 1} of a killed warm rank, s", f"{took_s:.1f}")
        job.finish()
        log = (tmp_path / "agent-a.log").read_text() + (tmp_path / "agent-b.log").read_text()
    assert log.count("torch, torch.distributed loaded for all ranks in") == 2
    assert "starts cold" not in log
    assert job.ends().count("by itself") >= 3


def test_an_agent_that_is_killed_takes_its_rank_along_and_either_can_come_back(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with launched(tmp_path, nodes="1:2") as job:
        job.trains(2)
        for dead, other in ("ba", "ab"):
            family = descendants(job.agents[dead].pid)
            job.agents[dead].kill()
            wait_until(lambda family=family: not any(map(alive, family)), what="its rank is gone", timeout_s=20)  # type: ignore[misc]
            alone_s = timed(lambda other=other: job.trains(1, nodes=other))  # type: ignore[misc]
            record_property(f"node {other} trains alone after, s", f"{alone_s:.1f}")
            job.start(dead)
            back_s = timed(lambda: job.trains(2))
            record_property(f"node {dead} is back after, s", f"{back_s:.1f}")
            assert max(alone_s, back_s) < FOUND_S
        job.finish()


def test_an_agent_that_is_killed_while_nodes_meet_leaves_the_others_a_world(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with launched(tmp_path, nodes="1:2") as job:
        ranks = job.trains(2)
        job.agents["b"].kill()
        ranks = job.trains(1, nodes="a", not_before=ranks)
        for number in range(2):
            job.start("b", module="tests.support.dying_agent")
            began_s = time.monotonic()
            ranks = job.trains(1, nodes="a", not_before=ranks)
            took_s = time.monotonic() - began_s
            assert job.agents["b"].wait(AGAIN_S) == -signal.SIGKILL
            record_property(f"node a trains after b was killed in meeting {number + 1}, s", f"{took_s:.1f}")
            assert took_s < FOUND_S
        job.start("b")
        job.trains(2, not_before=ranks)
        job.finish()
        log = (tmp_path / "agent-a.log").read_text()
    assert log.count("agents have met in vain") >= 2
