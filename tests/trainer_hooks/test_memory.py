"""What a capture remembers of the one before never shows: each change of a tensor is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.tiny_trainer import Tiny, tiny
from torch import nn

from toprope.trainer_hooks.capture import state
from toprope.trainer_hooks.capture.state import Memory, Parts, Snapshot, capture


def _set(trainer: Tiny, tensor: torch.Tensor) -> None:
    last: Any = trainer.model[-1]  # type: ignore[index]
    last.bias.data = tensor


def _turn(trainer: Tiny) -> None:
    first: Any = trainer.model[0]  # type: ignore[index]
    first.weight.data = first.weight.detach().t().contiguous().t()


def _drop(trainer: Tiny, extra: dict[str, Any]) -> None:
    del extra["gone"]
    trainer.optimizer.state.pop(trainer.optimizer.param_groups[0]["params"][0])


def _grow(trainer: Tiny, _: dict[str, Any]) -> None:
    more = nn.Linear(3, 2)
    trainer.model.add_module("more", more)
    trainer.optimizer.add_param_group({"params": list(more.parameters()), "lr": 0.5})


CHANGES: dict[str, Callable[[Tiny, dict[str, Any]], object]] = {
    "nothing": lambda _trainer, _extra: None,
    "a step": lambda trainer, _: trainer.step(),
    "new storage": lambda trainer, _: _set(trainer, torch.full((1,), 7.0)),
    "new shape": lambda trainer, _: _set(trainer, torch.arange(4.0)),
    "new dtype": lambda trainer, _: _set(trainer, torch.ones(1, dtype=torch.float64)),
    "new strides": lambda _, extra: extra.update(t=torch.arange(6.0).reshape(2, 3).t()),
    "a weight's new strides": lambda trainer, _: _turn(trainer),
    "a key gone": _drop,
    "a key more": lambda _, extra: extra.update(more=torch.ones(2)),
    "a tensor moved": lambda _, extra: extra.update(moved={"t": extra.pop("t")}),
    "two names alike": lambda _, extra: extra.update({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}),
    "a group added": _grow,
    "new state": lambda trainer, _: trainer.optimizer.state[trainer.model[0].weight].update(new=torch.ones(3)),  # type: ignore[index]
    "frozen": lambda trainer, _: trainer.model.requires_grad_(False),  # noqa: FBT003 - its signature
}


def _same(found: Snapshot, expected: Snapshot) -> None:
    assert found.document == expected.document
    assert (found.pieces, found.updated_by) == (expected.pieces, expected.updated_by)
    assert list(found.tensors) == list(expected.tensors)
    for name, tensor in expected.tensors.items():
        kept = found.tensors[name]
        live = not name.startswith("rng.")  # each capture takes the streams anew
        assert (kept.dtype, kept.shape) == (tensor.dtype, tensor.shape)
        assert not live or kept.data_ptr() == tensor.data_ptr()
        assert kept.stride() == tensor.stride()


@pytest.mark.parametrize("change", CHANGES)
def test_a_capture_with_a_memory_equals_one_without(change: str) -> None:
    trainer = tiny()
    trainer.step()
    extra: dict[str, Any] = {"t": torch.arange(6.0).reshape(3, 2), "gone": torch.ones(1)}
    parts = Parts(**trainer.named(), extra=extra)
    memory = Memory()
    capture(parts, rank=0, world=1, memory=memory)
    before = capture(parts, rank=0, world=1, memory=memory)
    CHANGES[change](trainer, extra)
    for _ in range(2):
        _same(capture(parts, rank=0, world=1, memory=memory), capture(parts, rank=0, world=1))
    after = capture(parts, rank=0, world=1, memory=memory)
    assert (after.form is before.form) == (change in {"nothing", "a step", "new storage"})


def test_only_what_changed_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = tiny()
    trainer.step()
    extra = {"t": torch.ones(2)}
    parts, memory = Parts(**trainer.named(), extra=extra), Memory()
    looked: list[str] = []
    monkeypatch.setattr(state, "check_tensor", lambda name, _tensor: looked.append(name))
    capture(parts, rank=0, world=1, memory=memory)
    assert len(looked) > 10
    looked.clear()
    trainer.step()
    extra["t"] = torch.ones(3)
    capture(parts, rank=0, world=1, memory=memory)
    assert looked == ["extra.t"]


def test_what_is_gone_is_forgotten() -> None:
    extra, memory = {"once": torch.ones(1)}, Memory()
    parts = Parts(model=nn.Linear(1, 1), extra=extra)
    capture(parts, rank=0, world=1, memory=memory)
    extra.clear()
    capture(parts, rank=0, world=1, memory=memory)
    assert "extra.once" not in memory.known
