"""The loop in virtual time: what asyncio promises holds, and what dies is dead."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from toprope.chaos.sim.loop import Process, SimLoop, StalledError


@pytest.fixture
def loop() -> Iterator[SimLoop]:
    made = SimLoop(random.Random(1))
    asyncio.set_event_loop(made)
    yield made
    made.drain()
    made.close()
    asyncio.set_event_loop(None)


def test_time_is_virtual(loop: SimLoop) -> None:
    loop.run_until_complete(asyncio.sleep(3600.0))
    assert loop.time() == 3600.0


def test_a_world_in_which_nothing_can_happen_is_an_error(loop: SimLoop) -> None:
    with pytest.raises(StalledError):
        loop.run_until_complete(asyncio.Event().wait())


def test_a_killed_process_does_nothing_more_not_even_its_finally(loop: SimLoop) -> None:
    said: list[str] = []
    process = Process(loop, "p")

    async def work() -> None:
        try:
            await asyncio.sleep(1.0)
            said.append("went on")
        finally:
            said.append("finally")

    process.start(work())
    loop.call_later(0.5, process.kill)
    loop.run_until_complete(asyncio.sleep(5.0))
    assert said == []


def test_a_paused_process_goes_on_where_it_was(loop: SimLoop) -> None:
    said: list[float] = []
    process = Process(loop, "p")

    async def work() -> None:
        await asyncio.sleep(1.0)
        said.append(loop.time())

    process.start(work())
    loop.call_later(0.5, process.pause)
    loop.call_later(4.0, process.resume)
    loop.run_until_complete(asyncio.sleep(5.0))
    assert said == [4.0]


def test_work_for_threads_takes_virtual_time_and_gives_its_result(loop: SimLoop) -> None:
    assert loop.run_until_complete(asyncio.to_thread(lambda: 7)) == 7
    assert 0.0 < loop.time() < 1.0


def test_an_error_that_no_code_catches_stops_the_run(loop: SimLoop) -> None:
    async def work() -> None:
        raise ValueError("broken")

    Process(loop, "p").start(work())
    loop.run_forever()
    assert [str(error) for error in loop.crashes] == ["broken"]


def test_callbacks_of_one_process_keep_their_order(loop: SimLoop) -> None:
    said: list[int] = []
    one, other = Process(loop, "one"), Process(loop, "other")
    for number in range(20):
        loop.call_soon(said.append, number, context=one.context)
        loop.call_soon(said.append, 100 + number, context=other.context)
    loop.run_until_complete(asyncio.sleep(1.0))
    assert [number for number in said if number < 100] == list(range(20))
    assert said != sorted(said, key=lambda number: (number % 100, number))
