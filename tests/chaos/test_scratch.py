"""What tests and demos lay into shared memory is gone when they are, whatever ended them."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from tests.support.source import ROOT

from toprope.chaos.live.processes import Process, wait_until
from toprope.chaos.live.scratch import Scratch, sweep

_MAKES_ONE = """
import sys, time
from pathlib import Path
from toprope.chaos.live.scratch import Scratch
made = Scratch(Path(sys.argv[1]))
(made.path / "data").write_bytes(b"x")
print("made", made.path, flush=True)
time.sleep(60)
"""

_FORKS_ONE = """
import sys, time
from pathlib import Path
from toprope.chaos.live.forking import ForkServer
with ForkServer() as server:
    pid = server.fork("tests.chaos.test_scratch:wait", [], env={}, log=Path(sys.argv[1]))
    print("made", server._popen.pid, pid, flush=True)
    time.sleep(60)
"""

_BEGINS_ONE = """
import sys, time
from pathlib import Path
from toprope.chaos.live.forking import ForkServer
server = ForkServer("slow_to_import", path=[Path(sys.argv[1])])
print("made", server._popen.pid, flush=True)
time.sleep(60)
"""

_WAITS_IN_A_TEST = """
import time

def test_it(memory_dir):
    (memory_dir / "data").write_bytes(b"x")
    print("made", memory_dir, flush=True)
    time.sleep(60)
"""


def wait(_arguments: list[str]) -> None:
    """What the child of the fork server does."""
    signal.pause()


def said(process: Process) -> list[str]:
    """Wait for the line that begins with "made"; return its other words."""

    def lines() -> list[str]:
        return [line for line in process.log.read_text().splitlines() if line.startswith("made ")]

    wait_until(lines, what="it has made something", timeout_s=30, alive=[process])
    return lines()[0].split()[1:]


def program(text: str, *arguments: str, directory: Path) -> Process:
    env = {"PYTHONPATH": str(ROOT)}
    return Process("program", [sys.executable, "-c", text, *arguments], log=directory / "log", env=env)


def test_a_directory_is_there_while_its_maker_lives_and_swept_once_it_was_killed(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    maker = program(_MAKES_ONE, str(shared), directory=tmp_path)
    (path,) = map(Path, said(maker))

    sweep(shared)
    assert (path / "data").exists()
    assert maker.kill().status == -signal.SIGKILL
    assert (path / "data").exists()
    with Scratch(shared) as own:
        assert list(shared.iterdir()) == [own.path]
    assert list(shared.iterdir()) == []


def test_what_is_not_ours_is_never_swept(tmp_path: Path) -> None:
    (tmp_path / "toprope-0").mkdir()
    (tmp_path / "other").mkdir()
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "toprope-0"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_fork_server_and_its_children_die_with_whoever_started_it(number: int, tmp_path: Path) -> None:
    starter = program(_FORKS_ONE, str(tmp_path / "child"), directory=tmp_path)
    pids = [int(word) for word in said(starter)]
    assert len(pids) == 2

    os.kill(starter.pid, number)
    assert starter.wait(10) == -number

    wait_until(lambda: not any(runs(pid) for pid in pids), what="both are gone", timeout_s=10)


def test_a_fork_server_that_still_imports_dies_with_whoever_started_it(tmp_path: Path) -> None:
    (tmp_path / "slow_to_import.py").write_text("import time; time.sleep(60)")
    starter = program(_BEGINS_ONE, str(tmp_path), directory=tmp_path)
    (pid,) = map(int, said(starter))
    wait_until(lambda: b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes(), what="it has begun", timeout_s=10)

    starter.kill()

    wait_until(lambda: not runs(pid), what="it is gone", timeout_s=10)


def runs(pid: int) -> bool:
    """Say whether a process lives: one that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
def test_tests_that_are_told_to_end_clean_up(tmp_path: Path) -> None:
    (tmp_path / "test_waiting.py").write_text(_WAITS_IN_A_TEST)
    words = ["-m", "pytest", "-q", "-s", "-c", str(ROOT / "pyproject.toml"), "-p", "tests.conftest"]
    process = Process(
        "tests", [sys.executable, *words, str(tmp_path)], log=tmp_path / "log", env={"PYTHONPATH": str(ROOT)}
    )
    (path,) = map(Path, said(process))
    assert (path / "data").exists()

    assert process.stop() == 128 + signal.SIGTERM

    assert not path.exists()
