"""The pytest plugin, in projects of its own: fresh directories, started as a user starts pytest."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from tests.support.browser import BROWSER, new_page
from tests.support.source import ROOT

from toprope.chaos.reports.files import read_verdict

SAMPLE = ROOT / "examples" / "own-trainer"
HEAVY = ("msgspec", "rich", "typer", "torch", "aiohttp", "botocore", "toprope.store", "toprope.chaos.running")
LOOKING = f"""
import sys

def pytest_sessionfinish(session):
    print("LOADED:", [name for name in {HEAVY!r} if name in sys.modules])
"""
JUDGING = """
import pytest
from toprope.chaos.verdict import Injection, Promise, Verdict

@pytest.fixture(scope="session")
def chaos_judge():
    def judge(loaded, seed):
        workload = loaded.scenario.workload
        outcome = "held" if seed == 1 else "broken"
        promise = Promise(
            name="READY once", says="each once", outcome=outcome, evidence=("step 8: twice",), attacked=True
        )
        fault = Injection(fault="kill", target="rank 1", trigger="after step 3", fired=seed < 3, witness="status -9")
        about = f"{workload.script} {workload.arguments} {workload.steps} {workload.step_s}"
        return Verdict(
            scenario=loaded.scenario.name, about=about, seed=seed, steps=4, world=2, seconds=1.0,
            promises=(promise,), injections=(fault,), figures={"detected_after_s": 0.25},
        )
    return judge
"""
TESTS = """
from pathlib import Path

import pytest

HERE = Path(__file__).parent

def test_good(chaos):
    verdict = chaos.run("kill-node", script="../train.py", arguments=("--steps", "{steps}"), steps=44, step_s=0.5)
    assert verdict.about == f"{HERE / '../train.py'} ('--steps', '{{steps}}') 44 0.5"

def test_own_file(chaos):
    assert chaos.run("mine.toml").scenario == "mine"

@pytest.mark.parametrize("seed", [2, 3])
def test_bad(chaos, seed):
    chaos.run("kill-node", seed=seed)

def test_unknown(chaos):
    chaos.run("kill-the-moon")

def test_too_few_steps(chaos):
    chaos.run("kill-node", steps=3)
"""
MINE = """
name = "mine"
label = "chaos"
about = "x"
attacks = ["recovers"]
[[fault]]
do = "kill"
target = "rank 1"
at_step = 3
"""
REAL = """
def test_not_allowed(chaos):
    chaos.run("kill-node")
"""


def in_project(project: Path, *words: str, env: dict[str, str] | None = None, timeout_s: float = 100) -> str:
    """Run pytest in a project as a user does, and return what it printed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "CKPT", "COV"))}
    command = [sys.executable, "-m", "pytest", "-W", "ignore", "-p", "no:cacheprovider", *words]
    done = subprocess.run(
        command,
        cwd=project,
        env={**clean, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    return done.stdout + done.stderr


def test_the_plugin_is_installed_with_toprope() -> None:
    found = [one.value for one in entry_points(group="pytest11") if one.name == "toprope-chaos"]
    assert found == ["toprope.chaos.pytest_plugin"], "make setup installs it anew"


@pytest.mark.slow
def test_who_only_has_it_installed_notices_nothing(tmp_path: Path) -> None:
    shutil.copytree(SAMPLE, tmp_path / "own")
    (tmp_path / "own" / "conftest.py").write_text(LOOKING)
    others = [one.name for one in entry_points(group="pytest11") if one.name != "toprope-chaos"]
    blocked = [word for name in others for word in ("-p", f"no:{name}")]  # they take seconds to load
    told = in_project(tmp_path / "own", *blocked, "-rs", "-q", "-s")
    assert "2 skipped" in told
    assert "run pytest --chaos, with CKPT_CHAOS=chaos in the environment" in told
    assert "LOADED: []" in told


@pytest.mark.slow
def test_a_verdict_passes_or_fails_a_test_readably_and_leaves_its_reports(tmp_path: Path) -> None:
    for name, text in (
        ("train.py", ""),
        ("judged/conftest.py", JUDGING),
        ("judged/test_it.py", TESTS),
        ("judged/mine.toml", MINE),
        ("real/test_real.py", REAL),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # others take seconds to load
    words = (
        "-p",
        "toprope.chaos.pytest_plugin",
        "--chaos",
        "--chaos-reports",
        "out",
        "--junitxml",
        "out/all.xml",
        "-q",
    )
    told = in_project(tmp_path, *words, env=alone)
    suite = ET.parse(tmp_path / "out" / "all.xml").getroot()
    failed = {
        case.get("name"): one.get("message", "") for case in suite.iter("testcase") for one in case.iter("failure")
    }
    assert set(failed) == {"test_bad[2]", "test_bad[3]", "test_unknown", "test_too_few_steps", "test_not_allowed"}, told
    bad = failed["test_bad[3]"]
    for line in (
        "kill-node, seed 3: broken: READY once; 1 of 1 planned faults did not happen",
        "broken: READY once: each once",
        "step 8: twice",
        "did not fire: kill: rank 1, after step 3: status -9",
        f"the whole story: {tmp_path / 'out' / 'test_bad-3-kill-node-seed3.html'}",
    ):
        assert line in bad
    assert "Traceback" not in told
    assert "kill-the-moon" in failed["test_unknown"]
    assert "is not within the 3 steps" in failed["test_too_few_steps"]
    assert "CKPT_CHAOS=chaos in the environment" in failed["test_not_allowed"]
    for test in ("test_good-kill-node-seed1", "test_own_file-mine-seed1", "test_bad-2-kill-node-seed2"):
        assert {path.suffix for path in (tmp_path / "out").glob(f"{test}.*")} == {".html", ".json", ".xml"}
    assert read_verdict(tmp_path / "out" / "test_good-kill-node-seed1.json").good
    properties = {(one.get("name"), one.get("value")) for one in suite.iter("property")}
    assert ("kill-node detected_after_s", "0.25") in properties


@pytest.mark.slow
def test_the_workflow_to_copy_is_one_and_keeps_what_the_plugin_writes() -> None:
    workflow = SAMPLE / ".github" / "workflows" / "chaos.yml"
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    done = subprocess.run([*command, str(workflow)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    text = workflow.read_text()
    for line in (
        "CKPT_CHAOS: chaos",
        "run: pytest --chaos --chaos-reports chaos-reports --junitxml chaos-reports/pytest.xml",
        "path: chaos-reports/",
    ):
        assert text.count(line) == 1


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_sample_project_breaks_its_own_trainer_and_it_survives(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    shutil.copytree(SAMPLE, tmp_path / "own")
    words = ("--chaos", "--chaos-reports", "out", "--junitxml", "out/all.xml")
    told = in_project(tmp_path / "own", *words, env={"CKPT_CHAOS": "chaos"}, timeout_s=800)
    assert "2 passed" in told, told
    reports = sorted((tmp_path / "own" / "out").glob("*.json"))
    assert len(reports) == 2
    for report in reports:
        verdict = read_verdict(report)
        record_property(verdict.scenario, f"{verdict.seconds:.0f} s; {verdict.figures}")
        assert verdict.good
        assert {span.kind for span in verdict.timeline} >= {"training", "snapshot", "restore"}
        if BROWSER:
            asyncio.run(look_at(report.with_suffix(".html")))


async def look_at(report: Path) -> None:
    """Nothing in the page is wider than the window, and nothing complains."""
    async with new_page() as browser:
        for width in (390, 1440):
            seen = await browser.look(report, width=width, dark=False)
            (report.with_name(f"{report.stem}-{width}.png")).write_bytes(seen.picture)
            assert (seen.scroll_width <= width, seen.wider, seen.complaints) == (True, [], [])
