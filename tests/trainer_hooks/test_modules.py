"""Names, and who owns what: the same with and without wrappers, the same on each rank."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.tiny_trainer import assert_same_tensor, load, save
from torch import nn

from toprope.trainer_hooks.capture.layout import owners
from toprope.trainer_hooks.capture.modules import model_state
from toprope.trainer_hooks.capture.spec import spec_of
from toprope.trainer_hooks.capture.state import Parts, capture
from toprope.trainer_hooks.errors import UnsupportedLeafError, UsageError


def test_a_tied_weight_is_stored_once_and_stays_tied(tmp_path: Path) -> None:
    def build() -> Any:  # noqa: ANN401 - torch types the attributes of modules loosely
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        model[1].weight = model[0].weight
        return model

    saved, live = build(), build()
    assert set(capture(Parts(model=saved), rank=0, world=1).tensors) >= {"model.0.weight"}
    assert model_state(saved, world=1).tied == {"1.weight": "0.weight"}
    load(Parts(model=live), save(Parts(model=saved), tmp_path / "i"))
    assert live[1].weight is live[0].weight
    assert_same_tensor(live[0].weight, saved[0].weight)


def test_a_module_used_twice_is_stored_once() -> None:
    shared = nn.Linear(2, 2)
    found = model_state(nn.Sequential(shared, nn.ReLU(), shared), world=1)
    assert set(found.params) == {"0.weight", "0.bias"}
    assert found.tied == {"2.weight": "0.weight", "2.bias": "0.bias"}


@pytest.mark.fault("B31")
def test_a_buffer_that_is_not_persistent_is_left_alone(tmp_path: Path) -> None:
    def build(value: float) -> Any:  # noqa: ANN401 - see above
        model = nn.Linear(2, 2)
        model.register_buffer("kept", torch.full((2,), value))
        model.register_buffer("built", torch.full((2,), value), persistent=False)
        return model

    saved, live = build(1.0), build(2.0)
    load(Parts(model=live), save(Parts(model=saved), tmp_path / "i"))
    assert "model.built" not in capture(Parts(model=saved), rank=0, world=1).tensors
    assert live.kept.tolist() == [1.0, 1.0]
    assert live.built.tolist() == [2.0, 2.0]


def test_a_module_s_extra_state_is_kept(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        calls = 0

        def get_extra_state(self) -> dict[str, int]:
            return {"calls": self.calls}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.calls = state["calls"]

    saved, live = Counting(2, 2), Counting(2, 2)
    saved.calls = 7
    load(Parts(model=nn.Sequential(live)), save(Parts(model=nn.Sequential(saved)), tmp_path / "i"))
    assert live.calls == 7


def test_a_lazy_parameter_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedLeafError, match=r"model\.0\.weight: has no values yet"):
        model_state(nn.Sequential(nn.LazyLinear(3)), world=1)


def test_a_lazy_buffer_is_refused_by_name_unless_it_is_not_kept() -> None:
    model = nn.Sequential(nn.LazyBatchNorm1d(affine=False))
    with pytest.raises(UnsupportedLeafError, match=r"model\.0\.running_mean: has no values yet"):
        capture(Parts(model=model), rank=0, world=1)
    model[0]._non_persistent_buffers_set |= {"running_mean", "running_var"}
    assert list(model_state(model, world=1).buffers) == ["0.num_batches_tracked"]


def test_an_optimizer_of_another_model_is_refused() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(UsageError, match="optimizer group 0, parameter 0 of shape"):
        capture(Parts(model=nn.Linear(2, 2), optimizer=optimizer), rank=0, world=1)


def test_the_largest_goes_first_to_the_rank_with_the_fewest_bytes() -> None:
    sizes = {"a": 100, "b": 100, "c": 70, "d": 60, "e": 17, "f": 16, "g": 1}
    assert owners(sizes, ranks=range(2)) == {"a": 0, "b": 1, "c": 0, "d": 1, "e": 1, "f": 0, "g": 0}


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 1000), max_size=20), st.integers(1, 5), st.randoms())
def test_ownership_does_not_depend_on_the_order_of_the_parameters(
    sizes: dict[str, int], world: int, chance: random.Random
) -> None:
    shuffled = dict(chance.sample(list(sizes.items()), len(sizes)))
    assert owners(sizes, ranks=range(world)) == owners(shuffled, ranks=range(world))
    assert set(owners(sizes, ranks=range(world))) == set(sizes)


def test_the_spec_is_what_the_state_depends_on_and_no_more() -> None:
    def spec(rate: float, width: int = 3) -> object:
        model = nn.Linear(width, 2)
        return spec_of(Parts(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=rate)))

    assert spec(0.1) == spec(0.2)
    assert spec(0.1) != spec(0.1, width=4)
    assert spec(0.1) == {
        "model": {
            "class": "Linear",
            "params": {"weight": ["float32", [2, 3]], "bias": ["float32", [2]]},
            "buffers": {},
            "tied": {},
        },
        "optimizer": {"class": "AdamW", "groups": [["weight", "bias"]]},
    }
