"""The wrapper passes a point before and after each call, and changes nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from toprope.chaos.killpoints import KillPoints, arm, disarm, passed


class Port:
    limit = 7

    def add(self, left: int, *, right: int) -> int:
        return left + right

    async def ask(self, question: str) -> str:
        await asyncio.sleep(0)
        return question.upper()

    def fail(self) -> None:
        raise KeyError("lost")


def test_plain_and_async_methods_pass_a_point_before_and_after(tmp_path: Path) -> None:
    log = tmp_path / "points"
    port = KillPoints(log=log, armed=None).wrap("store", Port())

    assert port.add(1, right=2) == 3
    assert asyncio.run(port.ask("why")) == "WHY"
    assert port.limit == 7

    names = [point for _, point in passed(log)]
    assert names == ["before:store.add", "after:store.add", "before:store.ask", "after:store.ask"]


def test_a_call_that_raises_has_no_point_after(tmp_path: Path) -> None:
    log = tmp_path / "points"
    port = KillPoints(log=log, armed=None).wrap("store", Port())

    with pytest.raises(KeyError, match="lost"):
        port.fail()

    assert [point for _, point in passed(log)] == ["before:store.fail"]


def test_an_armed_point_kills_the_process_there_and_nowhere_else(tmp_path: Path) -> None:
    log, file = tmp_path / "points", tmp_path / "kill"
    arm(file, "after:store.add")
    pid = os.fork()
    if pid == 0:
        port = KillPoints(log=log, armed=file).wrap("store", Port())
        port.add(1, right=2)
        os._exit(0)

    _, status = os.waitpid(pid, 0)

    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert [point for _, point in passed(log)] == ["before:store.add", "after:store.add"]


def test_a_point_can_be_armed_for_the_third_time_that_it_is_passed(tmp_path: Path) -> None:
    log, file = tmp_path / "points", tmp_path / "kill"
    pid = os.fork()
    if pid == 0:
        port = KillPoints(log=log, armed=file).wrap("store", Port())
        port.add(1, right=2)
        arm(file, "before:store.add", 3)
        for _ in range(9):
            port.add(1, right=2)
        os._exit(0)

    _, status = os.waitpid(pid, 0)

    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert [point for _, point in passed(log)].count("before:store.add") == 4


def test_a_disarmed_process_lives(tmp_path: Path) -> None:
    file = tmp_path / "kill"
    arm(file, "before:store.add")
    disarm(file)

    assert KillPoints(log=None, armed=file).wrap("store", Port()).add(1, right=2) == 3
