"""A clock that jumps is off in all that asks what time it is, and monotonic time goes on."""

from __future__ import annotations

import datetime as dt
import time
from datetime import UTC
from datetime import datetime as imported
from pathlib import Path

import pytest

from toprope.chaos.clock import let_clock_jump
from toprope.chaos.killpoints import CLOCK, Armed, KillPoints, arm_all, disarm, fired

DAY_S = 86400.0


def wall() -> float:
    return time.time()  # noqa: TID251 - what is to be off


def test_the_wall_clock_jumps_and_comes_back_wherever_it_was_imported_to() -> None:
    off_s = [0.0]
    monotonic_s, wall_s, real = time.monotonic(), wall(), imported
    undo = let_clock_jump(lambda: off_s[0])
    try:
        assert abs(wall() - wall_s) < 60.0
        off_s[0] = DAY_S
        assert abs(wall() - wall_s - DAY_S) < 60.0
        assert abs(time.time_ns() / 1e9 - wall_s - DAY_S) < 60.0
        assert abs(imported.now(UTC).timestamp() - wall_s - DAY_S) < 60.0
        assert abs(dt.datetime.now(UTC).timestamp() - wall_s - DAY_S) < 60.0
        assert isinstance(real(2026, 1, 1, tzinfo=UTC), imported)
        assert time.monotonic() - monotonic_s < 60.0
    finally:
        undo()
    assert imported is dt.datetime is real
    assert abs(wall() - wall_s) < 60.0


def test_a_process_follows_its_file_and_notes_a_jump_once(tmp_path: Path) -> None:
    file, log = tmp_path / "armed", tmp_path / "log"
    points = KillPoints(log=log, armed=file)
    assert points.clock_off_s() == 0.0
    arm_all(file, [Armed(point=CLOCK, action="clock", seconds=-DAY_S, serial=1)])
    assert [points.clock_off_s(), points.clock_off_s()] == [-DAY_S, -DAY_S]
    disarm(file)
    assert points.clock_off_s() == 0.0
    assert [(one.point, one.action, one.detail) for one in fired(log)] == [("clock", "clock", "off by -86400 s")]


@pytest.mark.parametrize("armed", [None, Path("not there")])
def test_without_a_file_no_clock_is_off(armed: Path | None) -> None:
    assert KillPoints(log=None, armed=armed).clock_off_s() == 0.0
