"""What is gathered after a run: a plain look at the log, what is told, what services used, what is left over."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from toprope.chaos.evidence import ReadyFact
from toprope.chaos.gathering import end_orphans, files_left, log_lines, readies, told
from toprope.chaos.live.processes import Process, descendants
from toprope.chaos.scenario import Expected
from toprope.chaos.site import Site
from toprope.store.names import log_key
from toprope.store.objects.directory import DirectoryStore

JOB = "chaos-mine"


def test_ready_records_are_counted_by_a_plain_look_even_in_a_log_that_no_fold_takes(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.create(log_key(JOB, 0), b'{"kind":"JOB"}')
    for number in (1, 2):
        store.create(log_key(JOB, number), b'{"kind":"READY","attempt":1,"step":8}')
    assert readies(str(tmp_path), JOB) == tuple(ReadyFact(number=n, attempt=1, step=8) for n in (1, 2))
    lines, trouble = log_lines(str(tmp_path), JOB)
    assert lines == ()
    assert "LOG_CORRUPT" in trouble


def site(directory: Path, *asked: str) -> Site:
    """A site whose processes have left logs and files."""
    node = SimpleNamespace(local_dir=directory / "local")
    cluster = SimpleNamespace(
        log=lambda name: directory / f"{name}.log", memory=directory / "memory", nodes={"a": node}
    )
    scenario = SimpleNamespace(expected=Expected(told=asked))
    world = SimpleNamespace(log=lambda rank: directory / f"rank-{rank}.log")
    return cast("Site", SimpleNamespace(scenario=scenario, cluster=cluster, world=world, job=JOB))


def test_what_must_be_told_is_looked_for_in_the_log_of_its_process(tmp_path: Path) -> None:
    (tmp_path / "sidecar-a.log").write_text("fine\nlocal-failed: No space left on device\n")
    (tmp_path / "rank-1.log").write_text("no free slot: step 4\n")
    asked = ("sidecar a: No space", "rank 1: no free slot", "rank 0: no free slot", "sidecar a: sync failed")
    found = [(one.process, one.line) for one in told(site(tmp_path, *asked))]
    assert found == [
        ("sidecar a", "local-failed: No space left on device"),
        ("rank 1", "no free slot: step 4"),
        ("rank 0", ""),
        ("sidecar a", ""),
    ]


def test_a_process_that_was_not_there_before_is_told_and_ended(tmp_path: Path) -> None:
    before = descendants(os.getpid())
    process = Process("left", [sys.executable, "-c", "import time; time.sleep(60)"], log=tmp_path / "left.log")
    found = end_orphans(before)
    assert process.wait(20) == -9
    assert [line.split(":")[0] for line in found] == [f"process {process.pid} still ran"]


def test_memory_and_temporaries_that_are_there_in_the_end_are_left_over(tmp_path: Path) -> None:
    assert files_left(site(tmp_path)) == ()
    (tmp_path / "memory").mkdir()
    temporary = tmp_path / "local" / JOB / "tmp.ab"
    temporary.parent.mkdir(parents=True)
    temporary.touch()
    assert files_left(site(tmp_path)) == (f"{tmp_path / 'memory'} is left over", f"{temporary} is left over")
