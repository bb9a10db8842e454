"""The structure of a state: names, containers, groups and streams are those of the call, on each rank."""

from __future__ import annotations

import json
import random
from collections import UserList, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.stored_state import restored, stored, verified_images
from tests.support.tiny_trainer import (
    METADATA,
    Tiny,
    assert_same_tensor,
    checked,
    load,
    open_image,
    raw,
    save,
    snapshot_file,
    tiny,
)
from torch import distributed, nn
from torch._C import _distributed_c10d as c10d
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations

from toprope.trainer_hooks.capture.modules import model_state
from toprope.trainer_hooks.capture.spec import spec_of
from toprope.trainer_hooks.capture.state import Parts, capture
from toprope.trainer_hooks.errors import StateMismatchError, UnsupportedLeafError


@pytest.mark.fault("B03")
def test_an_image_keeps_the_values_of_the_call_in_their_containers(tmp_path: Path) -> None:
    tensors = [torch.full((3,), float(number)) for number in range(4)]
    history = deque([tensors[3]])
    extra: dict[str, Any] = {"ema": [tensors[0], (tensors[1], {"x": tensors[2]})], "hist": history}
    path = save(Parts(model=nn.Identity(), extra=extra), tmp_path / "i")
    for tensor in tensors:
        tensor.fill_(99.0)
    history.append(torch.ones(1))
    found: dict[str, Any] = {}
    load(Parts(model=nn.Identity(), extra=found), path)
    first, (second, inner) = found["ema"]
    assert [type(each) for each in (found["ema"], found["ema"][1], inner, found["hist"])] == [list, tuple, dict, deque]
    restored_ones = [first, second, inner["x"], *found["hist"]]
    assert [each.tolist() for each in restored_ones] == [[float(number)] * 3 for number in range(4)]
    extra["ema"][1][1]["y"] = UserList([1])
    with pytest.raises(UnsupportedLeafError, match=r"^extra\.ema\.1\.1\.y: a collections\.UserList can't be kept"):
        capture(Parts(model=nn.Identity(), extra=extra), rank=0, world=1)


class Named(nn.Module):
    """A model with a submodule that is really called ``module``, a block, and layers whose weight is computed."""

    def __init__(self, *, wrapped: bool) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        block: Any = nn.Linear(2, 2)
        self.block: Any = torch.compile(block, backend="eager") if wrapped else block
        self.again = checkpoint_wrapper(nn.Linear(2, 2)) if wrapped else nn.Linear(2, 2)
        self.normed = parametrizations.weight_norm(nn.Linear(2, 2))
        self.turned = parametrizations.orthogonal(nn.Linear(2, 2))

    def forward(self, x: torch.Tensor) -> Any:  # noqa: ANN401 - torch types the attributes of modules loosely
        return self.turned(self.normed(self.again(self.block(self.module(x)))))


@pytest.fixture
def gloo() -> Iterator[None]:
    """A process group of this process alone."""
    distributed.init_process_group("gloo", store=c10d.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def _compiled(model: nn.Module) -> nn.Module:
    compiled: Any = torch.compile(model, backend="eager")
    return compiled  # type: ignore[no-any-return]


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP of compiled": lambda model: nn.parallel.DistributedDataParallel(_compiled(model)),
    "compiled DDP": lambda model: _compiled(nn.parallel.DistributedDataParallel(model)),
    "compiled": _compiled,
}


@pytest.mark.fault("B29")
@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize("how", WRAPPED)
@pytest.mark.parametrize("from_wrapped", [True, False])
def test_a_model_is_restored_with_and_without_its_wrappers(tmp_path: Path, how: str, *, from_wrapped: bool) -> None:
    torch.manual_seed(5)
    wrapped, bare = WRAPPED[how](Named(wrapped=True)), Named(wrapped=False)
    saved, live = (wrapped, bare) if from_wrapped else (bare, wrapped)
    names = set(model_state(bare, world=1).params)
    assert names == set(dict(bare.named_parameters()))  # the bare model's own, `module` and all
    assert set(model_state(wrapped, world=1).params) == names
    assert {"module.weight", "normed.parametrizations.weight.original0"} <= names
    assert spec_of(Parts(model=saved)) == spec_of(Parts(model=live))
    load(Parts(model=live), save(Parts(model=saved), tmp_path / "i"))
    expected, found = model_state(saved, world=1), model_state(live, world=1)
    for name in names:
        assert_same_tensor(found.params[name], expected.params[name])
    x = torch.rand(3, 2)
    assert raw(live(x)) == raw(saved(x))


@pytest.mark.fault("B29")
def test_a_model_of_which_no_name_matches_is_an_error_that_names_all(tmp_path: Path) -> None:
    class Prefixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)  # really so called: not one that was wrapped

    live = Prefixed()
    before = raw(live.module.weight)
    path = save(Parts(model=nn.Linear(2, 2)), tmp_path / "i")
    said = r"model\.module\.bias: missing.*model\.module\.weight: missing.*model\.bias: in the checkpoint, unexpected"
    with pytest.raises(StateMismatchError, match=said):
        checked(Parts(model=live), path)
    assert raw(live.module.weight) == before


def _with_grads(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.25)


@pytest.mark.fault("B33")
def test_plain_sgd_stays_without_state_and_an_empty_group_keeps_its_settings(tmp_path: Path) -> None:
    def build(rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = nn.Linear(2, 2)
        groups: list[dict[str, Any]] = [
            {"params": list(model.parameters())},
            {"params": [], "lr": rate, "betas": (rate / 2, rate / 4)},
        ]
        return model, torch.optim.AdamW(groups, lr=rate)

    (model, optimizer), (live_model, live) = build(0.5), build(0.25)
    _with_grads(model)
    optimizer.step()
    load(Parts(model=live_model, optimizer=live), save(Parts(model=model, optimizer=optimizer), tmp_path / "i"))

    def settings(one: torch.optim.Optimizer) -> list[str]:
        return [repr({k: v for k, v in group.items() if k != "params"}) for group in one.param_groups]

    assert settings(live) == settings(optimizer)
    assert live.param_groups[1]["betas"] == (0.25, 0.125)
    for one, its in ((model, optimizer), (live_model, live)):
        _with_grads(one)
        its.step()
    assert [raw(p) for p in live_model.parameters()] == [raw(p) for p in model.parameters()]

    plain, fresh = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, live_model))
    plain.step()
    load(Parts(model=live_model, optimizer=fresh), save(Parts(model=model, optimizer=plain), tmp_path / "s"))
    assert dict(fresh.state) == {} == fresh.state_dict()["state"]
    _with_grads(live_model)
    fresh.step()


@pytest.mark.fault("B36")
def test_each_rank_gets_its_own_list_under_one_name(tmp_path: Path) -> None:
    def trainers(*, filled: bool) -> list[dict[str, Any]]:
        return [
            {"mine": [(rank, torch.full((rank,), float(rank))) for _ in range(rank + 1)] if filled else [0]}
            for rank in range(4)
        ]

    def parts(extras: list[dict[str, Any]]) -> list[Parts]:
        return [Parts(model=nn.Identity(), extra=extra) for extra in extras]

    saved, found = trainers(filled=True), trainers(filled=False)
    restored(parts(found), verified_images(stored(parts(saved), tmp_path), tmp_path, world=4))
    for rank in range(4):
        assert [number for number, _ in found[rank]["mine"]] == [rank] * (rank + 1)
        for _, tensor in found[rank]["mine"]:
            assert_same_tensor(tensor, torch.full((rank,), float(rank)))


class Mixed:
    """Trains a bfloat16 model, whose float32 master weights the optimizer has."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        self.masters = nn.ParameterList([torch.rand(4, 3), torch.rand(3)])
        self.working = nn.ParameterList([p.detach().bfloat16() for p in self.masters])
        self.optimizer = torch.optim.AdamW(self.masters.parameters(), lr=0.05)
        self.parts = Parts(model={"working": self.working, "masters": self.masters}, optimizer=self.optimizer)

    def step(self) -> float:
        loss: torch.Tensor = ((torch.rand(5, 4).bfloat16() @ self.working[0] + self.working[1]) ** 2).mean()
        torch.autograd.backward(loss)
        for master, working in zip(self.masters, self.working, strict=True):
            master.grad, working.grad = working.grad.float(), None
        self.optimizer.step()
        with torch.no_grad():
            for master, working in zip(self.masters, self.working, strict=True):
                working.copy_(master)
        return float(loss.detach())

    def state(self) -> list[bytes]:
        moments = [raw(value) for state in self.optimizer.state.values() for value in state.values()]
        return [*(raw(p) for p in (*self.masters, *self.working)), *moments, raw(torch.get_rng_state())]


@pytest.mark.fault("B37")
@pytest.mark.parametrize("make", [Mixed, tiny], ids=["master copies", "all parts"])
def test_a_step_is_restored_twice_in_one_process_and_the_losses_after_it_are_the_same(
    tmp_path: Path, make: Callable[[], Mixed | Tiny]
) -> None:
    trainer = make()
    parts = trainer.parts if isinstance(trainer, Mixed) else trainer.parts()
    state = trainer.state if isinstance(trainer, Mixed) else trainer.digest
    losses = [trainer.step() for _ in range(2)]
    path, second = save(parts, tmp_path / "i"), state()
    losses += [trainer.step() for _ in range(3)]
    for _ in range(2):
        load(parts, path)
        assert state() == second
        if isinstance(trainer, Mixed):
            pairs = zip(trainer.masters, trainer.working, strict=True)
            assert all(raw(master.bfloat16()) == raw(working) for master, working in pairs)
        assert [trainer.step() for _ in range(3)] == losses[2:]
    assert len(set(losses)) == 5


def _streams() -> dict[str, Any]:
    return {"numpy": np.random.get_state(), "python": random.getstate()}  # noqa: NPY002 - the global stream


def _draws() -> list[Any]:
    return [np.random.rand(3).tolist(), np.random.randn(3).tolist(), random.random(), random.gauss(0, 1)]  # noqa: NPY002 - see above


@pytest.mark.fault("B40")
def test_streams_in_extra_are_put_back_exactly(tmp_path: Path) -> None:
    np.random.randn(1)  # noqa: NPY002 - leaves a second value waiting
    extra = _streams()
    path = save(Parts(model=nn.Identity(), extra=extra), tmp_path / "i")
    expected = _draws()
    found: dict[str, Any] = {}
    load(Parts(model=nn.Identity(), extra=found), path)
    assert _draws() == expected  # the streams that are always kept
    np.random.set_state(found["numpy"])  # noqa: NPY002 - see above
    random.setstate(found["python"])
    assert _draws() == expected


def _changed(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Write the image anew with another document."""
    image = open_image(path)
    document = image.document()
    change(document)
    tensors = {name: image.tensor(name).clone() for name in image.extents if name != "__document__"}
    return snapshot_file(path.with_name("changed"), tensors, json.dumps(document).encode(), METADATA)


def _spoil(*keys: str | int) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        value: Any = document
        for key in keys[:-1]:
            value = value[key]
        value[keys[-1]] = "!"

    return change


@pytest.mark.fault("B40")
@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("extra", "plain", "numpy", "v", 1, "v"), r"extra\.plain\.numpy\.1: the checkpoint holds a value that"),
        (("extra", "plain", "python", "v", 1, "$"), r"extra\.plain\.python\.1: the checkpoint holds a value that"),
        (("rng", "numpy", "bit_generator"), r"rng\.numpy: not the state of a random stream"),
        (("rng", "python", "version"), r"rng\.python: not the state of a random stream"),
        (("rng", "torch", "name"), "not in the shard of rank 0"),
        (
            ("optimizer", "groups", 0, "settings", "betas", "$"),
            r"optimizer\.groups\.0\.settings\.betas: the checkpoint",
        ),
    ],
    ids=str,
)
def test_a_section_that_cannot_be_read_is_named_and_nothing_is_written(
    tmp_path: Path, keys: tuple[str | int, ...], said: str
) -> None:
    saved, live = tiny(1), tiny(2)
    saved.step()
    path = _changed(save(saved.parts(extra=_streams()), tmp_path / "i"), _spoil(*keys))
    before = live.digest()
    extra: dict[str, Any] = {}
    with pytest.raises(StateMismatchError, match=said):
        checked(live.parts(extra=extra), path)
    assert (live.digest(), extra) == (before, {})


class OwnScaler:
    """A scaler that counts for itself."""

    def __init__(self) -> None:
        self.scale, self._iter, self._last_overflow = 2.0**16, 0, -1

    def update(self, *, overflow: bool) -> None:
        self._iter += 1
        if overflow:
            self.scale, self._last_overflow = self.scale / 2, self._iter

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


@pytest.mark.fault("B46")
@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "that has trained"])
@pytest.mark.parametrize("as_scaler", ["torch", "own"])
def test_loss_scalers_come_back_whole_into_a_process(tmp_path: Path, as_scaler: str, *, trained: bool) -> None:
    def build() -> tuple[torch.amp.GradScaler, OwnScaler, Callable[[], Parts]]:
        theirs, own = torch.amp.GradScaler("cpu"), OwnScaler()

        def parts() -> Parts:  # which of both comes first must not matter
            first, other = (theirs, own) if as_scaler == "torch" else (own, theirs)
            return Parts(model=nn.Linear(1, 1), scaler=first, extra={"other": other})

        return theirs, own, parts

    def train(theirs: torch.amp.GradScaler, own: OwnScaler) -> None:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        theirs.scale(model(torch.ones(1, 1)).sum()).backward()
        theirs.step(optimizer)
        theirs.update()
        own.update(overflow=False)

    theirs, own, parts = build()
    theirs.load_state_dict({**theirs.state_dict(), "scale": 4096.0, "_growth_tracker": 37})
    for overflow in (False, True, False):
        own.update(overflow=overflow)
    path = save(parts(), tmp_path / "i")
    live, live_own, live_parts = build()
    if trained:
        train(live, live_own)
    load(live_parts(), path)
    assert live.state_dict() == theirs.state_dict()
    assert (live.state_dict()["scale"], live.state_dict()["_growth_tracker"]) == (4096.0, 37)
    assert vars(live_own) == vars(own) == {"scale": 2.0**15, "_iter": 3, "_last_overflow": 2}
    for one, its in ((theirs, own), (live, live_own)):
        train(one, its)
    assert live.state_dict() == theirs.state_dict()
    assert live.state_dict()["_growth_tracker"] == 38
    assert vars(live_own) == vars(own)
