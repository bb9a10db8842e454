"""Tiny trainers, one for each way to be parallel; all ranks build the same kind.

Each draws its data from torch's stream of its rank, so that a restored run only agrees if all of that came back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.support.tiny_trainer import raw
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

WIDTH = 6
CPU = torch.device("cpu")


@dataclass(slots=True, kw_only=True)
class Trainer:
    """What a rank trains. ``forward`` does one forward and backward pass."""

    models: dict[str, nn.Module]
    optimizers: dict[str, torch.optim.Optimizer]
    forward: Callable[[], None]
    schedules: dict[str, torch.optim.lr_scheduler.LRScheduler] = field(default_factory=dict)

    def step(self) -> None:
        """Do one optimizer update."""
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        self.forward()
        for optimizer in self.optimizers.values():
            optimizer.step()
        for schedule in self.schedules.values():
            schedule.step()

    def named(self) -> dict[str, Any]:
        """Return the arguments of a Checkpointer; one model is given as such."""
        if len(self.models) == 1:
            return {"model": next(iter(self.models.values())), "optimizer": next(iter(self.optimizers.values()))}
        return {"model": self.models, "optimizer": self.optimizers, "lr_scheduler": self.schedules}

    def digest(self) -> dict[str, str]:
        """Return a digest of what this rank holds of weights, optimizer state and random stream."""
        return {
            "weights": _digest(tensor for model in self.models.values() for tensor in _tensors_of(model)),
            "optimizer": _digest(tensor for one in self.optimizers.values() for tensor in _state_of(one)),
            "rng": _digest([torch.get_rng_state()]),
        }


def _tensors_of(model: nn.Module) -> Iterator[Tensor]:
    return (local(tensor) for tensor in (*model.parameters(), *model.buffers()))


def _state_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    for group in optimizer.param_groups:
        yield torch.tensor([float(group["lr"])])
        for parameter in group["params"]:
            for _, value in sorted(inner.state.get(parameter, {}).items()):
                yield local(value)


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor."""
    with torch.no_grad():
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _digest(tensors: Any) -> str:  # noqa: ANN401 - tensors
    hashed = hashlib.sha256()
    for tensor in tensors:
        hashed.update(repr((tensor.dtype, tuple(tensor.shape))).encode() + raw(tensor))
    return hashed.hexdigest()


class Scale(nn.Module):
    """One weight, which is too few for two ranks: the shards of the others are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


def mlp(depth: int = 2) -> nn.Sequential:
    """Return layers of odd sizes, so that some shards are uneven and some empty, and one that normalises."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(WIDTH, 7), nn.ReLU(), Scale(), nn.Linear(7, WIDTH), nn.LayerNorm(WIDTH)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def single(model: nn.Module, net: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None) -> Trainer:
    """Return a trainer of one model on data of each rank's own."""
    trained = net or model

    def forward() -> None:
        (trained(torch.randn(4, WIDTH)) ** 2).mean().backward()

    return Trainer(models={"m": trained}, optimizers={"m": optimizer or adamw(trained)}, forward=forward)


def ddp() -> Trainer:
    return single(DistributedDataParallel(mlp(), find_unused_parameters=True))


def zero() -> Trainer:
    net = DistributedDataParallel(mlp(), find_unused_parameters=True)
    return single(net, optimizer=ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=1e-2))


def fsdp1() -> Trainer:
    return single(FullyShardedDataParallel(mlp(), use_orig_params=True, device_id=CPU))


def fsdp1_flat() -> Trainer:
    model = mlp()
    model[0] = FullyShardedDataParallel(model[0], device_id=CPU)
    return single(FullyShardedDataParallel(model, device_id=CPU))


def fsdp1_nested() -> Trainer:
    """Return the same model as ``fsdp1`` in two wrappings instead of one."""
    model = mlp()
    model[0] = FullyShardedDataParallel(model[0], use_orig_params=True, device_id=CPU)
    return single(FullyShardedDataParallel(model, use_orig_params=True, device_id=CPU))


def _sharded(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    for layer in list(model)[:-1]:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def fsdp2() -> Trainer:
    return single(_sharded(mlp(), init_device_mesh("cpu", (distributed.get_world_size(),))))


def hsdp() -> Trainer:
    mesh = init_device_mesh("cpu", (2, distributed.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return single(_sharded(mlp(), mesh))


class Block(nn.Module):
    """What tensor and sequence parallelism split."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 8)
        self.down = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def _tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    for block in model.children():
        parallelize_module(block, mesh, dict(plan))
    return model


def _sequences(model: nn.Module, group: DeviceMesh) -> Callable[[], None]:
    """Return a pass over sequences, of which each rank of the group has its part."""

    def forward() -> None:
        x = torch.randn(2, 4, WIDTH)
        distributed.broadcast(x, group_src=0, group=group.get_group())
        out = model(x.chunk(group.size(), dim=1)[group.get_local_rank()])
        (out**2).mean().backward()

    return forward


def tp_sp() -> Trainer:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("tp",))
    model = _tensor_parallel(nn.Sequential(Block(), Block()), mesh)
    return Trainer(models={"m": model}, optimizers={"m": adamw(model)}, forward=_sequences(model, mesh))


def fsdp2_tp() -> Trainer:
    mesh = init_device_mesh("cpu", (2, distributed.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    model = _tensor_parallel(nn.Sequential(Block(), Block()), mesh["tp"])
    for block in model.children():
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return Trainer(models={"m": model}, optimizers={"m": adamw(model)}, forward=_sequences(model, mesh["tp"]))


class Experts(nn.Module):
    """A dense layer that all ranks share, and an expert that is this rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.expert = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        sent = self.dense(x)
        return _exchanged(self.expert(_exchanged(sent)))


def _exchanged(x: Tensor) -> Tensor:
    return all_to_all_single(torch.empty_like(x), x)  # type: ignore[no-any-return, no-untyped-call]


def expert() -> Trainer:
    model = Experts()
    torch.manual_seed(100 + distributed.get_rank())
    nn.init.normal_(model.expert.weight)
    ignored = ["expert.weight", "expert.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)  # type: ignore[no-untyped-call]
    return single(DistributedDataParallel(model, find_unused_parameters=True))


def _pipelined(stages: dict[str, nn.Module], stage: PipelineStage, *, first: bool, last: bool) -> Trainer:
    schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=mse_loss)
    optimizers: dict[str, torch.optim.Optimizer] = {name: adamw(model) for name, model in stages.items()}
    schedules: dict[str, torch.optim.lr_scheduler.LRScheduler] = {
        name: torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for name, one in optimizers.items()
    }

    def forward() -> None:
        x = torch.randn(4, WIDTH)
        given = (x,) if first else ()
        schedule.step(*given, target=torch.zeros_like(x) if last else None)

    return Trainer(models=stages, optimizers=optimizers, forward=forward, schedules=schedules)


class Parts(nn.Module):
    """Two model parts of one stage, each given to the hook and to an optimizer of its own."""

    def __init__(self, parts: dict[str, nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts.values():
            x = part(x)
        return x


def pipeline() -> Trainer:
    rank, world = distributed.get_rank(), distributed.get_world_size()
    parts: dict[str, nn.Module] = {"lower": mlp(1 + rank), "upper": mlp(1)}
    stage = PipelineStage(Parts(parts), rank, world, CPU)
    return _pipelined(parts, stage, first=rank == 0, last=rank == world - 1)


def pipeline_fsdp2() -> Trainer:
    mesh = init_device_mesh("cpu", (2, distributed.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
    number = mesh["pp"].get_local_rank()
    model = _sharded(mlp(1 + number), mesh["dp"])
    stage = PipelineStage(model, number, 2, CPU, group=mesh["pp"].get_group())
    return _pipelined({"stage": model}, stage, first=number == 0, last=number == 1)


BUILDERS: dict[str, Callable[[], Trainer]] = {
    "ddp": ddp,
    "ddp+zero1": zero,
    "fsdp1": fsdp1,
    "fsdp1-flat": fsdp1_flat,
    "fsdp2": fsdp2,
    "hsdp": hsdp,
    "tp+sp": tp_sp,
    "expert": expert,
    "pipeline": pipeline,
    "fsdp2xtp": fsdp2_tp,
    "pipelinexfsdp2": pipeline_fsdp2,
}


def build(kind: str) -> Trainer:
    """Return a trainer at step 0; each rank then has a random stream of its own."""
    torch.manual_seed(1)
    trainer = BUILDERS[kind]()
    torch.manual_seed(1000 + distributed.get_rank())
    return trainer
