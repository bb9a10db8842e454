"""Sidecars as real processes, before a coordinator that a test holds in its hand."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from tests.support.coordinator_stub import CoordinatorStub

from toprope.chaos.live.cluster import Launch
from toprope.chaos.live.processes import Running
from toprope.coordinator.wire import MAX_INVENTORY_BYTES, Inventory, decode

PATIENCE_S = 30.0


class Node:
    """One node: its directories, and its sidecar while that lives."""

    def __init__(self, name: str, base: Path, memory: Path, stub: CoordinatorStub, launch: Launch) -> None:
        self.name, self.stub, self.launch = name, stub, launch
        self.memory, self.local, self.store = memory / name, base / name / "local", base / "store"
        self.socket, self.ready, self.log = memory / f"{name}.sock", base / f"{name}.ready", base / f"{name}.log"
        self.process: Running | None = None
        self.url = ""

    def arguments(self) -> list[str]:
        return [
            *("--job", "job", "--node", self.name, "--coordinator", self.stub.url, "--memory-dir", str(self.memory)),
            *("--local-dir", str(self.local), "--store", str(self.store), "--socket", str(self.socket)),
            *("--ready-file", str(self.ready), "--grace", "0"),
        ]

    def start(self, *more: str) -> None:
        """Start the sidecar and wait until it serves."""
        self.begin(*more)
        for _ in range(int(PATIENCE_S / 0.01)):
            if self.ready.exists():
                self.url = json.loads(self.ready.read_text())["url"]
                return
            assert self.process is not None
            assert self.process.status() is None, f"the sidecar has ended: {self.log.read_text()}"
            self.pause()
        pytest.fail(f"the sidecar does not serve: {self.log.read_text()}")

    def pause(self) -> None:
        """Let a little time pass between two looks at a process."""
        threading.Event().wait(0.01)

    def begin(self, *more: str) -> None:
        """Start the sidecar."""
        self.ready.unlink(missing_ok=True)
        words = ["sidecar", *self.arguments(), *more]
        self.process = self.launch(self.name, words, log=self.log, env={})

    def stop(self) -> int:
        """Ask the sidecar to end, and return its exit status."""
        assert self.process is not None
        status = self.process.stop()
        self._ended()
        return status

    def terminate(self) -> None:
        """Ask the sidecar to end, and go on."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGTERM)

    def ended(self) -> int:
        """Wait until the sidecar has ended, and return its exit status."""
        assert self.process is not None
        while (status := self.process.status()) is None:
            self.pause()
        self._ended()
        return status

    def kill(self) -> None:
        """Kill the sidecar."""
        assert self.process is not None
        assert self.process.kill().status == -9
        self._ended()

    def _ended(self) -> None:
        self.process = None
        self.stub.inventories.pop(self.name, None)

    def wait_copy(self, tier: str, step: int) -> None:
        """Wait until this sidecar itself says that it holds a copy."""
        after = 0
        while True:
            with urllib.request.urlopen(f"{self.url}/v1/inventory?after={after}&wait_s=10", timeout=20) as response:
                inventory = decode(response.read(), Inventory, limit=MAX_INVENTORY_BYTES)
            if any((copy.tier, copy.step) == (tier, step) for copy in inventory.copies):
                return
            assert inventory.version != after, f"no {tier} copy of step {step} in {inventory}"
            after = inventory.version


MakeNode: TypeAlias = Callable[..., Node]
