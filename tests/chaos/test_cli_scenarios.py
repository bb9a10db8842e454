"""``ckpt chaos run``, ``list`` and ``soak``: what they take, what they print, and with which status they end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Self

import pytest
from msgspec.structs import replace
from tests.chaos.test_judging import evidence

from toprope.__main__ import main
from toprope.chaos import cli_scenarios
from toprope.chaos.cli_scenarios import seconds, soaking
from toprope.chaos.faults.kinds import KINDS
from toprope.chaos.judging import judge
from toprope.chaos.live.processes import LiveError
from toprope.chaos.promises import PROMISES
from toprope.chaos.running import Order
from toprope.chaos.scenario import shipped
from toprope.chaos.verdict import Verdict
from toprope.store.errors import UsageError


class Played:
    """Stands in for the running of a scenario: notes the order, and gives the verdict that a test puts here."""

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.verdict: Verdict | LiveError = judge(evidence())

    def run(self, order: Order, _stage: object, _progress: object) -> Verdict:
        self.orders.append(order)
        if isinstance(self.verdict, LiveError):
            raise self.verdict
        return self.verdict

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    played = Played()
    monkeypatch.setenv("CKPT_CHAOS", "chaos")
    monkeypatch.setattr(cli_scenarios, "run", played.run)
    monkeypatch.setattr(cli_scenarios, "Stage", lambda: played)
    return played


def test_a_good_verdict_is_printed_and_written_and_ends_with_status_0(
    played: Played, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    junit, html = tmp_path / "junit.xml", tmp_path / "page.html"
    words = ["chaos", "run", "kill-node", "--break", "--seed", "5", "--junit", str(junit), "--html", str(html)]
    assert main(words) == 0
    assert "kill: rank 1" in capsys.readouterr().out
    assert junit.read_text().startswith("<?xml")
    assert "<html" in html.read_text()
    (order,) = played.orders
    assert (order.loaded.scenario.name, order.seed, order.defect, order.job) == ("kill-node", 5, "", "chaos-kill-node")
    assert not order.directory.exists(), "what was not to be kept is gone"


def test_data_goes_to_stdout_as_json(played: Played, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "run", "disk-full", "--break", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"]["scenario"] == "planted"


def test_a_broken_promise_ends_with_status_1(played: Played) -> None:
    played.verdict = judge(evidence(damages=("shard 1: digest differs",)))
    assert main(["chaos", "run", "kill-node", "--break"]) == 1


def test_a_fault_that_did_not_happen_ends_with_status_1(played: Played) -> None:
    assert isinstance(played.verdict, Verdict)
    played.verdict = judge(evidence(injections=(replace(evidence().injections[0], fired=False),)))
    assert main(["chaos", "run", "kill-node", "--break"]) == 1


def test_a_run_that_stopped_is_told_in_one_line(played: Played, capsys: pytest.CaptureFixture[str]) -> None:
    played.verdict = LiveError("the broker does not listen")
    assert main(["chaos", "run", "kill-node", "--break"]) == 1
    assert "kill-node stopped: the broker does not listen" in capsys.readouterr().err


def test_what_is_kept_must_be_new(played: Played, tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    assert main(["chaos", "run", "kill-node", "--break", "--keep", str(tmp_path)]) == 64
    assert main(["chaos", "run", "kill-node", "--break", "--keep", str(tmp_path / "new")]) == 0
    assert [order.directory for order in played.orders] == [tmp_path / "new"]


def test_a_safeguard_can_be_left_out_by_name(played: Played, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "run", "kill-node", "--break", "--defect", "waits"]) == 0
    assert main(["chaos", "run", "kill-node", "--break", "--defect", "all"]) == 64
    assert "--defect 'all': give one of one-draw-ahead" in capsys.readouterr().err
    assert [order.defect for order in played.orders] == ["waits"]


def test_the_scenarios_are_listed_with_the_promises_that_they_attack(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(shipped())
    assert all("Attacks: " in line for line in lines)
    assert main(["chaos", "list", "--faults", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == list(KINDS)
    assert main(["chaos", "list", "--defects"]) == 0
    assert "random streams are brought back exactly (bit-identical)" in capsys.readouterr().out


def test_a_soak_lasts_as_long_as_it_is_told_under_random_faults(played: Played) -> None:
    assert main(["chaos", "soak", "--break", "--mtbf", "30s", "--for", "2m"]) == 0
    ((order,)) = played.orders
    (fault,) = order.loaded.scenario.fault
    assert (fault.do, fault.mtbf_s, order.seed, order.loaded.scenario.workload.steps) == ("any", 30.0, 7, 600)
    assert set(soaking(mtbf_s=1.0, length_s=1.0, among="kill rank 0").attacks) == set(PROMISES) - {"told"}


def test_times_have_a_unit() -> None:
    assert [seconds(text, "--for") for text in ("90s", "1.5m", "2h")] == [90.0, 90.0, 7200.0]
    for text in ("90", "0s", "-1s", "1 h", ""):
        with pytest.raises(UsageError, match="--for"):
            seconds(text, "--for")
