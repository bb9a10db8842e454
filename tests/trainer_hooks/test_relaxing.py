"""``restore(partial=True)`` and ``restore(cast=True)``: what is taken, what is left alone, and what is said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.fitted_states import fitted, linear, saved
from tests.support.tiny_trainer import assert_same_tensor
from torch import nn

from toprope.trainer_hooks.errors import UsageError
from toprope.trainer_hooks.restore.apply import apply
from toprope.trainer_hooks.restore.relaxing import Allowed, Report

PARTIAL, CAST = Allowed(partial=True), Allowed(cast=True)


def trainer(*names: str, value: float = 9.0, dtype: torch.dtype = torch.float32, kind: Any = None) -> dict[str, Any]:  # noqa: ANN401 - an optimizer's class
    """Return models and an optimizer that has taken two steps, so that it has moments."""
    models = {name: linear(value).to(dtype) for name in names}
    optimizer = (kind or torch.optim.AdamW)([p for model in models.values() for p in model.parameters()], lr=value)
    for _ in range(2):
        for model in models.values():
            model.weight.grad = torch.full_like(model.weight, value)
        optimizer.step()
    return {"model": models, "optimizer": optimizer}


def weight(parts: dict[str, Any], name: str) -> nn.Parameter:
    found = parts["model"][name].weight
    assert isinstance(found, nn.Parameter)
    return found


def state(parts: dict[str, Any], name: str) -> dict[str, torch.Tensor]:
    return dict(parts["optimizer"].state[weight(parts, name)])


@pytest.mark.fault("B30")
@pytest.mark.parametrize("world", [1, 2], ids=["as-saved", "other-world"])
def test_what_both_have_is_restored_and_what_only_one_has_is_left_alone_and_named(tmp_path: Path, world: int) -> None:
    before = trainer("body", "old_head", value=1.0)
    source = saved(tmp_path, [before] * world)
    live = trainer("body", "new_head")
    untouched = {
        key: value.clone() for key, value in {"w": weight(live, "new_head"), **state(live, "new_head")}.items()
    }
    body = weight(live, "body").clone()
    with pytest.raises(UsageError, match=r"model\.old_head\.weight: in the checkpoint, unexpected.*partial=True") as no:
        fitted(source, **live)
    assert "model.new_head.weight: missing in the checkpoint" in str(no.value)
    assert_same_tensor(weight(live, "body"), body)
    found = fitted(source, allowed=PARTIAL, **live)
    apply(found.loaded)
    assert_same_tensor(weight(live, "body"), weight(before, "body"))
    for key, value in state(before, "body").items():
        assert_same_tensor(state(live, "body")[key], value)
    for key, value in {"w": weight(live, "new_head"), **state(live, "new_head")}.items():
        assert_same_tensor(value, untouched[key])
    assert live["optimizer"].param_groups[0]["lr"] == 1.0
    assert found.report == Report(missing=("model.new_head.weight",), unexpected=("model.old_head.weight",))
    assert found.report.lines() == [
        "1 missing in the checkpoint, left as they were: model.new_head.weight",
        "1 in the checkpoint only, not taken: model.old_head.weight",
    ]


def test_a_part_that_is_new_is_left_as_it_is_and_one_that_is_gone_is_not_missed(tmp_path: Path) -> None:
    model = linear(1.0)
    source = saved(tmp_path, [{"model": model, "scaler": linear(2.0), "extra": {"a": 1, "gone": torch.Generator()}}])
    optimizer = torch.optim.SGD([probe := nn.Parameter(torch.zeros(1))], lr=9.0)
    live = nn.ParameterDict({"weight": nn.Parameter(torch.zeros(2, 4)), "probe": probe})
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    extra: dict[str, Any] = {"a": 9, "new": 9, "fresh": torch.Generator()}
    found = fitted(source, allowed=PARTIAL, model=live, optimizer=optimizer, lr_scheduler=schedule, extra=extra)
    apply(found.loaded)
    assert bool((live["weight"] == 1).all())
    assert (extra["a"], extra["new"], optimizer.param_groups[0]["lr"], schedule.base_lrs) == (1, 9, 9.0, [9.0])
    assert found.report.missing == (
        "extra (with state_dict) fresh",
        "extra.new",
        "lr_scheduler",
        "model.probe",
        "optimizer group 0",
    )
    assert found.report.unexpected == ("extra (with state_dict) gone", "scaler")


def test_another_kind_of_optimizer_keeps_its_own_settings_and_state(tmp_path: Path) -> None:
    source = saved(tmp_path, [trainer("body", value=1.0)])
    live = trainer("body", kind=torch.optim.SGD)
    found = fitted(source, allowed=PARTIAL, **live)
    apply(found.loaded)
    assert bool((weight(live, "body") == weight(trainer("body", value=1.0), "body")).all())
    assert live["optimizer"].param_groups[0]["lr"] == 9.0
    assert (found.report.missing, found.report.unexpected) == (("optimizer",), ("optimizer",))


def test_partial_does_not_take_what_another_rank_has_for_missing(tmp_path: Path) -> None:
    """Two stages of a pipeline that changed places: each is in the checkpoint, under the other rank."""
    source = saved(tmp_path, [trainer("a", value=1.0), trainer("b", value=2.0)])
    live = trainer("b")
    found = fitted(source, allowed=PARTIAL, world=2, **live)
    apply(found.loaded)
    assert_same_tensor(weight(live, "b"), weight(trainer("b", value=2.0), "b"))
    assert found.report == Report(unexpected=("model.a.weight",)), "no rank here has a: this is a world of one name"


def test_ties_that_changed_are_refused_with_partial_too(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": linear(1.0), "b": linear(2.0)})
    source = saved(tmp_path, [{"model": model}])
    tied = nn.ModuleDict({"a": linear(9.0), "b": linear(9.0)})
    tied["b"].weight = tied["a"].weight
    with pytest.raises(UsageError, match="tied parameters are"):
        fitted(source, allowed=PARTIAL, model=tied)


@pytest.mark.fault("B22")
@pytest.mark.parametrize("world", [1, 2], ids=["as-saved", "other-world"])
@pytest.mark.parametrize(
    ("there", "here"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float64, torch.float16)],
)
def test_other_dtypes_are_cast_with_the_moments_that_follow_them(
    tmp_path: Path, world: int, there: torch.dtype, here: torch.dtype
) -> None:
    before = trainer("a", value=1.0, dtype=there)
    source, live = saved(tmp_path, [before] * world), trainer("a", dtype=here)
    untouched = weight(live, "a").clone()
    with pytest.raises(UsageError, match=rf"model\.a\.weight: {there} in the checkpoint, {here} here.*cast=True"):
        fitted(source, **live)
    assert_same_tensor(weight(live, "a"), untouched)
    found = fitted(source, allowed=CAST, **live)
    apply(found.loaded)
    assert_same_tensor(weight(live, "a"), weight(before, "a").to(here))
    for key in ("exp_avg", "exp_avg_sq"):
        assert_same_tensor(state(live, "a")[key], state(before, "a")[key].to(here))
    assert_same_tensor(state(live, "a")["step"], state(before, "a")["step"])
    names = ("model.a.weight", "optimizer.state.a.weight.exp_avg", "optimizer.state.a.weight.exp_avg_sq")
    assert found.report.cast == tuple(f"{name}: {there} to {here}" for name in names)
    assert found.report.lines() == ["3 cast: " + ", ".join(found.report.cast)], "how many leaves, and which"


def test_only_state_that_is_like_its_parameter_is_cast_with_it(tmp_path: Path) -> None:
    def parts(dtype: torch.dtype) -> dict[str, Any]:
        weight, scale = nn.Parameter(torch.ones(2, 4, dtype=dtype)), nn.Parameter(torch.ones((), dtype=dtype))
        optimizer = torch.optim.SGD([weight, scale], lr=1.0)
        if dtype == torch.float32:
            optimizer.state[weight] = {
                "like": torch.ones(2, 4), "row": torch.ones(2), "wide": torch.ones(2, 4).double(),
            }  # fmt: skip
            optimizer.state[scale] = {"like": torch.ones(()), "step": torch.tensor(257.0)}
        return {"model": nn.ParameterDict({"weight": weight, "scale": scale}), "optimizer": optimizer}

    live = parts(torch.bfloat16)
    found = fitted(saved(tmp_path, [parts(torch.float32)]), allowed=CAST, **live)
    apply(found.loaded)
    state = {name: live["optimizer"].state[parameter] for name, parameter in live["model"].items()}
    assert {f"{name}.{key}": value.dtype for name, of in state.items() for key, value in of.items()} == {
        "weight.like": torch.bfloat16,
        "weight.row": torch.float32,
        "weight.wide": torch.float64,
        "scale.like": torch.bfloat16,
        "scale.step": torch.float32,
    }
    assert state["scale"]["step"].item() == 257.0, "bfloat16 has no such number"


def test_values_that_do_not_fit_into_the_other_dtype_are_counted(tmp_path: Path) -> None:
    model = linear(1.0)
    with torch.no_grad():
        model.weight[0, :3] = torch.tensor([1e6, -1e6, float("inf")])
    found = fitted(saved(tmp_path, [{"model": model}]), allowed=CAST, model=linear(9.0).half())
    assert found.report.lines() == [
        "1 cast: model.weight: torch.float32 to torch.float16, 2 of its values became infinite"
    ]


def test_whole_numbers_are_not_cast_nor_are_shapes_changed(tmp_path: Path) -> None:
    source = saved(tmp_path, [{"model": nn.BatchNorm1d(2)}])
    live = nn.BatchNorm1d(2)
    live.num_batches_tracked = torch.zeros((), dtype=torch.int32)
    both = Allowed(partial=True, cast=True)
    with pytest.raises(UsageError, match=r"num_batches_tracked: torch.int64 in the checkpoint, torch.int32 here"):
        fitted(source, allowed=both, model=live)
    with pytest.raises(UsageError, match=r"running_mean: shape \(2,\) in the checkpoint, \(3,\) here"):
        fitted(source, allowed=both, model=nn.BatchNorm1d(3))


def test_where_all_fits_nothing_is_reported(tmp_path: Path) -> None:
    source = saved(tmp_path, [trainer("a", value=1.0)])
    assert fitted(source, allowed=Allowed(partial=True, cast=True), **trainer("a")).report == Report()
