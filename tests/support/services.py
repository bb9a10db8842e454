"""Real services for tests: what ``toprope.chaos.live`` starts for the demo, with the cadence and patience of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from toprope.chaos.live.broker import start_broker
from toprope.chaos.live.cluster import Cadences, Cluster, running_cluster
from toprope.chaos.live.processes import Process, free_port, wait_ready, wait_until

__all__ = ["Cadences", "Cluster", "Process", "broker", "free_port", "running_cluster", "wait_ready", "wait_until"]


@contextmanager
def broker(directory: Path) -> Iterator[int]:
    """Yield the port of a broker that runs."""
    port = free_port()
    process = start_broker(port=port, directory=directory, log=directory / "broker.log")
    try:
        yield port
    finally:
        process.stop()
