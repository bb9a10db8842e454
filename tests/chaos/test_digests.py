"""The digests that runs are compared by see the smallest change, each in its own place."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.source import load_program
from torch import nn

digests = load_program("examples/gpt/digests.py")


class Run:
    """A model, its optimizer after a step, and a position."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002 - the global stream is what is tested
        self.model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.model(torch.randn(4, 3)).sum().backward()
        self.optimizer.step()
        self.position: dict[str, Any] = {"data": {"at": 7}, "schedule": {"last": 0.5}}

    def digests(self) -> dict[str, str]:
        found: dict[str, str] = digests.state_digests(self.model, self.optimizer, position=self.position)
        return found

    @property
    def moment(self) -> torch.Tensor:
        moment: torch.Tensor = self.optimizer.state[next(self.model.parameters())]["exp_avg_sq"]
        return moment


def last_bit(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.view(-1)[:1].view(torch.int32).bitwise_xor_(1)


CHANGES: dict[str, tuple[str, Callable[[Run], object]]] = {
    "a weight": ("weights", lambda run: last_bit(next(run.model.parameters()))),
    "a buffer": ("weights", lambda run: last_bit(dict(run.model.named_buffers())["1.running_var"])),
    "a moment": ("optimizer", lambda run: last_bit(run.moment)),
    "a step count": ("optimizer", lambda run: run.optimizer.state[next(run.model.parameters())]["step"].add_(1)),
    "a learning rate": ("optimizer", lambda run: run.optimizer.param_groups[0].update(lr=0.00100001)),
    "a draw from torch": ("rng", lambda _: torch.rand(1)),
    "a draw from Python": ("rng", lambda _: random.random()),
    "a draw from NumPy": ("rng", lambda _: np.random.rand()),  # noqa: NPY002 - the global stream
    "the place in the data": ("position", lambda run: run.position["data"].update(at=8)),
    "the schedule": ("position", lambda run: run.position["schedule"].update(last=0.5000000000000001)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_each_small_change_changes_the_digest_of_its_kind_and_no_other(what: str) -> None:
    kind, change = CHANGES[what]
    run = Run()
    before = run.digests()
    assert set(before) == {"weights", "optimizer", "rng", "position"}
    assert run.digests() == before, "to look changes nothing"
    change(run)
    after = run.digests()
    assert {name for name in before if before[name] != after[name]} == {kind}


def test_the_same_run_again_has_the_same_digests() -> None:
    assert Run().digests() == Run().digests()
