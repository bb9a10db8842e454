"""The shipped scenarios on real processes: each is survived; with its safeguard left out, each is found out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from toprope.chaos.cli_scenarios import soaking
from toprope.chaos.defects import DEFECTS
from toprope.chaos.judging import GROWN_BYTES_MAX
from toprope.chaos.permit import Permit
from toprope.chaos.progress import Progress
from toprope.chaos.promises import PROMISES
from toprope.chaos.running import Order, run
from toprope.chaos.scenario import Loaded, load, shipped
from toprope.chaos.stage import Stage
from toprope.chaos.verdict import Verdict

SEED = 1
PERMIT = Permit(flag=True, environment="chaos", label="chaos")
QUICK = ("kill-node", "disk-full")
"""What ``make test`` runs; ``make test-long`` runs the rest."""

SPOILT = {
    "one-draw-ahead": "kill-rank",
    "unapplied": "kill-rank",
    "objects-only": "kill-node",
    "believed": "bitflip-upload",
    "written-twice": "reply-lost",
    "never-again": "store-throttled",
    "never-pulled-again": "peer-link",
    "raises": "kill-sidecar",
    "waits": "kill-sidecar",
    "dawdles": "kill-rank",
    "silent": "disk-full",
    "leaves-a-child": "kill-rank",
}
"""Each safeguard that can be left out, and the scenario in which that must be found: unspoilt it is survived, too."""

Try = Callable[[Loaded, str], Verdict]


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as stage:
        yield stage


@pytest.fixture
def attempt(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Try:
    """Runs a scenario, without a safeguard if one is named."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def runs(loaded: Loaded, defect: str) -> Verdict:
        order = Order(loaded=loaded, seed=SEED, permit=PERMIT, directory=tmp_path / "run", defect=defect)
        with Progress(Console(stderr=True)) as progress:
            return run(order, stage, progress)

    return runs


def told(verdict: Verdict) -> str:
    promises = [f"{one.name}: {one.outcome}: {one.evidence}" for one in verdict.promises if one.outcome != "held"]
    return "\n".join([verdict.stopped, *promises, *map(str, verdict.injections), *verdict.log])


def marked(names: tuple[str, ...], quick: tuple[str, ...]) -> list[object]:
    return [pytest.param(name, marks=() if name in quick else (pytest.mark.long,)) for name in names]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", marked(shipped(), QUICK))
def test_a_scenario_is_survived(
    name: str, attempt: Try, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    verdict = attempt(load(name), "")

    if name == "oom" and any("cgroup" in one.witness or "root" in one.witness for one in verdict.unfired):
        pytest.skip(verdict.unfired[0].witness)
    assert verdict.good, told(verdict)
    audit = (tmp_path / "state" / "toprope" / "chaos.jsonl").read_text().splitlines()
    assert len(audit) == len(verdict.injections)
    for figure, value in verdict.figures.items():
        record_property(f"{name} {figure}", value)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("defect", marked(tuple(SPOILT), ("silent",)))
def test_a_safeguard_that_is_left_out_is_found_and_its_promise_named(defect: str, attempt: Try) -> None:
    verdict = attempt(load(SPOILT[defect]), defect)

    assert DEFECTS[defect].promise in verdict.broken, told(verdict)
    assert not verdict.good


def test_each_promise_has_a_safeguard_that_can_be_left_out() -> None:
    assert set(SPOILT) == set(DEFECTS)
    assert {defect.promise for defect in DEFECTS.values()} == set(PROMISES)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_half_an_hour_of_random_faults_costs_goodput_and_nothing_else(
    attempt: Try, record_property: Callable[[str, object], None]
) -> None:
    scenario = soaking(mtbf_s=60.0, length_s=1800.0, among="kill rank 0; kill rank 1; kill node b; kill coordinator")
    verdict = attempt(Loaded(scenario=scenario, directory=Path.cwd()), "")

    assert verdict.good, told(verdict)
    assert len(verdict.injections) >= 15
    for loss in verdict.losses:
        record_property(f"rank seconds of {loss.cause}", round(loss.rank_seconds))
    for figure, value in verdict.figures.items():
        record_property(figure, value)
    growth = {name: value for name, value in verdict.figures.items() if name.endswith("_resident_growth_bytes")}
    assert "sidecar_a_resident_growth_bytes" in growth, "nothing kills it, so it lived from warm-up to the end"
    assert max(growth.values()) <= GROWN_BYTES_MAX, growth
