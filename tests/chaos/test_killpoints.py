"""The wrapper passes a point before and after each call, and changes nothing else."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import threading
from pathlib import Path

import pytest

from toprope.chaos.killpoints import Armed, KillPoints, arm, arm_all, disarm, fired, passed
from toprope.sidecar.ports import SyncError
from toprope.store.errors import ThrottledError, UnavailableError


class Port:
    limit = 7

    def add(self, left: int, *, right: int) -> int:
        return left + right

    async def ask(self, question: str) -> str:
        await asyncio.sleep(0)
        return question.upper()

    def fail(self) -> None:
        raise KeyError("lost")

    def keep(self, name: str, body: bytes | memoryview) -> bytes:
        self.kept = name, bytes(body)
        return bytes(body)

    def fill(self, into: memoryview) -> None:
        into[:] = b"filled"


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


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "armed"


@pytest.fixture
def port(file: Path, tmp_path: Path) -> Port:
    return KillPoints(log=tmp_path / "points", armed=file).wrap("store", Port())


@pytest.mark.parametrize(
    ("action", "kind", "number"),
    [("ENOSPC", OSError, errno.ENOSPC), ("EIO", OSError, errno.EIO), ("fsync", SyncError, errno.EIO)],
)
def test_a_call_can_be_made_to_fail_as_a_disk_does(
    action: str, kind: type[OSError], number: int, file: Path, port: Port
) -> None:
    arm_all(file, [Armed(point="before:store.add", action=action)])  # type: ignore[arg-type]
    with pytest.raises(kind) as failed:
        port.add(1, right=2)
    assert failed.value.errno == number
    assert port.add(1, right=2) == 3, "it was to fail once"


def test_a_call_whose_reply_is_lost_has_been_done(file: Path, port: Port) -> None:
    arm_all(file, [Armed(point="after:store.keep", action="unavailable", times=0)])
    with pytest.raises(UnavailableError):
        port.keep("a", b"body")
    assert port.kept == ("a", b"body")
    with pytest.raises(UnavailableError):
        port.keep("b", b"body")
    disarm(file)
    assert port.keep("c", b"body") == b"body"


def test_an_async_call_fails_too(file: Path, port: Port) -> None:
    arm_all(file, [Armed(point="before:store.ask", action="throttled")])
    with pytest.raises(ThrottledError):
        asyncio.run(port.ask("why"))


def test_one_bit_of_what_is_written_read_or_filled_is_flipped(file: Path, port: Port) -> None:
    arm_all(file, [Armed(point="before:store.keep", action="flip")])
    given = memoryview(b"abcd")
    assert port.keep("a", given) == b"abbd"
    assert bytes(given) == b"abcd", "the caller's bytes are left alone"
    arm_all(file, [Armed(point="after:store.keep", action="flip")])
    assert (port.keep("a", b"abcd"), port.kept[1]) == (b"abbd", b"abcd")
    room = bytearray(6)
    arm_all(file, [Armed(point="after:store.fill", action="flip")])
    port.fill(memoryview(room))
    assert room == b"filmed"


def test_what_is_written_is_torn_in_the_middle(file: Path, port: Port) -> None:
    arm_all(file, [Armed(point="before:store.keep", action="tear")])
    assert port.keep("a", b"abcd") == b"ab"


def test_only_calls_with_a_word_in_what_they_are_given_count(file: Path, port: Port) -> None:
    arm_all(file, [Armed(point="before:store.keep", action="EIO", match="s0040", occurrence=2)])
    port.keep("s0040", b"x")
    port.keep("s0041", b"x")
    with pytest.raises(OSError, match="before:store"):
        port.keep("s0040", b"x")


def test_a_held_call_goes_on_when_it_is_let_go_and_is_noted_meanwhile(file: Path, port: Port, tmp_path: Path) -> None:
    arm_all(file, [Armed(point="before:store.keep", action="hold")])
    thread = threading.Thread(target=port.keep, args=("shards/s0040", b"x"))
    thread.start()
    while not fired(tmp_path / "points"):
        assert thread.is_alive()
    (seen,) = fired(tmp_path / "points")
    assert (seen.point, seen.action, seen.detail) == ("before:store.keep", "hold", "shards/s0040")
    assert not hasattr(port, "kept")
    disarm(file)
    thread.join(10)
    assert port.kept == ("shards/s0040", b"x")
    assert [point for _, point in passed(tmp_path / "points")] == ["before:store.keep", "after:store.keep"]


def test_the_same_thing_can_be_armed_anew(file: Path, port: Port) -> None:
    for serial in (1, 2):
        arm_all(file, [Armed(point="before:store.add", action="EIO", serial=serial)])
        with pytest.raises(OSError, match="before:store"):
            port.add(1, right=1)
