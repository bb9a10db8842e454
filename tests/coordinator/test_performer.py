"""What the coordinator's shell does when the core can't go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import msgspec
import pytest
from tests.coordinator.test_extracts import WHOLE
from tests.support.reigns import FakeNode

from toprope.coordinator.effects import Effect
from toprope.coordinator.events import Connected, Event, Heard, Ticked
from toprope.coordinator.extracts import Extracts
from toprope.coordinator.metrics import Metrics
from toprope.coordinator.performer import Coordinator
from toprope.coordinator.wire import Desired


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


class NotedBroker:
    """A broker that notes what is published."""

    def __init__(self) -> None:
        self.published: asyncio.Queue[Extracts] = asyncio.Queue()

    async def publish(self, newest: Callable[[], Extracts]) -> None:
        self.published.put_nowait(newest())


def test_a_document_is_cut_once_for_all_who_are_told_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cut: list[Desired] = []

    def noted(whole: Desired) -> Extracts:
        cut.append(whole)
        return Extracts(whole)

    monkeypatch.setattr("toprope.coordinator.performer.Extracts", noted)

    async def serve() -> None:
        config: Any = None
        core: Any = SimpleNamespace(desired=WHOLE)
        broker: Any = NotedBroker()
        coordinator = Coordinator(config, metrics=Metrics())
        assert coordinator.desired(node="a") is None
        coordinator.core, coordinator._broker = core, broker
        async with asyncio.timeout(5.0), asyncio.TaskGroup() as tasks:
            publishing = tasks.create_task(coordinator._publish())
            for whole in (WHOLE, msgspec.structs.replace(WHOLE, version=8)):
                core.desired = whole
                told = coordinator.desired(node="a")
                coordinator._news.set()
                published = await broker.published.get()
                assert published.of("a") == told
                assert coordinator.desired() is published.whole is whole
            publishing.cancel()
        assert [one.version for one in cut] == [7, 8]

    asyncio.run(serve())


class NotedCore:
    """A core that notes how it is told of what, and decides nothing."""

    def __init__(self) -> None:
        self.taken: list[Event] = []
        self.handled: list[Event] = []
        self.decided = asyncio.Event()

    def take(self, event: Event) -> list[Effect]:
        self.taken.append(event)
        return []

    def handle(self, event: Event) -> tuple[Effect, ...]:
        self.handled.append(event)
        self.decided.set()
        return ()


def test_while_decisions_take_long_what_nodes_say_is_decided_on_together_and_all_else_at_once() -> None:
    async def serve() -> None:
        async with asyncio.timeout(5.0), asyncio.TaskGroup() as tasks:
            noted = NotedCore()
            config: Any = None
            core: Any = noted
            coordinator = Coordinator(config, metrics=Metrics())
            coordinator.core, coordinator._tasks = core, tasks
            coordinator.heard(FakeNode(name="a", job_uid="0b" * 16).say())
            assert [type(event) for event in noted.handled] == [Heard]
            now_s = asyncio.get_running_loop().time()
            coordinator._pacing.took(now_s, now_s + 0.01)
            for name in "bcd":
                coordinator.heard(FakeNode(name=name, job_uid="0b" * 16).say())
            assert len(noted.handled) == 1
            assert [type(event) for event in noted.taken] == [Heard] * 3
            coordinator.connected()
            assert [type(event) for event in noted.handled] == [Heard, Connected]
            noted.decided.clear()
            await noted.decided.wait()
            assert [type(event) for event in noted.handled] == [Heard, Connected, Ticked]

    asyncio.run(serve())
