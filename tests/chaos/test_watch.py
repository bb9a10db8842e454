"""The watch writes down what a trainer does, of whatever script, and changes nothing of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from toprope.chaos.journal import Event, Final, JournalReader, read_finals
from toprope.chaos.watch import Watch, main, queued_so_far_s
from toprope.trainer_hooks import Checkpointer

SCRIPT = """
import sys
import torch
from toprope.trainer_hooks import Checkpointer
steps, seed, last = map(int, sys.argv[1:])
torch.manual_seed(seed)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters())
ckpt = Checkpointer(job="mine", model=model, optimizer=optimizer, fresh_ok=True, sidecar_timeout_s=0.01)
for step in range(ckpt.restore() + 1, steps + 1):
    loss = model(torch.ones(2)).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ckpt.end_step(step, loss=loss)
    if step == last:
        raise ValueError("no more")
ckpt.close()
"""


@pytest.fixture(autouse=True)
def _unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put back what the watch puts in place of the hook's calls."""
    for name in ("restore", "end_step", "close"):
        monkeypatch.setattr(Checkpointer, name, getattr(Checkpointer, name))
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(sys, "path", [*sys.path])


def watched(directory: Path, *options: str, steps: int = 3, seed: int = 1, last: int = 0) -> list[Event]:
    script = directory / "train.py"
    script.write_text(SCRIPT)
    main([str(directory / "out"), *options, str(script), str(steps), str(seed), str(last)])
    return events(directory)


def events(directory: Path) -> list[Event]:
    reader = JournalReader(directory / "out")
    reader.read()
    return reader.events


def final(directory: Path) -> Final:
    (found,) = read_finals(directory / "out")
    return found


def test_the_journal_has_each_step_with_its_loss_and_the_final_state_by_part(tmp_path: Path) -> None:
    found = watched(tmp_path, "--reference")
    assert [(one.event, one.step) for one in found] == [
        ("start", 0),
        ("begin", 0),
        ("step", 1),
        ("step", 2),
        ("step", 3),
        ("end", 3),
    ]
    losses = [one.loss for one in found if one.event == "step" and one.loss is not None]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] > 0.0
    assert (final(tmp_path).step, {"model", "optimizer", "other"} <= final(tmp_path).digests.keys()) == (3, True)


def test_the_final_state_is_the_same_with_and_without_the_hook_and_another_with_another_seed(tmp_path: Path) -> None:
    runs = {name: tmp_path / name for name in ("reference", "hooked", "other", "longer")}
    for directory in runs.values():
        directory.mkdir()
    watched(runs["reference"], "--reference")
    watched(runs["hooked"])
    watched(runs["other"], "--reference", seed=2)
    watched(runs["longer"], "--reference", steps=4)
    digests = {name: json.dumps(final(directory).digests) for name, directory in runs.items()}
    assert digests["reference"] == digests["hooked"]
    assert len(set(digests.values())) == 3


def test_a_loss_that_is_no_number_is_told_as_none(tmp_path: Path) -> None:
    watch = Watch(tmp_path / "out")
    for step, loss in enumerate((1.5, float("nan"), float("inf"), None), start=1):
        watch.ended(step, loss)
    assert [one.loss for one in events(tmp_path)] == [1.5, None, None, 0.0]


def test_a_script_that_fails_is_told_and_leaves_no_final_state(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no more"):
        watched(tmp_path, "--reference", last=2)
    assert [(one.event, one.error) for one in events(tmp_path)][-1] == ("failed", "ValueError: no more")
    assert read_finals(tmp_path / "out") == ()


def test_a_step_takes_at_least_as_long_as_it_should(tmp_path: Path) -> None:
    found = watched(tmp_path, "--reference", "--step-s", "0.02")
    times = [one.monotonic_s for one in found if one.event == "step"]
    assert len(times) > 2
    assert times[-1] - times[0] >= 0.02 * (len(times) - 2), "a step is waited for after it is noted"


def test_the_wait_for_a_processor_is_counted_and_never_falls() -> None:
    assert 0.0 <= queued_so_far_s() <= queued_so_far_s()
