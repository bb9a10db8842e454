"""``make test-long``: runs each long check in a process of its own, goes on where it stopped, records the results.

A check that has passed on the same source isn't run again. State is in ``.test-long/``; the table that people read is
``docs/results/long.md``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STATE = ROOT / ".test-long"
PAGE = ROOT / "docs" / "results" / "long.md"
TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A command that passes with exit status 0."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a check on one state of the source."""

    name: str
    source: str
    status: int
    seconds: float


def checks() -> list[Check]:
    """Return the long checks: the demo, the benchmark, and each test that is marked ``long``."""
    python = sys.executable
    fixed = [
        Check(name="demo", command=(python, "-m", "toprope", "demo")),
        Check(name="benchmark", command=(python, "benchmarks/first.py")),
    ]
    listing = _run((python, "-m", "pytest", "--collect-only", "-q", "-m", "long", "-p", "no:randomly"))
    if listing.returncode not in {0, 5}:  # 5: no test is marked
        raise SystemExit(f"test-long: pytest could not collect the long tests:\n{listing.stdout}")
    names = [line for line in listing.stdout.splitlines() if "::" in line]
    return fixed + [Check(name=name, command=(python, "-m", "pytest", "-q", name)) for name in names]


def source_digest() -> str:
    """Return a digest of everything that git tracks but the results, as it lies in the working tree."""
    names = _run(("git", "ls-files", "-z", "--", ".", ":!docs/results")).stdout.split("\0")
    total = hashlib.sha256()
    for name in sorted(filter(None, names)):
        path = ROOT / name
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
    log = STATE / (hashlib.sha256(check.name.encode()).hexdigest()[:12] + ".log")
    begin = time.monotonic()
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                check.command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False, timeout=TIMEOUT_S
            )
            status = done.returncode
        except subprocess.TimeoutExpired:
            status = 124
    result = Result(name=check.name, source=source, status=status, seconds=round(time.monotonic() - begin, 1))
    with (STATE / "results.jsonl").open("a") as journal:
        journal.write(json.dumps(asdict(result)) + "\n")
    say(f"{'passed' if status == 0 else f'FAILED ({status}), see {log}'}  {result.seconds:7.1f} s  {check.name}")
    return result


def page(results: Sequence[Result], *, source: str, total: int) -> str:
    """Return the page of results."""
    passed = sum(result.status == 0 for result in results)
    rows = "\n".join(f"| `{result.name}` | {_outcome(result)} | {result.seconds} |" for result in results)
    return (
        "# Long tests\n\n"
        f"Written by `make test-long`: {passed} of {total} passed. Source `{source}`, commit `{_commit()}`, "
        f"Python {platform.python_version()}, {platform.machine()}.\n\n"
        f"| check | outcome | seconds |\n| --- | --- | --- |\n{rows}\n"
    )


def main() -> int:
    """Run what has not passed yet; exit status 1 when a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="run the checks that have passed, too")
    again = parser.parse_args().again
    STATE.mkdir(exist_ok=True)
    source = source_digest()
    known = {r.name: r for r in recorded() if r.source == source and r.status == 0 and not again}
    wanted = checks()
    results = []
    for check in wanted:
        results.append(known.get(check.name) or run(check, source=source))
        PAGE.write_text(page(results, source=source, total=len(wanted)))
    return int(any(result.status != 0 for result in results))


def say(text: str) -> None:
    """Print a line of progress."""
    sys.stderr.write(f"test-long: {text}\n")


def _outcome(result: Result) -> str:
    return "passed" if result.status == 0 else f"**failed** ({result.status})"


def _commit() -> str:
    return _run(("git", "describe", "--always", "--dirty")).stdout.strip()


def _run(command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    sys.exit(main())
