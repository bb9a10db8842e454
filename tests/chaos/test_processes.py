"""Killing real processes: the whole tree, and the status of each."""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path

import pytest

from toprope.chaos.live.broker import start_broker
from toprope.chaos.live.processes import (
    LiveError,
    Process,
    become_subreaper,
    descendants,
    free_port,
    kill_tree,
    wait_until,
)

_FAMILY = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print("born", flush=True)
time.sleep(60)
"""


def test_kill_tree_reaps_grandchildren_in_sessions_of_their_own_with_their_status(tmp_path: Path) -> None:
    become_subreaper()
    process = Process("family", [sys.executable, "-c", _FAMILY], log=tmp_path / "family.log")
    wait_until(lambda: "born" in process.log.read_text(), what="a child is born", timeout_s=20, alive=[process])
    (grandchild,) = descendants(process.pid)

    killed = kill_tree(process)

    assert [(one.pid, one.status) for one in killed] == [(process.pid, -9), (grandchild, -9)]
    assert not Path(f"/proc/{grandchild}").exists()


def test_a_process_that_dies_early_is_an_error_that_shows_its_log(tmp_path: Path) -> None:
    process = Process("lame", [sys.executable, "-c", "raise SystemExit('no legs')"], log=tmp_path / "lame.log")

    with pytest.raises(LiveError, match=r"lame ended with status 1 before it walks(?s:.)*no legs"):
        wait_until(lambda: False, what="it walks", timeout_s=20, alive=[process])


def test_stop_ends_a_process_that_ignores_a_request(tmp_path: Path) -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    process = Process("deaf", [sys.executable, "-c", deaf], log=tmp_path / "deaf.log")
    wait_until(lambda: "up" in process.log.read_text(), what="it is up", timeout_s=20, alive=[process])

    assert process.stop(timeout_s=0.2) == -signal.SIGKILL


def test_a_port_is_kept_from_all_but_the_server_that_it_was_picked_for() -> None:
    port = free_port()
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", port))
    for host in ("127.0.0.1", ""):
        with socket.create_server((host, port)):
            pass


def test_the_broker_comes_back_on_its_port(tmp_path: Path) -> None:
    port = free_port()
    first = start_broker(port=port, directory=tmp_path, log=tmp_path / "broker.log")
    assert first.kill().status == -9

    second = start_broker(port=port, directory=tmp_path, log=tmp_path / "broker.log")

    assert second.status() is None
    assert second.stop() in (0, -signal.SIGTERM)
