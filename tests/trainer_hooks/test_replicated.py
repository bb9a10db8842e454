"""``replicated=[...]``: plain tensors that are stored once for all ranks, and the check that they are the same."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.fitted_states import Files, fitted, saved
from tests.support.tiny_trainer import assert_same_tensor
from torch import nn

from toprope.trainer_hooks.capture.replicated import check_equal, check_on_all
from toprope.trainer_hooks.capture.state import Parts
from toprope.trainer_hooks.errors import UsageError
from toprope.trainer_hooks.image.shard import Image
from toprope.trainer_hooks.launch import World
from toprope.trainer_hooks.restore.apply import apply


class Layer(nn.Module):
    """A slice of a weight that is this rank's own, a router that all have, and many numbers that all have."""

    def __init__(self, rank: int, numbers: int = 3) -> None:
        super().__init__()
        self.slice = nn.Parameter(torch.full((4, 8), float(rank)))
        self.router = nn.Parameter(torch.arange(32.0))
        self.gate = nn.Parameter(torch.arange(32.0) + 1)
        self.register_buffer("table", torch.arange(16.0))
        self.scales = nn.ParameterList([nn.Parameter(torch.tensor(float(number))) for number in range(numbers)])


SHARED = ("router", "gate", "table", "scales.*")


def trained(rank: int, numbers: int = 3) -> dict[str, Any]:
    """Return a trainer whose optimizer has moments, the same on all ranks for what is shared."""
    model = Layer(rank, numbers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "replicated": SHARED}


def tensors(parts: dict[str, Any]) -> dict[str, torch.Tensor]:
    named = dict(parts["model"].state_dict())
    for name, parameter in parts["model"].named_parameters():
        named |= {f"{name}.{key}": value for key, value in parts["optimizer"].state[parameter].items()}
    return named


def test_what_is_declared_is_stored_once_split_among_the_ranks(tmp_path: Path) -> None:
    source = saved(tmp_path, [trained(0), trained(1)])
    stored = [set(image.extents) for image in source.heads(range(2)).values()]
    for name in ("router", "gate", "table", "scales.0", "scales.2"):
        assert [f"model.{name}" in one for one in stored].count(True) == 1, name
    assert all({"model.router", "model.gate"} & one for one in stored), "split"
    assert all("model.slice" in one for one in stored), "each its own"


@pytest.mark.parametrize("rank", [0, 1])
def test_in_the_same_layout_it_comes_back_on_each_rank_with_its_moments(tmp_path: Path, rank: int) -> None:
    source = saved(tmp_path, [trained(0), trained(1)])
    live = trained(9)
    with torch.no_grad():
        for value in tensors(live).values():
            value.fill_(7)
    apply(fitted(source, rank=rank, world=2, **live).loaded)
    for name, value in tensors(trained(rank)).items():
        assert_same_tensor(tensors(live)[name], value)


def test_it_has_a_place_on_another_number_of_ranks(tmp_path: Path) -> None:
    def without_slice(model: Layer) -> dict[str, Any]:
        del model.slice
        return {"model": model, "replicated": SHARED}

    source, live = saved(tmp_path, [without_slice(Layer(rank)) for rank in range(3)]), Layer(9)
    with torch.no_grad():
        live.router.zero_()
        live.scales[2].zero_()
    apply(fitted(source, **without_slice(live)).loaded)
    assert_same_tensor(live.router, Layer(0).router)
    assert_same_tensor(live.scales[2], Layer(0).scales[2])


class Counted(Files):
    """Counts what is asked for: of how many shards, and how many bytes of tensors."""

    def __init__(self, files: Files) -> None:
        super().__init__(files.paths)
        self.asked: dict[int, int] = {}

    def whole(self, rank: int) -> Image:
        image = super().whole(rank)
        self.asked[rank] = sum(extent.bytes for extent in image.extents.values())
        return image

    def with_tensors(self, names: Mapping[int, set[str]]) -> Mapping[int, Image]:
        found = super().with_tensors(names)
        for rank, image in found.items():
            self.asked[rank] = sum(image.extents[name].bytes for name in names[rank])
        return found


@pytest.mark.fault("B147")
def test_a_rank_reads_its_own_shard_and_one_other_for_all_the_numbers_that_ranks_share(tmp_path: Path) -> None:
    world, numbers = 8, 200
    shared = {"replicated": ("scales.*",)}
    source = saved(tmp_path, [trained(rank, numbers) | shared for rank in range(world)])
    for rank in range(world):
        counted, live = Counted(source), trained(9, numbers) | shared
        apply(fitted(counted, rank=rank, world=world, **live).loaded)
        assert set(counted.asked) == {0, rank}
        if rank:
            assert counted.asked[0] == numbers * 4 * torch.float32.itemsize, "number, two moments and a count"
        assert_same_tensor(live["model"].slice, trained(rank)["model"].slice)
        assert_same_tensor(live["model"].scales[199], trained(rank, numbers)["model"].scales[199])


# The check


@dataclass(frozen=True)
class Beside(World):
    """A rank in a thread beside others."""

    meeting: threading.Barrier = field(default_factory=lambda: threading.Barrier(1))
    said: dict[int, Any] = field(default_factory=dict)

    def gather(self, message: Any) -> list[Any]:  # noqa: ANN401 - JSON
        self.said[self.rank] = message
        self.meeting.wait(10)
        found = [self.said[rank] for rank in range(self.size)]
        self.meeting.wait(10)
        return found


def together(ranks: Sequence[Parts], check: Any) -> list[str]:  # noqa: ANN401 - a check
    """Return what the check of each rank said, all at once."""
    meeting, said = threading.Barrier(len(ranks)), dict[int, Any]()

    def one(rank: int) -> str:
        try:
            check(Beside(rank, len(ranks), meeting, said), ranks[rank])
        except UsageError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, range(len(ranks))))


def equal(world: World, parts: Parts) -> None:
    check_equal(world, parts, 5)


def parts_of(ranks: Iterable[int], **more: Any) -> list[Parts]:  # noqa: ANN401 - parts of a trainer
    return [Parts(**(trained(rank) | more)) for rank in ranks]


def test_ranks_that_have_the_same_agree() -> None:
    assert together(parts_of(range(3)), check_on_all) == ["", "", ""]
    assert together(parts_of(range(3)), equal) == ["", "", ""]


@pytest.mark.parametrize("what", ["router", "table", "router.exp_avg", "scales.1.step"])
def test_what_differs_is_named_with_its_ranks_on_all_of_them(what: str) -> None:
    several = [trained(rank) for rank in range(3)]
    with torch.no_grad():
        tensors(several[1])[what].view(-1)[0].add_(1)
    said = together([Parts(**one) for one in several], equal)
    name = f"optimizer.state.{what}" if "." in what else f"model.{what}"
    assert len(set(said)) == 1
    assert f"replicated: {name} (unlike rank 0: 1): differs between ranks after step 5. Leave out of" in said[0]


def test_what_each_has_of_its_own_may_differ_if_it_is_not_declared() -> None:
    said = together(parts_of(range(2), replicated=("*",)), equal)
    assert "model.slice (unlike rank 0: 1)" in said[0]


def test_what_is_not_on_all_ranks_in_one_form_is_refused_at_once() -> None:
    more = [trained(0, numbers=3), trained(1, numbers=4)]
    said = together([Parts(**one) for one in more], check_on_all)
    assert said[0] == said[1]
    assert "replicated: scales.3 (unlike rank 0: 1): is not on all ranks in one form" in said[0]


def test_a_pattern_that_names_nothing_on_any_rank_is_refused() -> None:
    stages = [Parts(model={"a": nn.Linear(1, 1)}, replicated=("x.*",)), Parts(model={"b": nn.Linear(1, 1)})]
    said = together([stages[0], Parts(model=stages[1].model, replicated=("x.*",))], check_on_all)
    assert said == ["replicated: x.* names no plain parameter or buffer of any rank"] * 2


def test_digests_of_every_dtype_and_stride_can_be_taken() -> None:
    for tensor in (torch.ones(2, dtype=torch.bfloat16), torch.ones(0), torch.ones(2, 3).t(), torch.ones(2, 2) * 1j):
        module = nn.Module()
        module.register_buffer("b", tensor)
        assert together([Parts(model=module, replicated=("b",))] * 2, equal) == ["", ""]
