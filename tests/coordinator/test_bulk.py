"""A blocking call for many at once: each gets its own answer, and how long it takes says how many threads there are."""

from __future__ import annotations

import asyncio
import threading
import time
from asyncio import Handle
from collections.abc import Sequence
from typing import Any

import pytest

from toprope.coordinator.adapters import bulk
from toprope.coordinator.adapters.bulk import Bulk
from toprope.store.errors import MissingObjectError

AT_ONCE = 16


async def asked(calls: Bulk[int, int], what: Sequence[int]) -> dict[int, int | Exception]:
    """Ask for all of these, some at once, and return what came of each."""
    waiting, found = iter(what), dict[int, int | Exception]()

    async def ask_on() -> None:
        for one in waiting:
            try:
                found[one] = await calls.of(one)
            except MissingObjectError as error:
                found[one] = error

    async with asyncio.timeout(10.0), asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(ask_on())
    return found


def square(what: int) -> int:
    if what % 7 == 3:
        raise MissingObjectError(str(what))
    return what * what


def test_each_gets_its_own_answer_or_its_own_error() -> None:
    found = asyncio.run(asked(Bulk(square), range(200)))
    for what in range(200):
        if what % 7 == 3:
            assert str(found[what]) == str(what)
        else:
            assert found[what] == what * what


def threads_of(wait_s: float, count: int) -> int:
    seen = set()

    def call(what: int) -> int:
        seen.add(threading.get_ident())
        time.sleep(wait_s)
        return what

    asyncio.run(asked(Bulk(call), range(count)))
    return len(seen)


def test_calls_that_wait_long_are_done_by_many_threads() -> None:
    assert threads_of(0.02, 64) > 4


def test_quick_calls_are_answered_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "EACH_S", 1.0)

    async def tellings() -> int:
        loop, told = asyncio.get_running_loop(), 0
        tell = loop.call_soon_threadsafe

        def count(*words: Any, **more: Any) -> Handle:  # noqa: ANN401 - as the loop takes them
            nonlocal told
            told += 1
            return tell(*words, **more)

        monkeypatch.setattr(loop, "call_soon_threadsafe", count)
        await asked(Bulk(lambda what: what), range(400))
        return told

    assert asyncio.run(tellings()) < 200


def test_who_waits_no_more_keeps_no_other_from_an_answer() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def call(what: int) -> int:
        begun.set()
        may_end.wait(5.0)
        return what

    async def some() -> int:
        calls = Bulk(call)
        async with asyncio.timeout(10.0), asyncio.TaskGroup() as tasks:
            left = tasks.create_task(calls.of(1))
            await asyncio.to_thread(begun.wait, 5.0)
            left.cancel()
            other = tasks.create_task(calls.of(2))
            await asyncio.sleep(0)
            may_end.set()
        return await other

    assert asyncio.run(some()) == 2
