"""``ckpt demo``: what it takes, what it leaves, and that it can say no."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import msgspec
import pytest
import torch
from tests.chaos.test_report import evidence

from toprope.__main__ import main
from toprope.chaos import demo
from toprope.chaos.live.processes import LiveError
from toprope.chaos.report import Report, build
from toprope.chaos.spoil import SPOILS, spoil
from toprope.trainer_hooks import Checkpointer

PLANS: list[tuple[demo.Plan, Path]] = []


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[Report]:
    """Let the demo end at once with the report that a test puts here; else with a good one."""
    PLANS.clear()
    reports: list[Report] = []

    def run(plan: demo.Plan, directory: Path, _progress: object) -> Report:
        PLANS.append((plan, directory))
        return reports[0] if reports else build(evidence())

    monkeypatch.setattr(demo, "run", run)
    return reports


def test_a_good_report_is_printed_and_written_and_ends_with_status_0(
    ends: list[Report], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, keep = tmp_path / "report.json", tmp_path / "kept"
    assert main(["demo", "--json", str(file), "--keep", str(keep), "--seed", "3", "--steps", "24"]) == 0
    assert capsys.readouterr().out.rstrip().splitlines()[-1] == "bit-identical: yes"
    written = json.loads(file.read_text())
    assert written == json.loads(msgspec.json.encode(build(evidence())))
    assert (written["bit_identical"], written["killed"][0]["status"]) == ("yes", -9)
    ((plan, directory),) = PLANS
    assert (plan, directory) == (demo.Plan(steps=24, seed=3), keep)


@pytest.mark.parametrize("changes", [{"bit_identical": "no"}, {"broken": ("5 steps were lost",)}])
def test_a_report_that_is_not_good_ends_with_status_1(ends: list[Report], changes: dict[str, object]) -> None:
    ends.append(msgspec.structs.replace(build(evidence()), **changes))
    assert main(["demo"]) == 1


def test_a_demo_that_could_not_be_carried_through_is_no_success(
    ends: list[Report], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*_: object) -> Report:
        raise LiveError("the broker has died")

    monkeypatch.setattr(demo, "run", run)
    assert main(["demo"]) == 1
    assert "the demo stopped: the broker has died" in capsys.readouterr().err


def test_a_demo_that_is_told_to_end_cleans_up_and_is_no_success(
    ends: list[Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    cleaned = []

    def run(*_: object) -> Report:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        finally:
            cleaned.append(True)
        raise AssertionError

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(demo, "run", run)
    assert main(["demo"]) == 130
    assert cleaned
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    "words", [("--spoil", "data"), ("--steps", "11"), ("--store", "tape"), ("--keep", "{full}"), ("--what",)]
)
def test_wrong_use_is_one_line_and_status_64_and_starts_nothing(
    ends: list[Report], tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    (tmp_path / "file").write_text("mine")
    assert main(["demo", *(word.format(full=tmp_path) for word in words)]) == 64
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert PLANS == []
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_spoil_reaches_the_run_with_hooks_and_not_the_reference(ends: list[Report], tmp_path: Path) -> None:
    assert main(["demo", "--spoil", "rng"]) == 0
    ((plan, _),) = PLANS
    assert demo._training(plan, tmp_path).runner == ("-m", "toprope.chaos.spoil", "rng")
    assert demo._training(plan, tmp_path, hooks=False).runner == ()


@pytest.mark.parametrize("what", SPOILS)
@pytest.mark.parametrize("step", [0, 7])
def test_a_spoiled_restore_brings_back_a_state_that_differs_in_that_alone(
    monkeypatch: pytest.MonkeyPatch, what: str, step: int
) -> None:
    monkeypatch.setattr(Checkpointer, "__init__", lambda _self, **_named: None)
    monkeypatch.setattr(Checkpointer, "restore", lambda _self, *_, **_named: step)
    spoil(what)
    model = torch.nn.Linear(2, 2)
    checkpointer = Checkpointer(job="j", model=model)
    weights, stream = [one.clone() for one in model.parameters()], torch.get_rng_state()
    assert checkpointer.restore() == step
    same_weights = all(torch.equal(one, two) for one, two in zip(weights, model.parameters(), strict=True))
    same_stream = torch.equal(stream, torch.get_rng_state())
    assert (same_weights, same_stream) == (step == 0 or what != "weights", step == 0 or what != "rng")
