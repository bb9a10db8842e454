"""What all tests share: no blocking call in a coroutine of ours, reproducible random inputs, memory directories."""

from __future__ import annotations

import inspect
import os
import queue
import signal
import threading
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


@pytest.hookimpl(trylast=True)  # after they have been shuffled
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Take the rooms with the longest tests first: at the end no process is left alone with one of them."""
    rooms = [f"{os.sep}{name}{os.sep}" for name in ("simulation", "integration")]
    items.sort(key=lambda item: not any(room in str(item.path) for room in rooms))


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


@pytest.fixture
def thread_errors(monkeypatch: pytest.MonkeyPatch) -> queue.SimpleQueue[type[BaseException]]:
    """The errors that threads end with, as they are told of: often later than what the thread did can be seen."""
    errors: queue.SimpleQueue[type[BaseException]] = queue.SimpleQueue()
    monkeypatch.setattr(threading, "excepthook", lambda args: errors.put(args.exc_type))
    return errors
