"""Capture and apply without a sidecar: what was captured is what comes back, or nothing is written."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.tiny_trainer import METADATA, Tiny, checked, load, raw, save, snapshot_file, tiny
from torch import nn

from toprope.trainer_hooks.capture.rng import set_streams, streams
from toprope.trainer_hooks.capture.state import Parts, capture
from toprope.trainer_hooks.errors import StateMismatchError, UnsupportedLeafError, UsageError, WorldMismatchError
from toprope.trainer_hooks.image.shard import Image
from toprope.trainer_hooks.restore.apply import check


def _trained(steps: int = 3, seed: int = 1) -> Tiny:
    trainer = tiny(seed)
    for _ in range(steps):
        trainer.step()
    return trainer


def test_a_restored_trainer_is_the_saved_one_bit_for_bit_and_goes_on_alike(tmp_path: Path) -> None:
    saved = _trained()
    path = save(saved.parts(), tmp_path / "i")
    before = saved.digest()
    for _ in range(20):  # over the end of an epoch
        saved.step()
    expected = saved.digest()
    live = tiny(seed=9)
    load(live.parts(), path)
    assert live.digest() == before
    for _ in range(20):
        live.step()
    assert live.digest() == expected


def test_capture_changes_nothing_and_draws_nothing() -> None:
    trainer = _trained()
    before = trainer.digest()
    capture(trainer.parts(), rank=0, world=1)
    assert trainer.digest() == before


@pytest.mark.fault("B27")
def test_plain_values_come_back_with_their_types_and_absent_keys_appear(tmp_path: Path) -> None:
    values = {
        "epoch": 7,
        "name": "x",
        "flag": True,
        "best": None,
        "f": 1.5,
        "b": b"\0\xff",
        "t": (1, 2),
        "d": {1: "int key"},
        "more": "absent",
    }
    path = save(Parts(model=nn.Linear(1, 1), extra=dict(values)), tmp_path / "i")
    live: dict[str, Any] = {"epoch": 0, "name": "", "flag": False, "best": 3, "f": 0.0, "b": b"", "t": (), "d": {}}
    load(Parts(model=nn.Linear(1, 1), extra=live), path)
    assert live == values
    assert {key: type(value) for key, value in live.items()} == {key: type(value) for key, value in values.items()}


def test_containers_and_tensors_that_others_hold_are_filled_in_place(tmp_path: Path) -> None:
    path = save(Parts(model=nn.Linear(1, 1), extra={"ema": {"w": torch.ones(2)}, "log": [1, 2, 3]}), tmp_path / "i")
    tensor, log = torch.zeros(2), [0]
    inner: dict[str, Any] = {"w": tensor, "stale": 1}
    load(Parts(model=nn.Linear(1, 1), extra={"ema": inner, "log": log}), path)
    assert inner == {"w": tensor}
    assert tensor.tolist() == [1.0, 1.0]
    assert log == [1, 2, 3]


def test_a_generator_in_extra_goes_on_where_it_was(tmp_path: Path) -> None:
    def build(seed: int) -> tuple[torch.Generator, Parts]:
        generator = torch.Generator().manual_seed(seed)
        return generator, Parts(model=nn.Linear(1, 1), extra={"order": generator})

    (saved, parts), (live, live_parts) = build(1), build(2)
    torch.randperm(5, generator=saved)
    load(live_parts, save(parts, tmp_path / "i"))
    assert torch.equal(torch.randperm(9, generator=live), torch.randperm(9, generator=saved))


def test_names_that_read_alike_do_not_collide(tmp_path: Path) -> None:
    extra = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1), 1: torch.full((1,), 2.0), "1": torch.full((1,), 3.0)}}
    live: dict[str, Any] = {}
    load(Parts(model=nn.Linear(1, 1), extra=live), save(Parts(model=nn.Linear(1, 1), extra=extra), tmp_path / "i"))
    assert (live["a.b"].item(), live["a"]["b"].item(), live["a"][1].item(), live["a"]["1"].item()) == (0, 1, 2, 3)


def _with_model(live: Tiny, model: nn.Module) -> dict[str, Any]:
    return {**live.named(), "model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def _wider(live: Tiny) -> dict[str, Any]:
    return _with_model(live, nn.Sequential(nn.Linear(2, 9), *list(live.model.children())[1:]))


def _other_dtype(live: Tiny) -> dict[str, Any]:
    live.model.bfloat16()
    return live.named()


def _renamed(live: Tiny) -> dict[str, Any]:
    layers = list(live.model.children())
    return {**live.named(), "model": nn.Sequential(*layers[:3], nn.Sequential(*layers[3:]))}


def _tied(live: Tiny) -> dict[str, Any]:
    layers: list[Any] = list(live.model.children())
    layers.append(nn.Linear(3, 1, bias=False))
    layers[-1].weight = layers[4].weight
    return {**live.named(), "model": nn.Sequential(*layers)}


def _other_groups(live: Tiny) -> dict[str, Any]:
    parameters = list(live.model.parameters())
    groups: list[dict[str, Any]] = [{"params": parameters[:1]}, {"params": parameters[1:]}]
    return {**live.named(), "optimizer": torch.optim.AdamW(groups)}


def _other_order(live: Tiny) -> dict[str, Any]:
    return {**live.named(), "optimizer": torch.optim.AdamW(list(live.model.parameters())[::-1])}


CHANGES: dict[str, Callable[[Tiny], dict[str, Any]]] = {
    "shape": _wider,
    "dtype": _other_dtype,
    "renamed": _renamed,
    "tied": _tied,
    "groups": _other_groups,
    "order": _other_order,
    "no scheduler": lambda live: {**live.named(), "lr_scheduler": None},
    "a scaler": lambda live: {**live.named(), "scaler": torch.amp.GradScaler("cpu")},
    "an extra": lambda live: {**live.named(), "extra": {"a": 1, "b": 2}},
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("shape", r"model\.0\.weight: shape \(8, 2\) in the checkpoint, \(9, 2\) here"),
        ("dtype", r"model\.0\.bias: torch\.float32 in the checkpoint, torch\.bfloat16 here"),
        ("renamed", r"model\.3\.0\.bias: missing.*model\.3\.weight: in the checkpoint, unexpected"),
        ("tied", "tied parameters are {} in the checkpoint and {'5.weight': '4.weight'} here"),
        ("groups", "optimizer: 1 groups in the checkpoint, 2 here"),
        ("order", "optimizer group 0: other parameters, or in another order"),
        ("no scheduler", "lr_scheduler: in the checkpoint, unexpected here"),
        ("a scaler", "scaler: missing in the checkpoint"),
        ("an extra", r"extra\.b: missing in the checkpoint"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_before_anything_is_written(
    tmp_path: Path, change: str, said: str
) -> None:
    path = save(_trained().parts(extra={"a": 5}), tmp_path / "i")
    live = tiny(seed=9)
    parts = Parts(**{"extra": {"a": 1}, **CHANGES[change](live)})
    model = parts.models()
    assert isinstance(model, nn.Module)
    before = [raw(tensor) for tensor in model.state_dict().values()], live.digest()
    with pytest.raises(StateMismatchError, match=said):
        checked(parts, path)
    assert ([raw(tensor) for tensor in model.state_dict().values()], live.digest()) == before


def test_another_world_size_is_refused_with_both_numbers(tmp_path: Path) -> None:
    snapshot = capture(Parts(model=nn.Linear(1, 1)), rank=0, world=4)
    path = snapshot_file(tmp_path / "i", snapshot.tensors, snapshot.document, METADATA)
    with pytest.raises(WorldMismatchError, match="4 ranks and this job has 2"):
        check(Parts(model=nn.Linear(1, 1)), {0: Image(path, path.stat().st_size)}, rank=0, world=2)


def test_a_shard_that_was_not_given_is_named(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    snapshot = capture(Parts(model=model), rank=0, world=1)
    document = json.loads(snapshot.document)
    document["model"]["params"]["weight"]["rank"] = 1
    path = snapshot_file(tmp_path / "i", snapshot.tensors, json.dumps(document).encode())
    with pytest.raises(StateMismatchError, match=r"model\.weight: the shard of rank 1 was not given"):
        checked(Parts(model=model), path)


def test_the_random_streams_go_on_where_they_were() -> None:
    def draw() -> tuple[object, ...]:
        return random.random(), random.gauss(0, 1), np.random.randn(3).tolist(), torch.randn(3).tolist()  # noqa: NPY002 - the global stream

    random.gauss(0, 1)  # leaves a second value waiting
    np.random.randn(1)  # noqa: NPY002 - likewise
    state = streams([])
    first = draw()
    set_streams(state, [])
    assert draw() == first


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"dataloader": [1, 2]}, "dataloader is a list without state_dict"),
        ({"lr_scheduler": 3}, "lr_scheduler is a int without"),
        ({"extra": 3}, "extra is a int"),
        ({"optimizer": nn.Linear(1, 1)}, "optimizer is a Linear"),
    ],
    ids=str,
)
def test_a_part_of_the_wrong_kind_is_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Parts(**{"model": nn.Linear(1, 1), **more}).check()


def test_an_unsupported_value_is_refused_by_its_path() -> None:
    with pytest.raises(UnsupportedLeafError, match=r"^extra\.a\.1: a builtins\.object"):
        capture(Parts(model=nn.Linear(1, 1), extra={"a": [1, object()]}), rank=0, world=1)
