"""Several models, optimizers and schedules in one trainer: each has its names, and all come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tests.support.tiny_trainer import METADATA, assert_same_tensor, checked, load, open_image, raw, save, snapshot_file
from torch import nn

from toprope.trainer_hooks.capture.spec import spec_of
from toprope.trainer_hooks.capture.state import Parts, capture
from toprope.trainer_hooks.errors import StateMismatchError, UsageError
from toprope.trainer_hooks.restore.apply import apply, check


class Gan:
    """Two models that play against each other, with layers of equal names, an average of one, and two schedules."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.gen, self.disc = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), nn.Sequential(nn.Linear(2, 1))
        self.average = torch.optim.swa_utils.AveragedModel(self.gen)
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            "gen": torch.optim.AdamW(self.gen.parameters(), lr=1e-2),
            "disc": torch.optim.SGD(self.disc.parameters(), lr=1e-2, momentum=0.9),
        }
        self.schedules: dict[str, Any] = {
            name: torch.optim.lr_scheduler.ExponentialLR(one, 0.5 + 0.1 * number)
            for number, (name, one) in enumerate(self.optimizers.items())
        }

    def step(self) -> None:
        for sign in (1, -1):
            for optimizer in self.optimizers.values():
                optimizer.zero_grad()
            (sign * self.disc(self.gen(torch.randn(4, 2))).mean()).backward()
            self.optimizers["gen" if sign == 1 else "disc"].step()
        for schedule in self.schedules.values():
            schedule.step()
        self.average.update_parameters(self.gen)

    def models(self) -> dict[str, nn.Module]:
        return {"gen": self.gen, "disc": self.disc, "average": self.average}

    def parts(self) -> Parts:
        return Parts(model=self.models(), optimizer=self.optimizers, lr_scheduler=self.schedules)

    def state(self) -> list[bytes]:
        models = [raw(tensor) for model in self.models().values() for tensor in model.state_dict().values()]
        moments = [
            raw(value) if isinstance(value, torch.Tensor) else repr(value).encode()
            for optimizer in self.optimizers.values()
            for values in optimizer.state.values()
            for value in values.values()
        ]
        rates = [repr(group["lr"]).encode() for one in self.optimizers.values() for group in one.param_groups]
        return [*models, *moments, *rates, raw(torch.get_rng_state())]


def test_models_that_play_against_each_other_go_on_bit_for_bit(tmp_path: Path) -> None:
    saved = Gan(1)
    for _ in range(3):
        saved.step()
    path, before = save(saved.parts(), tmp_path / "i"), saved.state()
    saved.step()
    expected = saved.state()
    live = Gan(2)
    load(live.parts(), path)
    assert live.state() == before
    live.step()
    assert live.state() == expected


def test_each_model_and_optimizer_has_its_own_names(tmp_path: Path) -> None:
    gan = Gan(1)
    gan.step()
    names = set(open_image(save(gan.parts(), tmp_path / "i")).extents)
    assert names >= {
        "model.gen.0.weight",
        "model.disc.0.weight",
        "model.average.module.0.weight",  # a submodule that is really called so
        "model.average.n_averaged",
        "optimizer.gen.state.gen.0.weight.exp_avg",
        "optimizer.disc.state.disc.0.weight.momentum_buffer",
    }
    assert {"optimizer.gen", "optimizer.disc"} <= set(spec_of(gan.parts()))


def test_those_of_a_list_are_named_by_their_number(tmp_path: Path) -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    live = [nn.Linear(2, 2), nn.Linear(2, 2)]
    path = save(Parts(model=models, optimizer=optimizers), tmp_path / "i")
    assert {"model.0.weight", "model.1.weight"} <= set(open_image(path).extents)
    load(Parts(model=live, optimizer=[torch.optim.AdamW(model.parameters()) for model in live]), path)
    for one, other in zip(models, live, strict=True):
        assert_same_tensor(other.weight, one.weight)


def test_one_optimizer_may_have_the_parameters_of_several_models(tmp_path: Path) -> None:
    def build() -> Parts:
        models = {
            "policy": nn.Linear(2, 2),
            "value": nn.Linear(2, 1),
            "temperature": nn.ParameterList([torch.ones(())]),
        }
        parameters = [parameter for model in models.values() for parameter in model.parameters()]
        return Parts(model=models, optimizer=torch.optim.AdamW(parameters))

    saved, live = build(), build()
    load(live, save(saved, tmp_path / "i"))
    assert spec_of(live)["optimizer"]["groups"] == [
        ["policy.weight", "policy.bias", "value.weight", "value.bias", "temperature.0"]
    ]


def test_a_weight_that_two_models_share_is_stored_once(tmp_path: Path) -> None:
    encoder = nn.Linear(2, 2)
    parts = Parts(model={"actor": nn.Sequential(encoder), "critic": nn.Sequential(encoder)})
    names = set(open_image(save(parts, tmp_path / "i")).extents)
    assert "model.actor.0.weight" in names
    assert "model.critic.0.weight" not in names


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"model": {"a.b": nn.Linear(1, 1)}}, r"model has the key 'a\.b'"),
        ({"model": {"a": 3}}, r"model\.a is a int; give a torch\.nn\.Module"),
        ({"model": "net"}, r"model\.0 is a str"),
        ({"optimizer": {"a": 3}}, r"optimizer\.a is a int"),
        ({"lr_scheduler": [3]}, r"lr_scheduler\.0 is a int"),
    ],
    ids=str,
)
def test_what_cannot_be_one_of_several_is_refused_by_name(more: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Parts(**{"model": nn.Linear(1, 1), **more}).check()


def test_another_set_of_models_and_optimizers_is_refused(tmp_path: Path) -> None:
    gan = Gan(1)
    path = save(gan.parts(), tmp_path / "i")
    alone = {"gen": gan.optimizers["gen"]}
    with pytest.raises(StateMismatchError, match=r"optimizer\.disc: in the checkpoint, unexpected here"):
        checked(Parts(model=gan.models(), optimizer=alone, lr_scheduler=gan.schedules), path)
    fewer = {"gen": gan.gen, "disc": gan.disc}
    with pytest.raises(StateMismatchError, match=r"model\.average\.module\.0\.weight: in the checkpoint, unexpected"):
        checked(Parts(model=fewer, optimizer=gan.optimizers, lr_scheduler=gan.schedules), path)


class Stage:
    """A rank of a pipeline: parts of the model that each count their layers from 0."""

    def __init__(self, depths: list[int], *, groups: int) -> None:
        self.models = [nn.Sequential(*(nn.Linear(2, 2) for _ in range(depth))) for depth in depths]
        parameters = [parameter for model in self.models for parameter in model.parameters()]
        split: list[Any] = [
            {"params": parameters[number::groups], "lr": 0.1 * (number + 1)} for number in range(groups)
        ]
        self.optimizer = torch.optim.AdamW(split)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, [lambda s: 0.9**s] * groups)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        for _ in range(sum(depths)):
            self.optimizer.step()
            self.schedule.step()

    def parts(self) -> Parts:
        return Parts(model=self.models, optimizer=self.optimizer, lr_scheduler=self.schedule)


@pytest.mark.fault("B35")
def test_pipeline_stages_that_count_alike_keep_their_own_state(tmp_path: Path) -> None:
    """Stages of 3 and 5 layers; two parts on rank 0, two groups of parameters on rank 1 only."""
    torch.manual_seed(1)
    stages, fresh = (
        [Stage([2, 1], groups=1), Stage([5], groups=2)],
        [Stage([2, 1], groups=1), Stage([5], groups=2)],
    )
    images = {}
    for rank, stage in enumerate(stages):
        snapshot = capture(stage.parts(), rank=rank, world=2)
        metadata = METADATA | {"rank": str(rank), "world": "2"}
        path = snapshot_file(tmp_path / str(rank), snapshot.tensors, snapshot.document, metadata, snapshot.pieces)
        images[rank] = open_image(path)
    for rank, (stage, live) in enumerate(zip(stages, fresh, strict=True)):
        apply(check(live.parts(), images, rank=rank, world=2))
        assert live.schedule.state_dict() == stage.schedule.state_dict()
        assert [group["lr"] for group in live.optimizer.param_groups] == [
            group["lr"] for group in stage.optimizer.param_groups
        ]
        pairs = zip(stage.optimizer.state.values(), live.optimizer.state.values(), strict=True)
        assert all(raw(one["exp_avg_sq"]) == raw(other["exp_avg_sq"]) for one, other in pairs)
    weights, moments = _exported(tmp_path)
    expected = [(stage, p) for stage in stages for model in stage.models for p in model.parameters() if p.dim() == 2]
    assert len(weights) == len(moments) == 8
    for (stage, parameter), weight, moment in zip(expected, weights, moments, strict=True):
        assert_same_tensor(weight, parameter.detach())
        assert_same_tensor(moment, stage.optimizer.state[parameter]["exp_avg"])


def _exported(directory: Path) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return weights and first moments of all layers, in order, as a stranger reads them from the files."""
    weights, moments = [], []
    for rank in range(2):
        with safe_open(directory / str(rank), framework="pt") as file:
            names = sorted(name for name in file.keys() if name.startswith("model.") and name.endswith(".weight"))  # noqa: SIM118 - no dict
            for name in names:
                weights.append(file.get_tensor(name))
                moments.append(file.get_tensor(f"optimizer.state.{name.removeprefix('model.')}.exp_avg"))
    return weights, moments
