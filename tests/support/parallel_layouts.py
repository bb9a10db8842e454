"""Trainers of the same few models laid out in many ways, for restores from one layout into another.

Unlike ``parallel_trainers`` they do not have to learn anything: a step moves all weights and makes all optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from tests.support.parallel_trainers import WIDTH, Block, Trainer, _sharded, _tensor_parallel, adamw, mlp
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

STAGES = 4
EXPERTS = 5
CPU = torch.device("cpu")


class Odd(nn.Module):
    """Parameters of which some ranks get less than others, or nothing."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in {"a": (5, 3), "b": (1,), "c": (0, 7), "d": (17,)}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))


class Experts(nn.Module):
    """A layer that all ranks share, and one that is this rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.expert = nn.Linear(WIDTH, WIDTH)


class Numbered(nn.Module):
    """A layer that all ranks share, and experts under their numbers among those of all ranks."""

    def __init__(self, numbers: Iterable[int]) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleDict({str(number): nn.Linear(WIDTH, 3) for number in numbers})


class Stack(nn.Module):
    """The weights of all experts in one tensor, the first dimension of which counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(EXPERTS, WIDTH, 3))


class Stacked(nn.Module):
    """A layer that all ranks share, and a stack of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.experts = Stack()


class Normed(nn.Module):
    """A layer with buffers, which DDP takes from rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3)
        self.norm = nn.BatchNorm1d(3)


def _mesh(names: tuple[str, str]) -> DeviceMesh:
    world = distributed.get_world_size()
    rows = 2 if world % 2 == 0 else 1
    return init_device_mesh("cpu", (rows, world // rows), mesh_dim_names=names)


def _line() -> DeviceMesh:
    return init_device_mesh("cpu", (distributed.get_world_size(),))


def _trainer(models: dict[str, nn.Module], optimizers: dict[str, torch.optim.Optimizer] | None = None) -> Trainer:
    made = optimizers or {name: adamw(model) for name, model in models.items()}

    def forward() -> None:
        """Give each parameter a gradient that is the same on all ranks, as the mean over them is."""
        for model in models.values():
            for _, parameter in sorted(model.named_parameters()):
                parameter.grad = parameter.detach() * 0.5 + 0.25

    schedules: dict[str, torch.optim.lr_scheduler.LRScheduler] = {
        name: torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for name, one in made.items()
    }
    return Trainer(models=models, optimizers=made, forward=forward, schedules=schedules)


def _ddp(model: nn.Module) -> Trainer:
    return _trainer({"m": DistributedDataParallel(model)})


def _zero() -> Trainer:
    net = DistributedDataParallel(mlp())
    return _trainer({"m": net}, {"m": ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=1e-2)})


def _fsdp1(model: nn.Module, **more: Any) -> Trainer:  # noqa: ANN401 - arguments of FSDP
    return _trainer({"m": FullyShardedDataParallel(model, device_id=CPU, **more)})


def _fully(model: nn.Module, mesh: DeviceMesh) -> Trainer:
    fully_shard(model, mesh=mesh)
    return _trainer({"m": model})


def _hsdp() -> Trainer:
    return _trainer({"m": _sharded(mlp(), _mesh(("replicate", "shard")))})


def _blocks() -> nn.Sequential:
    return nn.Sequential(Block(), Block())


def _tp() -> Trainer:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("tp",))
    return _trainer({"m": _tensor_parallel(_blocks(), mesh)})


def _fsdp2_tp() -> Trainer:
    mesh = _mesh(("dp", "tp"))
    model = _tensor_parallel(_blocks(), mesh["tp"])
    for block in model.children():
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return _trainer({"m": model})


def _expert() -> Trainer:
    model = Experts()
    torch.manual_seed(100 + distributed.get_rank())
    nn.init.normal_(model.expert.weight)
    return _ddp_but_for("expert.", model)


def _ddp_but_for(prefix: str, model: nn.Module) -> Trainer:
    """Return a trainer of a model of which DDP leaves some parameters alone."""
    ignored = [name for name, _ in model.named_parameters() if name.startswith(prefix)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)  # type: ignore[no-untyped-call]
    return _ddp(model)


def _numbered(owner: Callable[[int, int], int]) -> Trainer:
    """Return a trainer of the experts of which ``owner`` (of its number, and of the world) is this rank."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    model = Numbered(number for number in range(EXPERTS) if owner(number, world) == rank)
    return _ddp_but_for("experts.", model)


def _stacked() -> Trainer:
    """Return a trainer whose experts are split by their number, and whose other layers are DDP's."""
    model = Stacked()
    model.experts.weights = nn.Parameter(distribute_tensor(model.experts.weights.detach(), _line(), [Shard(0)]))
    return _ddp_but_for("experts.", model)


def _stacked_fsdp2() -> Trainer:
    """Return a trainer whose experts are split by their number and then within each, and all else by FSDP2."""
    model = Stacked()
    mesh = _mesh(("dp", "ep"))
    model.experts.weights = nn.Parameter(distribute_tensor(model.experts.weights.detach(), mesh["ep"], [Shard(0)]))
    fully_shard(model.experts, mesh=mesh["dp"], shard_placement_fn=lambda _: Shard(1))
    fully_shard(model.dense, mesh=_line())
    return _trainer({"m": model})


def _stage_models() -> dict[str, nn.Module]:
    return {f"s{number}": mlp(1 + number % 2) for number in range(STAGES)}


def _pipeline() -> Trainer:
    """Return the stages of this rank, under their numbers in the whole pipeline."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    stages = _stage_models()
    return _trainer({name: model for at, (name, model) in enumerate(stages.items()) if at * world // STAGES == rank})


def _dealt() -> Trainer:
    """Return every n-th stage, as an interleaved schedule deals them out."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    return _trainer({name: model for at, (name, model) in enumerate(_stage_models().items()) if at % world == rank})


def _sharded_over_all(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=_line())
    return model


def _all_stages(wrap: Callable[[nn.Module], nn.Module]) -> Trainer:
    return _trainer({name: wrap(model) for name, model in _stage_models().items()})


def _pipeline_fsdp2() -> Trainer:
    mesh = _mesh(("pp", "dp"))
    rank, world = mesh["pp"].get_local_rank(), mesh["pp"].size()
    mine = {name: model for at, (name, model) in enumerate(_stage_models().items()) if at * world // STAGES == rank}
    for model in mine.values():
        fully_shard(model, mesh=mesh["dp"])
    return _trainer(mine)


LAYOUTS: dict[str, Callable[[], Trainer]] = {
    "single": lambda: _trainer({"m": mlp()}),
    "ddp": lambda: _ddp(mlp()),
    "ddp+zero1": _zero,
    "fsdp1": lambda: _fsdp1(mlp(), use_orig_params=True),
    "fsdp1-flat": lambda: _fsdp1(mlp()),
    "fsdp2": lambda: _fully(mlp(), _line()),
    "hsdp": _hsdp,
    "blocks-ddp": lambda: _ddp(_blocks()),
    "blocks-fsdp1": lambda: _fsdp1(_blocks(), use_orig_params=True),
    "blocks-fsdp2": lambda: _fully(_blocks(), _line()),
    "tp+sp": _tp,
    "fsdp2xtp": _fsdp2_tp,
    "expert": _expert,
    "experts": lambda: _numbered(lambda number, world: number * world // EXPERTS),
    "experts-dealt": lambda: _numbered(lambda number, world: number % world),
    "experts-ddp": lambda: _ddp(Numbered(range(EXPERTS))),
    "experts-fsdp1": lambda: _fsdp1(Numbered(range(EXPERTS)), use_orig_params=True),
    "experts-fsdp2": lambda: _fully(Numbered(range(EXPERTS)), _line()),
    "stacked": _stacked,
    "stackedxfsdp2": _stacked_fsdp2,
    "stacked-ddp": lambda: _ddp(Stacked()),
    "stacked-fsdp1": lambda: _fsdp1(Stacked(), use_orig_params=True),
    "stacked-fsdp2": lambda: _fully(Stacked(), _line()),
    "pipeline": _pipeline,
    "pipelinexfsdp2": _pipeline_fsdp2,
    "odd-fsdp1-flat": lambda: _fsdp1(Odd()),
    "stages-dealt": _dealt,
    "stages-ddp": lambda: _all_stages(DistributedDataParallel),
    "stages-fsdp2": lambda: _all_stages(_sharded_over_all),
    "odd-ddp": lambda: _ddp(Odd()),
    "odd-fsdp2": lambda: _fully(Odd(), _line()),
    "odd-fsdp1": lambda: _fsdp1(Odd(), use_orig_params=True),
    "normed-ddp": lambda: _ddp(Normed()),
    "normed-fsdp2": lambda: _fully(Normed(), _line()),
}


def build(layout: str) -> Trainer:
    """Return a trainer at step 0."""
    torch.manual_seed(1)
    return LAYOUTS[layout]()


def named(trainer: Trainer) -> dict[str, Any]:
    """Return the arguments of a Checkpointer."""
    if set(trainer.models) == {"m"}:
        return {
            "model": trainer.models["m"],
            "optimizer": trainer.optimizers["m"],
            "lr_scheduler": trainer.schedules["m"],
        }
    return {"model": trainer.models, "optimizer": trainer.optimizers, "lr_scheduler": trainer.schedules}


def full(trainer: Trainer) -> dict[str, Tensor]:
    """Return all parameters, buffers and optimizer state as torch joins them, of all ranks together."""
    found: dict[str, Tensor] = {}
    for name, model in trainer.models.items():
        for key, value in _full_of(model, trainer.optimizers[name]).items():
            found[f"{name}.{key}"] = value
        found[f"{name}.lr"] = torch.tensor([float(group["lr"]) for group in trainer.optimizers[name].param_groups])
    every: list[dict[str, Tensor]] = [{} for _ in range(distributed.get_world_size())]
    distributed.all_gather_object(every, found)
    return {name: tensor for one in reversed(every) for name, tensor in one.items()}


def _full_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    if isinstance(model, FullyShardedDataParallel):
        options = StateDictOptions(full_state_dict=True)
        whole: Any = get_optimizer_state_dict(model, optimizer, options=options)
        state = whole["state"]
        params: dict[str, Any] = get_model_state_dict(model, options=options)
        filled = {
            name for name, value in params.items() if value.numel()
        }  # torch keeps a counter of empty ones, or not
        moments = {
            f"{name}.{key}": value for name, one in state.items() if name in filled for key, value in one.items()
        }
        return {name: value.detach().clone() for name, value in {**params, **moments}.items()}
    inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    found = dict(bare.state_dict())
    for name, parameter in bare.named_parameters():
        if not parameter.numel():
            continue
        found |= {f"{name}.{key}": value for key, value in inner.state.get(parameter, {}).items()}
    return {name: _joined(value) for name, value in found.items()}


def _joined(value: Tensor) -> Tensor:
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().clone()
