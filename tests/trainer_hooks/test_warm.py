"""Ranks that are forked from a process which has their modules loaded: as ranks that were started, but sooner."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from toprope.chaos.live.processes import Process, wait_until
from toprope.trainer_hooks.torchrun import warm, worker

AWAITS_S = 15.0
SAYS = """
import json, os, sys
found = dict(argv=sys.argv, cwd=os.getcwd(), main=__name__, file=__file__, path=sys.path[0], group=os.getpgid(0))
found.update(loaded="loaded_once" in sys.modules, rank=os.environ.get("RANK"), home="HOME" in os.environ)
found.update(pid=os.getpid(), parent=os.getppid(), child=int(__import__("signal").getsignal(17)))
print(json.dumps(found))
"""
SLEEPS = "import os, time; open('pid', 'a').write(f'{os.getpid()}\\n'); time.sleep(60)"


@dataclass(slots=True)
class Warm:
    """A warm process, and keepers that order ranks from it, in a directory with modules and a script."""

    directory: Path
    process: subprocess.Popen[bytes]
    socket: str

    def keeper(self, code: str, **env: str) -> Process:
        """Start a keeper of a rank that runs this code."""
        script = self.directory / "train.py"
        script.write_text(code)
        words = [sys.executable, "-m", worker.__name__, str(os.getpid()), "60", "", self.socket, "", "--"]
        words += [sys.executable, "-u", str(script), "a", "b c"]
        return Process("keeper", ["env", "-C", str(self.directory), *words], log=self.log, env={"RANK": "3", **env})

    @property
    def log(self) -> Path:
        return self.directory / "log"

    def rank(self) -> int:
        """Return the process id of the rank, once it sleeps."""
        file = self.directory / "pid"
        wait_until(lambda: file.exists() and file.read_text().endswith("\n"), what="the rank runs", timeout_s=AWAITS_S)
        return int(file.read_text())


@contextmanager
def warmed(directory: Path, module: str) -> Iterator[Warm]:
    (directory / "loaded_once.py").write_text(module)
    listening, name = warm.listen()
    with listening, (directory / "warm.log").open("ab") as log:
        file = listening.fileno()
        words = [sys.executable, "-u", "-m", warm.__name__, str(os.getpid()), str(file), "loaded_once"]
        process = subprocess.Popen(words, pass_fds=[file], stdout=log, stderr=log, start_new_session=True)
    try:
        yield Warm(directory, process, name)
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Warm]:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with warmed(tmp_path, "") as made:
        yield made


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_it_runs_as_a_process_that_was_started_and_has_the_modules_already(there: Warm) -> None:
    assert there.keeper(SAYS).wait(AWAITS_S) == 0
    found = json.loads(there.log.read_text().splitlines()[-1])
    script = str(there.directory / "train.py")
    assert (found["argv"], found["file"], found["main"]) == ([script, "a", "b c"], script, "__main__")
    assert (found["cwd"], found["path"]) == (str(there.directory), str(there.directory))
    assert (found["rank"], found["home"], found["loaded"]) == ("3", "HOME" in os.environ, True)
    assert found["parent"] == there.process.pid
    assert found["group"] == found["pid"]
    assert found["child"] == signal.SIG_DFL


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("raise SystemExit(5)", 5, ""),
        ("import os; os.abort()", -6, ""),
        ("import sys; sys.exit('no data')", 1, "no data"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import atexit; atexit.register(print, 'the end')", 0, "the end"),
    ],
)
def test_it_ends_as_a_process_that_was_started_does(code: str, status: int, said: str, there: Warm) -> None:
    assert there.keeper(code).wait(AWAITS_S) == status
    assert said in there.log.read_text()


def test_its_end_is_known_at_once(there: Warm) -> None:
    keeper = there.keeper(SLEEPS)
    rank = there.rank()
    began_s = time.monotonic()
    os.kill(rank, signal.SIGKILL)
    assert keeper.wait(AWAITS_S) == -9
    assert time.monotonic() - began_s < 0.45, "it did not wait to look, which it does each half second"


def test_it_hears_the_signals_that_its_keeper_is_sent(there: Warm) -> None:
    keeper = there.keeper(SLEEPS)
    there.rank()
    os.kill(keeper.pid, signal.SIGTERM)
    assert keeper.wait(AWAITS_S) == -15


def test_it_dies_with_its_keeper_and_others_are_forked_after_it(there: Warm) -> None:
    keeper = there.keeper(SLEEPS)
    rank = there.rank()
    keeper.kill()
    wait_until(lambda: gone(rank), what="the rank is gone", timeout_s=AWAITS_S)
    assert there.keeper("raise SystemExit(5)").wait(AWAITS_S) == 5


def test_it_dies_with_the_warm_process_and_the_next_is_started_cold(there: Warm) -> None:
    keeper = there.keeper(SLEEPS)
    rank = there.rank()
    there.process.kill()
    assert keeper.wait(AWAITS_S) == -9
    wait_until(lambda: gone(rank), what="the rank is gone", timeout_s=AWAITS_S)
    assert there.keeper(SAYS).wait(AWAITS_S) == 0
    log = there.log.read_text()
    assert "this rank starts cold: the warm process does not answer" in log
    assert not json.loads(log.splitlines()[-1])["loaded"]


def test_what_was_read_at_import_can_not_be_changed_by_a_fork(there: Warm) -> None:
    assert there.keeper(SAYS, OMP_NUM_THREADS="7").wait(AWAITS_S) == 0
    log = there.log.read_text()
    assert "this rank starts cold: OMP_NUM_THREADS is '7' for the rank, and was '1' at the import" in log
    assert not json.loads(log.splitlines()[-1])["loaded"]


def test_nothing_is_forked_beside_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    threads = "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    with warmed(tmp_path, threads) as made:
        assert made.keeper(SAYS).wait(AWAITS_S) == 0
        assert "this rank starts cold: 2 threads run once the modules are imported" in made.log.read_text()


def test_a_keeper_that_ends_before_it_orders_takes_nobody_with_it(there: Warm) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{there.socket}")
    assert there.keeper(SAYS).wait(AWAITS_S) == 0
    assert json.loads(there.log.read_text().splitlines()[-1])["parent"] == there.process.pid
    assert "an order for a rank was refused: the order ended early" in (there.directory / "warm.log").read_text()


def test_where_no_fork_can_be_had_a_rank_starts_cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    refuses = "import os\ndef fork(): raise BlockingIOError(11, 'no more processes')\nos.fork = fork"
    with warmed(tmp_path, refuses) as made:
        assert made.keeper("raise SystemExit(5)").wait(AWAITS_S) == 5
        assert "this rank starts cold: the warm process can't fork (no more processes)" in made.log.read_text()
        assert made.process.poll() is None


def test_a_child_that_an_imported_module_started_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    starts = "import os\npid = os.posix_spawnp('true', ['true'], os.environ)\n"
    with warmed(tmp_path, f"{starts}os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)") as made:
        assert made.keeper("raise SystemExit(5)").wait(AWAITS_S) == 5
        assert made.keeper("raise SystemExit(6)").wait(AWAITS_S) == 6
        assert made.process.poll() is None
