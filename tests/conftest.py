"""What all tests share: no blocking call in a coroutine of ours, reproducible random inputs, memory directories."""

from __future__ import annotations

import inspect
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from blockbuster import blockbuster_ctx
from hypothesis import HealthCheck, settings

from toprope.chaos.live.scratch import Scratch

settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("search", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure() -> None:
    """Let SIGTERM end the tests as Ctrl-C does, so that what they have started and made is cleaned up."""

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
        pytest.exit("told to end by SIGTERM", returncode=128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)


@pytest.fixture(autouse=True)
def _no_blocking_call_in_a_coroutine(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail an async test in which code of ours blocks the event loop by sleeping, by a socket or by a file."""
    function = getattr(request.node, "function", None)
    if not inspect.iscoroutinefunction(function):
        yield
        return
    with blockbuster_ctx(scanned_modules=["toprope"]):
        yield


@pytest.fixture
def memory_dir() -> Iterator[Path]:
    """An empty directory in shared memory, removed afterwards; on a machine without /dev/shm an ordinary one."""
    with Scratch() as scratch:
        yield scratch.path
