"""Nothing is broken on purpose unless flag, environment and label agree, and each blow is written down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from toprope.__main__ import main
from toprope.chaos.permit import Permit, audit_file, note, permit
from toprope.store.errors import UsageError

ALL = {"flag": True, "environment": "chaos", "label": "chaos"}


def test_three_that_agree_are_enough() -> None:
    Permit(**ALL).check("chaos-mine")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("missing", "value", "says"),
    [
        ("flag", False, "the flag --break"),
        ("environment", "", "CKPT_CHAOS=chaos in the environment"),
        ("environment", "1", "CKPT_CHAOS=chaos in the environment"),
        ("label", "", "label = 'chaos' in the scenario"),
        ("label", "production", "labelled 'production'"),
    ],
)
def test_without_one_of_them_nothing_is_broken(missing: str, value: object, says: str) -> None:
    with pytest.raises(UsageError, match="nothing") as refused:
        Permit(**(ALL | {missing: value})).check("chaos-mine")  # type: ignore[arg-type]
    assert says in str(refused.value)


def test_a_job_for_production_is_never_broken_whatever_else_is_said() -> None:
    with pytest.raises(UsageError, match="production"):
        Permit(flag=False, environment="", label="production").check("job")


def test_the_environment_is_that_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPT_CHAOS", raising=False)
    assert permit(flag=True, label="chaos").environment == ""
    monkeypatch.setenv("CKPT_CHAOS", "chaos")
    assert permit(flag=True, label="chaos").environment == "chaos"


@pytest.mark.parametrize(("flags", "environment"), [([], "chaos"), (["--break"], "")])
def test_the_command_line_refuses_before_it_starts_anything(
    flags: list[str],
    environment: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CKPT_CHAOS", environment)
    kept = tmp_path / "kept"
    assert main(["chaos", "run", "kill-node", "--keep", str(kept), *flags]) == 64
    assert main(["chaos", "soak", "--keep", str(kept), *flags]) == 64
    assert "nothing is broken on purpose without" in capsys.readouterr().err
    assert not kept.exists()


def test_a_scenario_without_the_label_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CKPT_CHAOS", "chaos")
    file = tmp_path / "mine.toml"
    file.write_text('name="mine"\nabout="x."\nattacks=["told"]\n[[fault]]\ndo="kill"\ntarget="broker"\nat_step=3\n')
    assert main(["chaos", "run", str(file), "--break"]) == 64
    assert "label = 'chaos' in the scenario" in capsys.readouterr().err


def test_each_blow_is_a_line_of_the_audit_trail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    note("strike", job="chaos-mine", fault={"do": "kill"})
    note("strike", job="chaos-mine", fault={"do": "pause"})
    lines = [json.loads(line) for line in audit_file().read_text().splitlines()]
    assert audit_file() == tmp_path / "toprope" / "chaos.jsonl"
    assert [line["fault"]["do"] for line in lines] == ["kill", "pause"]
    assert {"at", "uid", "what", "job", "fault"} == lines[0].keys()
