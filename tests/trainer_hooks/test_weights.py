"""The models alone out of a checkpoint of another job, or of an import: each byte of them, and nothing else."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.support.fake_store import FakeStore
from tests.support.fitted_states import Files, saved
from tests.support.tiny_trainer import Tiny, raw, tiny
from torch import nn

from toprope.store.log.chain import read_log
from toprope.store.transfer.importing import import_source
from toprope.store.transfer.incoming import open_source
from toprope.store.transfer.restore import restore
from toprope.trainer_hooks.capture.names import names_of, union
from toprope.trainer_hooks.capture.state import Parts
from toprope.trainer_hooks.errors import UsageError
from toprope.trainer_hooks.restore.apply import apply
from toprope.trainer_hooks.restore.fitting import fit_weights

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def trained(steps: int = 3) -> Tiny:
    trainer = tiny()
    for _ in range(steps):
        trainer.step()
    return trainer


def take(source: Files, parts: Parts, *, world: int = 1) -> None:
    """Give a rank the weights of a source."""
    apply(fit_weights(parts, source, union([names_of(parts)]), rank=0, world=world).loaded)


def weights(model: nn.Module) -> dict[str, bytes]:
    return {name: raw(tensor) for name, tensor in model.state_dict().items()}


def all_else(trainer: Tiny) -> list[Any]:
    """What is no part of the model: optimizer, schedule, data, random streams."""
    state = [
        [(key, raw(value)) for key, value in sorted(trainer.optimizer.state.get(one, {}).items())]
        for one in trainer.model.parameters()
    ]
    streams = [random.getstate(), raw(torch.get_rng_state())]
    return [state, trainer.schedule.state_dict(), trainer.data.state_dict(), *streams]


def imported(directory: Path, tensors: dict[str, torch.Tensor]) -> Files:
    """Import tensors that others saved, and return the shard that it became."""
    save_file(tensors, directory / "theirs.safetensors")
    store = FakeStore()
    import_source(store, open_source(directory / "theirs.safetensors"), job="theirs", step=7)
    done = restore(store, read_log(store, "theirs"), to=directory / "out")
    return Files([done.directory / name for name in done.files if name.endswith(".safetensors")])


def test_a_trainer_of_another_seed_gets_each_byte_of_the_model_and_keeps_all_else(tmp_path: Path) -> None:
    source = trained()
    files = saved(tmp_path, [source.named()])
    for there in (tiny(2), trained(1)):
        before = all_else(there)
        assert weights(there.model) != weights(source.model)
        take(files, there.parts(extra={"own": 1}))
        assert weights(there.model) == weights(source.model)
        assert all_else(there) == before


def test_the_weights_of_two_ranks_go_to_a_world_of_one_with_no_optimizer(tmp_path: Path) -> None:
    source = trained()
    files = saved(tmp_path, [source.named(), source.named()])
    there = tiny(2)
    take(files, Parts(model=there.net))
    assert weights(there.model) == weights(source.model)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_an_import_gives_its_weights_by_name_bit_for_bit(tmp_path: Path, prefix: str) -> None:
    source = trained()
    tensors = {f"{prefix}{name}": tensor for name, tensor in source.model.state_dict().items()}
    if prefix:
        tensors["optimizer.state.0.weight.exp_avg"] = torch.ones(3)
    there = tiny(2)
    before = all_else(there)
    take(imported(tmp_path, tensors), there.parts())
    assert weights(there.model) == weights(source.model)
    assert all_else(there) == before


def test_tied_weights_of_an_import_are_taken_once_under_either_name(tmp_path: Path) -> None:
    def tied(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
        model["head"].weight = model["embed"].weight
        return model

    source, there = tied(1), tied(2)
    tensors = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    assert len(tensors) == 2
    take(imported(tmp_path, tensors), Parts(model=there))
    assert weights(there) == weights(source)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"0.weight": None}, "model.0.weight: missing in the checkpoint"),
        ({"new": torch.ones(1)}, "model.new: in the checkpoint, unexpected here"),
        ({"0.weight": torch.ones(8, 3)}, r"model.0.weight: shape \(8, 3\) in the checkpoint, \(8, 2\) here"),
        ({"0.bias": torch.ones(8).double()}, "model.0.bias: torch.float64 in the checkpoint, torch.float32 here"),
    ],
    ids=["missing", "unexpected", "shape", "dtype"],
)
def test_an_import_that_does_not_fit_is_refused_by_name_and_nothing_is_written(
    tmp_path: Path, change: dict[str, torch.Tensor | None], text: str
) -> None:
    tensors = {**trained().model.state_dict(), **change}
    files = imported(tmp_path, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    there = tiny(2)
    before = weights(there.model)
    with pytest.raises(UsageError, match=text):
        take(files, there.parts())
    assert weights(there.model) == before
