"""A fork server tells of each child whether it lives, whatever became of others that had its process id."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from toprope.chaos.live.forking import ForkServer


def test_a_child_is_not_taken_for_one_that_had_its_process_id_before(tmp_path: Path) -> None:
    with ForkServer("signal") as server:
        server.ended.update(dict.fromkeys(range(1, 1 << 22), 0))  # as if each had been somebody's who has ended
        waits_for: Any = [int(signal.SIGUSR1)]
        pid = server.fork("signal:sigwait", waits_for, env={}, log=tmp_path / "log")
        assert pid not in server.poll()
        assert server.kill(pid) == -signal.SIGKILL
