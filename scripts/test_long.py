"""``make test-long``: runs each long check in a process of its own, goes on where it stopped, records the results.

A check is one test function with all its cases that are marked ``long``, or a program. One that has passed on the same
source isn't run again; ``-k 'WORD or WORD'`` runs only those whose name has one of the words in it. State is in
``.test-long/``; the page that people read is ``docs/results/long.md``, with what the tests measured
(``record_property``).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STATE = ROOT / ".test-long"
PAGE = ROOT / "docs" / "results" / "long.md"
TIMEOUT_S = 3600.0
SEEDS, SEEDS_IN_ALL = 1000, 50_000
"""Histories of the simulator: so many in one check, and in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A command that passes with exit status 0."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a check on one state of the source. ``cases`` counts those that passed and all."""

    name: str
    source: str
    commit: str
    status: int
    seconds: float
    cases: tuple[int, int] = (0, 0)
    facts: dict[str, str] = field(default_factory=dict)


def checks() -> list[Check]:
    """Return the long checks: the demo, the benchmark, the simulator's seeds, each test that is marked ``long``."""
    python = sys.executable
    simulator = (python, "-m", "toprope", "chaos", "sim", "--seeds")
    fixed = [
        Check(name="demo", command=(python, "-m", "toprope", "demo")),
        Check(name="benchmark", command=(python, "benchmarks/first.py")),
        *(
            Check(name=f"simulator {begin}:{begin + SEEDS}", command=(*simulator, f"{begin}:{begin + SEEDS}"))
            for begin in range(0, SEEDS_IN_ALL, SEEDS)
        ),
    ]
    listing = _run((python, "-m", "pytest", "--collect-only", "-q", "-m", "long", "-p", "no:randomly"))
    if listing.returncode not in {0, 5}:  # 5: no test is marked
        raise SystemExit(f"test-long: pytest could not collect the long tests:\n{listing.stdout}")
    cases = [line for line in listing.stdout.splitlines() if "::" in line]
    functions = dict.fromkeys(case.partition("[")[0] for case in cases)
    return fixed + [Check(name=name, command=(python, "-m", "pytest", "-q", "-m", "long", name)) for name in functions]


def source_digest(check: Check) -> str:
    """Return a digest of what a check depends on, as it lies in the working tree: all but pages and other tests."""
    names = _run(("git", "ls-files", "-z", "--", ".", ":!docs", ":!changes", ":!*.md", ":!scripts")).stdout.split("\0")
    total = hashlib.sha256()
    for name in sorted(filter(None, names)):
        path = ROOT / name
        other_test = name.startswith("tests/") and path.name.startswith("test_") and not check.name.startswith(name)
        if not other_test:
            content = b"" if path.is_symlink() or not path.exists() else path.read_bytes()
            total.update(name.encode() + b"\0" + hashlib.sha256(content).digest())
    return total.hexdigest()[:16]


def recorded() -> list[Result]:
    """Return the results of earlier runs."""
    journal = STATE / "results.jsonl"
    if not journal.exists():
        return []
    return [Result(**json.loads(line)) for line in journal.read_text().splitlines()]


def run(check: Check, *, source: str) -> Result:
    """Run one check; what it prints goes to a file in ``.test-long/``."""
    stem = hashlib.sha256(check.name.encode()).hexdigest()[:12]
    log, report = STATE / f"{stem}.log", STATE / f"{stem}.xml"
    report.unlink(missing_ok=True)
    reporting = (f"--junitxml={report}", "-o", "junit_family=xunit1")  # the only family that has record_property
    command = (*check.command, *reporting) if "pytest" in check.command else check.command
    begin = time.monotonic()
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False, timeout=TIMEOUT_S
            )
            status = done.returncode
        except subprocess.TimeoutExpired:
            status = 124
    seconds = round(time.monotonic() - begin, 1)
    cases, facts = told_by(report)
    result = Result(
        name=check.name,
        source=source,
        commit=source_commit(PAGE),
        status=status,
        seconds=seconds,
        cases=cases,
        facts=facts,
    )
    with (STATE / "results.jsonl").open("a") as journal:
        journal.write(json.dumps(asdict(result)) + "\n")
    say(f"{'passed' if status == 0 else f'FAILED ({status}), see {log}'}  {result.seconds:7.1f} s  {check.name}")
    return result


def told_by(report: Path) -> tuple[tuple[int, int], dict[str, str]]:
    """Return how many cases passed and how many there were, and what the tests measured, from pytest's XML."""
    if not report.exists():
        return (0, 0), {}
    root = ET.parse(report).getroot()  # noqa: S314 - written by the pytest that we ran
    cases = root.findall(".//testcase")
    bad = [case for case in cases if any(case.find(kind) is not None for kind in ("failure", "error", "skipped"))]
    facts = {one.get("name", ""): one.get("value", "") for one in root.findall(".//testcase/properties/property")}
    return (len(cases) - len(bad), len(cases)), facts


def page(results: Sequence[Result], *, missing: Sequence[str] = ()) -> str:
    """Return the page of results; ``missing`` names the checks that have not been run on the source as it is."""
    passed = sum(result.status == 0 for result in results)
    rows = "\n".join(
        f"| `{result.name}` | {_outcome(result)} | {_cases(result)} | {result.seconds} | {result.commit} |"
        for result in results
    )
    rows += "".join(f"\n| `{name}` | not run | | | |" for name in missing)
    facts = "\n".join(
        f"\n`{result.name}`\n\n" + "\n".join(f"- {name}: {value}" for name, value in result.facts.items())
        for result in results
        if result.facts
    )
    return (
        "# Long tests\n\n"
        f"Written by `make test-long`: {passed} of {len(results) + len(missing)} passed. Python "
        f"{platform.python_version()}, {platform.machine()}, {os.cpu_count()} CPUs that others use too.\n\n"
        f"| check | outcome | cases passed | seconds | commit |\n| --- | --- | --- | --- | --- |\n{rows}\n"
        f"\n## What was measured\n{facts}\n"
    )


def main() -> int:
    """Run what has not passed yet; exit status 1 when a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="run the checks that have passed, too")
    parser.add_argument("-k", dest="words", default="", help="run only checks whose name has this, 'or' this, in it")
    options = parser.parse_args()
    STATE.mkdir(exist_ok=True)
    words = options.words.split(" or ")
    wanted = checks()
    sources = {check.name: source_digest(check) for check in wanted}
    results = {one.name: one for one in recorded() if one.source == sources.get(one.name)}
    for check in wanted:
        done = check.name in results and results[check.name].status == 0 and not options.again
        if is_asked(check, words) and not done:
            results[check.name] = run(check, source=sources[check.name])
        ordered = [results[one.name] for one in wanted if one.name in results]
        missing = [one.name for one in wanted if one.name not in results]
        PAGE.write_text(page(ordered, missing=missing))
    return int(any(results[check.name].status != 0 for check in wanted if is_asked(check, words)))


def is_asked(check: Check, words: Sequence[str]) -> bool:
    """Say whether a check's name has one of the words in it."""
    return any(word in check.name for word in words)


def say(text: str) -> None:
    """Print a line of progress."""
    sys.stderr.write(f"test-long: {text}\n")


def _outcome(result: Result) -> str:
    return "passed" if result.status == 0 else f"**failed** ({result.status})"


def _cases(result: Result) -> str:
    return f"{result.cases[0]} of {result.cases[1]}" if result.cases[1] else ""


def source_commit(page: Path) -> str:
    """Return the commit, and whether anything was changed since but the page that a program writes."""
    changed = _run(("git", "status", "--porcelain", "-uno", "--", ".", f":!{page.relative_to(ROOT)}")).stdout
    return _run(("git", "describe", "--always")).stdout.strip() + ("-dirty" if changed.strip() else "")


def _run(command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    sys.exit(main())
