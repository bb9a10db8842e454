"""What the coordinator's shell does when the core can't go on."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import pytest
from tests.support.reigns import FakeNode

from toprope.coordinator.events import Ticked
from toprope.coordinator.metrics import Metrics
from toprope.coordinator.performer import Coordinator


class BrokenCore:
    """A core with a bug."""

    def handle(self, _event: object) -> NoReturn:
        """Fail."""
        raise KeyError("bug")


def test_a_core_that_fails_ends_the_process_whoever_told_it() -> None:
    async def serve() -> None:
        async with asyncio.timeout(5.0), asyncio.TaskGroup() as tasks:
            config: Any = None
            core: Any = BrokenCore()
            coordinator = Coordinator(config, metrics=Metrics())
            coordinator.core, coordinator._tasks = core, tasks
            with pytest.raises(KeyError):
                coordinator.heard(FakeNode(name="a", job_uid="0b" * 16).say())  # as a request's task would
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(serve())
    assert raised.group_contains(KeyError)


def test_a_reign_that_is_over_takes_in_nothing() -> None:
    config: Any = None
    core: Any = BrokenCore()
    coordinator = Coordinator(config, metrics=Metrics())
    coordinator.core, coordinator._over = core, True
    coordinator._post(Ticked(now_s=0.0))
