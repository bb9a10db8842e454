"""The keeper of a rank: it dies with the agent, kills what stands still, ends as the rank does and says why."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from toprope.chaos.live.processes import Process, wait_until
from toprope.trainer_hooks.torchrun.strikes import open_pipe

SLEEPS = "import os, time; open(os.environ['PIDS'], 'a').write(f'{os.getpid()}\\n'); time.sleep(60)"
PATIENT = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEPS
AWAITS_S = 15.0


class Kept:
    """A keeper with its rank, and an agent that started it."""

    def __init__(
        self, directory: Path, code: str, *, frozen_s: float = 60.0, agent: int | None = None, pipe: str = ""
    ) -> None:
        self.pids, self.ends = directory / "pids", directory / "ends"
        me = os.getpid() if agent is None else agent
        module = [
            "-m",
            "toprope.trainer_hooks.torchrun.worker",
            str(me),
            str(frozen_s),
            str(self.ends),
            "",
            pipe,
            "--",
        ]
        env = {"PIDS": str(self.pids), "RANK": "3", "TORCHELASTIC_RESTART_COUNT": "2"}
        self.command = [sys.executable, *module, sys.executable, "-c", code]
        self.env = env
        self.log = directory / "log"

    def start(self) -> Process:
        process = Process("keeper", self.command, log=self.log, env=self.env)
        if "PIDS" in " ".join(self.command):
            wait_until(lambda: self.rank() != 0, what="the rank runs", timeout_s=AWAITS_S, alive=[process])
        return process

    def rank(self) -> int:
        text = self.pids.read_text() if self.pids.exists() else ""
        return int(text) if text.endswith("\n") else 0

    def end(self) -> dict[str, Any]:
        (line,) = self.ends.read_text().splitlines()
        found: dict[str, Any] = json.loads(line)
        return found


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


@pytest.mark.parametrize(("code", "status"), [("", 0), ("raise SystemExit(5)", 5), ("import os; os.abort()", -6)])
def test_it_ends_as_the_rank_did(code: str, status: int, tmp_path: Path) -> None:
    kept = Kept(tmp_path, code)
    assert kept.start().wait(AWAITS_S) == status
    end = kept.end()
    assert (end["rank"], end["restart"], end["status"], end["why"]) == (3, 2, status, "by itself")
    assert ("rank 3" in kept.log.read_text()) == (status != 0)


def test_a_rank_that_is_killed_is_told_of_with_its_signal(tmp_path: Path) -> None:
    kept = Kept(tmp_path, SLEEPS)
    keeper = kept.start()
    os.kill(kept.rank(), signal.SIGKILL)
    assert keeper.wait(AWAITS_S) == -9
    assert "ended by SIGKILL after" in kept.log.read_text()
    assert kept.end()["why"] == "by itself"


def test_a_rank_dies_with_its_keeper_and_the_keeper_with_the_agent(tmp_path: Path) -> None:
    kept = Kept(tmp_path, SLEEPS)
    start = "import os, subprocess, sys, time; words = [str(os.getpid()) if w == 'ME' else w for w in sys.argv[1:]]; "
    command = [word if word != str(os.getpid()) else "ME" for word in kept.command]
    agent = Process(
        "agent", [sys.executable, "-c", start + "subprocess.call(words)", *command], log=kept.log, env=kept.env
    )
    wait_until(lambda: kept.rank() != 0, what="the rank runs", timeout_s=AWAITS_S, alive=[agent])
    agent.kill()
    wait_until(lambda: gone(kept.rank()), what="the rank is dead", timeout_s=AWAITS_S)


def test_a_keeper_whose_agent_is_gone_already_starts_nothing(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert Kept(tmp_path, SLEEPS, agent=ended.pid).command
    kept = Kept(tmp_path, "open('started', 'w')", agent=ended.pid)
    keeper = Process("keeper", kept.command, log=kept.log, env=kept.env)
    assert keeper.wait(AWAITS_S) == -9
    assert not kept.ends.exists()


def test_a_rank_that_stands_still_is_killed_after_a_while(tmp_path: Path) -> None:
    kept = Kept(tmp_path, SLEEPS, frozen_s=0.6)
    keeper = kept.start()
    os.kill(kept.rank(), signal.SIGSTOP)
    assert keeper.wait(AWAITS_S) == -9
    assert "it stood still for" in kept.end()["why"]


def test_a_rank_that_stood_still_for_less_goes_on(tmp_path: Path) -> None:
    kept = Kept(tmp_path, SLEEPS, frozen_s=30.0)
    keeper = kept.start()
    os.kill(kept.rank(), signal.SIGSTOP)
    os.kill(kept.rank(), signal.SIGCONT)
    assert keeper.status() is None
    assert keeper.stop() == -15
    assert kept.end()["why"] == "it was told to end (SIGTERM)"


def test_a_rank_that_stands_still_and_is_told_to_end_is_killed_at_once(tmp_path: Path) -> None:
    kept = Kept(tmp_path, PATIENT, frozen_s=600.0)
    keeper = kept.start()
    os.kill(kept.rank(), signal.SIGSTOP)
    wait_until(
        lambda: Path(f"/proc/{kept.rank()}/stat").read_text().rpartition(")")[2].split()[0] == "T",
        what="it stands still",
        timeout_s=AWAITS_S,
    )
    os.kill(keeper.pid, signal.SIGTERM)
    assert keeper.wait(AWAITS_S) == -9
    assert "told to end (SIGTERM); it stood still" in kept.end()["why"]


def test_what_torchrun_sends_to_the_keepers_group_reaches_the_rank_by_the_keeper_alone(tmp_path: Path) -> None:
    kept = Kept(tmp_path, SLEEPS)
    keeper = subprocess.Popen(kept.command, env={**os.environ, **kept.env}, start_new_session=True)
    wait_until(lambda: kept.rank() != 0, what="the rank runs", timeout_s=AWAITS_S)
    os.kill(keeper.pid, signal.SIGSTOP)
    os.killpg(keeper.pid, signal.SIGTERM)
    time.sleep(0.3)
    assert not gone(kept.rank()), "it would have heard it twice"
    os.kill(keeper.pid, signal.SIGCONT)
    assert keeper.wait(AWAITS_S) == -15


def test_a_command_that_is_not_there_is_named(tmp_path: Path) -> None:
    kept = Kept(tmp_path, "")
    kept.command[-3:] = ["/no/such/program"]
    assert kept.start().wait(AWAITS_S) == 127
    assert "/no/such/program: No such file" in kept.log.read_text()


@pytest.mark.parametrize(
    ("code", "end", "said"),
    [("raise SystemExit(3)", "by itself", b"f"), ("pass", "by itself", b""), (SLEEPS, "told", b"")],
)
def test_the_agent_hears_of_a_rank_that_failed_by_itself(code: str, end: str, said: bytes, tmp_path: Path) -> None:
    read, write = open_pipe()
    kept = Kept(tmp_path, code, pipe=str(write))
    keeper = kept.start()
    if end == "told":
        keeper.stop()
    keeper.wait(AWAITS_S)
    os.close(write)
    assert os.read(read, 8) == said
    os.close(read)
