"""Sidecars as real processes, before a coordinator that a test holds in its hand."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from tests.support.coordinator_stub import CoordinatorStub

PATIENCE_S = 30.0


class Node:
    """One node: its directories, and its sidecar while that lives."""

    def __init__(self, name: str, base: Path, memory: Path, stub: CoordinatorStub) -> None:
        self.name, self.stub = name, stub
        self.memory, self.local, self.store = memory / name, base / name / "local", base / "store"
        self.socket, self.ready, self.log = memory / f"{name}.sock", base / f"{name}.ready", base / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def arguments(self) -> list[str]:
        return [
            *("--job", "job", "--node", self.name, "--coordinator", self.stub.url, "--memory-dir", str(self.memory)),
            *("--local-dir", str(self.local), "--store", str(self.store), "--socket", str(self.socket)),
            *("--ready-file", str(self.ready)),
        ]

    def start(self, *more: str) -> None:
        """Start the sidecar and wait until it serves."""
        self.ready.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([*ckpt_sidecar(), *self.arguments(), *more], stdout=log, stderr=log)
        wait_for_file(self.ready, self.process, self.log)
        self.url = json.loads(self.ready.read_text())["url"]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End the sidecar and return its exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        status = self.process.wait(PATIENCE_S)
        self.process = None
        self.stub.inventories.pop(self.name, None)
        return status

    def kill(self) -> None:
        """Kill the sidecar."""
        assert self.stop(signal.SIGKILL) == -signal.SIGKILL


def ckpt_sidecar() -> list[str]:
    return [sys.executable, "-m", "toprope", "sidecar"]


def wait_for_file(path: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / 0.02)):
        if path.exists():
            return
        assert process.poll() is None, f"the sidecar ended with {process.returncode}: {log.read_text()}"
        pause.wait(0.02)
    pytest.fail(f"the sidecar does not serve: {log.read_text()}")


MakeNode: TypeAlias = Callable[..., Node]
