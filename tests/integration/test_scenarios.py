"""The shipped scenarios on real processes: each is survived; with its safeguard left out, each is found out."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.trials import Try, told

from toprope.chaos.cli_scenarios import AMONG, soaking
from toprope.chaos.defects import DEFECTS
from toprope.chaos.judging import GROWN_BYTES_MAX
from toprope.chaos.promises import PROMISES
from toprope.chaos.scenario import Loaded, load, shipped

NEED_CGROUPS = ("oom", "oom-sidecar", "starved-sidecar")
NEED_ROOT = ("memory-full", "power-loss")
QUICK = ("kill-node", "disk-full")
"""What ``make test`` runs; ``make test-long`` runs the rest."""

SPOILT = {
    "one-draw-ahead": "kill-rank",
    "draws-while-saving": "disk-full",
    "unapplied": "kill-rank",
    "objects-only": "kill-node",
    "believed": "bitflip-upload",
    "written-twice": "reply-lost",
    "names-unsynced": "power-loss",
    "never-again": "store-throttled",
    "never-pulled-again": "peer-link",
    "raises": "kill-sidecar",
    "waits": "kill-sidecar",
    "dawdles": "kill-rank",
    "silent": "disk-full",
    "leaves-a-child": "kill-rank",
}
"""Each safeguard that can be left out, and the scenario in which that must be found: unspoilt it is survived, too."""


def skip_without_root(name: str) -> None:
    if name in NEED_ROOT and os.geteuid() != 0:
        pytest.skip("file systems are mounted for it")


def marked(names: tuple[str, ...], quick: tuple[str, ...]) -> list[object]:
    return [pytest.param(name, marks=() if name in quick else (pytest.mark.long,)) for name in names]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", marked(shipped(), QUICK))
def test_a_scenario_is_survived(
    name: str, attempt: Try, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    skip_without_root(name)
    verdict = attempt(load(name))

    if name in NEED_CGROUPS and any("cgroup" in one.witness or "root" in one.witness for one in verdict.unfired):
        pytest.skip(verdict.unfired[0].witness)
    assert verdict.good, told(verdict)
    if name == "kill-node":
        assert any("shard 1 from peer a" in line for one in verdict.promises for line in one.evidence), told(verdict)
    audit = (tmp_path / "state" / "toprope" / "chaos.jsonl").read_text().splitlines()
    assert len(audit) == len(verdict.injections)
    for figure, value in verdict.figures.items():
        record_property(f"{name} {figure}", value)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("defect", marked(tuple(SPOILT), ("silent",)))
def test_a_safeguard_that_is_left_out_is_found_and_its_promise_named(defect: str, attempt: Try) -> None:
    skip_without_root(SPOILT[defect])
    verdict = attempt(load(SPOILT[defect]), defect=defect)

    assert DEFECTS[defect].promise in verdict.broken, told(verdict)
    assert not verdict.good


def test_each_promise_has_a_safeguard_that_can_be_left_out() -> None:
    assert set(SPOILT) == set(DEFECTS)
    assert {defect.promise for defect in DEFECTS.values()} == set(PROMISES)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_five_minutes_in_which_any_thing_is_killed_every_quarter_of_one_are_survived(
    attempt: Try, record_property: Callable[[str, object], None]
) -> None:
    scenario = soaking(mtbf_s=15.0, length_s=300.0, among=AMONG)
    verdict = attempt(Loaded(scenario=scenario, directory=Path.cwd()), seed=301)

    assert verdict.good, told(verdict)
    struck = Counter(one.target for one in verdict.injections)
    assert struck.total() >= 15
    record_property("killed", ", ".join(f"{target} {count}" for target, count in sorted(struck.items())))
    record_property("seconds of training", round(verdict.seconds))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_half_an_hour_of_random_faults_costs_goodput_and_nothing_else(
    attempt: Try, record_property: Callable[[str, object], None]
) -> None:
    scenario = soaking(mtbf_s=60.0, length_s=1800.0, among="kill rank 0; kill rank 1; kill node b; kill coordinator")
    verdict = attempt(Loaded(scenario=scenario, directory=Path.cwd()))

    assert verdict.good, told(verdict)
    assert len(verdict.injections) >= 15
    for loss in verdict.losses:
        record_property(f"rank seconds of {loss.cause}", round(loss.rank_seconds))
    for figure, value in verdict.figures.items():
        record_property(figure, value)
    growth = {name: value for name, value in verdict.figures.items() if name.endswith("_resident_growth_bytes")}
    assert "sidecar_a_resident_growth_bytes" in growth, "nothing kills it, so it lived from warm-up to the end"
    assert max(growth.values()) <= GROWN_BYTES_MAX, growth
