"""``make test-long`` records what came of each check, and a check's cases stay together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.source import load_program

runner = load_program("scripts/test_long.py")

REPORT = """<testsuites><testsuite>
<testcase name="one"><properties><property name="kills" value="20"/></properties></testcase>
<testcase name="two"><failure message="no"/></testcase>
<testcase name="three"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


def test_what_pytest_reports_is_counted_and_what_tests_measured_is_kept(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)

    assert runner.told_by(tmp_path / "report.xml") == ((1, 3), {"kills": "20"})
    assert runner.told_by(tmp_path / "missing.xml") == ((0, 0), {})


def test_the_page_has_a_row_for_each_result_and_what_was_measured() -> None:
    common = {"source": "5eed", "commit": "abc", "seconds": 1.5}
    results = [
        runner.Result(name="demo", status=0, **common),
        runner.Result(name="t.py::test_x", status=1, cases=(9, 10), facts={"kills": "20"}, **common),
    ]

    page = runner.page(results, missing=["slow"])

    assert "1 of 3 passed" in page
    assert "| `t.py::test_x` | **failed** (1) | 9 of 10 | 1.5 | abc |" in page
    assert "| `slow` | not run | | | |" in page
    assert "- kills: 20" in page


def test_a_check_is_recorded_whatever_comes_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "STATE", tmp_path)
    done = runner.run(runner.Check(name="quick", command=(sys.executable, "-c", "raise SystemExit(3)")), source="5eed")

    assert done.status == 3
    assert [(one.name, one.source, one.status) for one in runner.recorded()] == [("quick", "5eed", 3)]


def test_what_a_test_measures_comes_through_pytest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_it.py").write_text("def test_it(record_property):\n    record_property('kills', 20)\n")
    monkeypatch.setattr(runner, "STATE", tmp_path)
    command = (sys.executable, "-m", "pytest", "-q", str(tmp_path / "test_it.py"))

    done = runner.run(runner.Check(name="measured", command=command), source="5eed")

    assert (done.status, done.cases, done.facts) == (0, (1, 1), {"kills": "20"})


def test_a_check_is_run_again_when_the_product_changes_and_not_when_another_test_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sidecar/core.py", "tests/support/job.py", "tests/test_a.py", "tests/test_b.py", "docs/page.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    check = runner.Check(name="tests/test_a.py::test_x", command=())

    def changes_it(name: str) -> bool:
        before = runner.source_digest(check)
        (tmp_path / name).write_text("2")
        return bool(runner.source_digest(check) != before)

    assert [changes_it(name) for name in ("sidecar/core.py", "tests/support/job.py", "tests/test_a.py")] == [True] * 3
    assert [changes_it(name) for name in ("tests/test_b.py", "docs/page.md")] == [False] * 2


def test_a_commit_is_dirty_for_what_was_changed_and_not_for_the_page_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    for name in ("docs/long.md", "code.py"):
        (tmp_path / name).write_text("1")
    who = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    for words in (("init", "-q"), ("add", "."), (*who, "commit", "-qm", "x")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)

    def found_after(name: str) -> bool:
        (tmp_path / name).write_text("2")
        return bool(runner.source_commit(tmp_path / "docs" / "long.md").endswith("-dirty"))

    assert [found_after(name) for name in ("docs/long.md", "code.py")] == [False, True]


def test_checks_are_asked_for_by_words_of_their_names() -> None:
    names = ("demo", "t.py::test_x", "t.py::test_y")
    asked = [n for n in names if runner.is_asked(runner.Check(name=n, command=()), ["test_y", "demo"])]
    assert asked == ["demo", "t.py::test_y"]
    assert all(runner.is_asked(runner.Check(name=n, command=()), [""]) for n in names)
