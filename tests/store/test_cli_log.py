"""The job log on the command line: in the words of show, followed as it grows, and damage."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.support.stores import JobBuilder, small_store

from toprope.__main__ import main
from toprope.store.cli import log
from toprope.store.log.records import Taint
from toprope.store.objects.directory import DirectoryStore
from toprope.store.objects.opening import open_store


def test_log_prints_what_show_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_store(DirectoryStore(tmp_path), steps=(10, 20), name="gpt")
    assert main(["log", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "RECORD  TERM  KIND     WHAT"
    assert lines[4] == "     3     1  ATTEMPT  attempt 1, 2 ranks, a fresh start (because a test says so)"
    assert lines[6] == "     5     1  READY    step 20 of attempt 1, 1,134 bytes"
    assert len(lines) == 7
    assert main(["show", str(tmp_path)]) == 0
    assert out in capsys.readouterr().out


def test_each_record_is_a_json_object_on_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_store(DirectoryStore(tmp_path), steps=(10,), name="gpt")
    assert main(["log", str(tmp_path), "--job", "gpt", "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(record["number"], record["kind"]) for record in records] == [
        (0, "JOB"), (1, "ELECTED"), (2, "JOB"), (3, "ATTEMPT"), (4, "READY"),
    ]  # fmt: skip
    assert records[4]["step"] == 10


@pytest.mark.parametrize("kind", ["directory", "bucket"])
def test_follow_goes_on_with_records_as_they_come(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    root = request.getfixturevalue("strict").root("team") if kind == "bucket" else str(tmp_path)
    builder = small_store(open_store(root, write=True), steps=(10,))
    steps = [20, 30]

    def sleep(_: float) -> None:
        if not steps:
            raise KeyboardInterrupt
        builder.checkpoint(steps.pop(0))

    monkeypatch.setattr(log, "time", SimpleNamespace(sleep=sleep))  # other threads sleep as ever
    assert main(["log", root, "--job", "job", "--follow"]) == 130
    out, err = capsys.readouterr()
    assert err == "ckpt: interrupted\n"
    lines = out.splitlines()
    assert [line.split()[0] for line in lines] == ["RECORD", "0", "1", "2", "3", "4", "5", "6"]
    assert lines[-1].endswith("step 30 of attempt 1, 1,134 bytes")


def test_what_stands_before_a_damaged_record_is_shown_and_the_status_is_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    JobBuilder(DirectoryStore(tmp_path)).begin().checkpoint(10)
    path = sorted((tmp_path / "job" / "log").iterdir())[3]
    path.write_bytes(path.read_bytes().replace(b'"from_step":0', b'"from_step":1'))
    assert main(["log", str(tmp_path), "--job", "job"]) == 2
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == ["RECORD", "0", "1", "2"]
    assert err.startswith("ckpt: LOG_CORRUPT record 3")
    assert err.count("\n") == 1


def test_a_reason_of_several_lines_stays_on_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    builder = JobBuilder(DirectoryStore(tmp_path)).begin()
    builder.log.add(Taint(attempt=1, from_step=5, to_step=None, reason="NaN\n     9     1  READY\x1b[2J step"))
    assert main(["log", str(tmp_path)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "     4     1  TAINT    attempt 1 from step 5 on: NaN 9 1 READY [2J step"
