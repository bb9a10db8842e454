"""A warm-up before training: nothing of it is left but what settles, and a restart is bit-identical for that."""

from __future__ import annotations

import contextlib
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.fake_sidecar import FakeSidecar
from tests.support.source import ROOT
from tests.support.tiny_trainer import raw, tiny
from tests.support.warming_rank import STOP, WORLD
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

from toprope.chaos.live.forking import ForkServer
from toprope.chaos.live.processes import wait_until
from toprope.chaos.live.ranks import World
from toprope.trainer_hooks import Checkpointer, ElasticSampler, UsageError
from toprope.trainer_hooks.capture.state import Parts
from toprope.trainer_hooks.warmup import warm_up


class Counting(nn.Module):
    """A model with a buffer that no checkpoint has, one that a forward pass replaces, and state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.seen: torch.Tensor
        self.mean: torch.Tensor
        self.register_buffer("seen", torch.zeros(2), persistent=False)
        self.register_buffer("mean", torch.ones(2))
        self.calls = [0]

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.mean = self.mean * 0.5
        self.calls[0] += 1
        return self.layer(values) * self.mean  # type: ignore[no-any-return]

    def get_extra_state(self) -> list[int]:
        return self.calls

    def set_extra_state(self, state: list[int]) -> None:
        self.calls[:] = state


def test_all_that_a_warm_up_touched_is_put_back() -> None:
    trainer = tiny()
    before = trainer.digest()
    buffers = [id(buffer) for buffer in trainer.model.buffers()]

    def run() -> None:
        trainer.step()
        trainer.model.eval()
        trainer.optimizer.param_groups[0]["lr"] = 7.0
        trainer.optimizer.param_groups[0]["new"] = 1

    warm_up(trainer.parts(), run)
    assert trainer.digest() == before
    assert trainer.model.training
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert not trainer.optimizer.state
    assert [id(buffer) for buffer in trainer.model.buffers()] == buffers


def test_a_trainer_that_has_trained_is_put_back_in_the_same_tensors() -> None:
    trainer = tiny()
    trainer.step()
    before, first = trainer.digest(), next(iter(trainer.model.parameters()))
    moment = trainer.optimizer.state[first]["exp_avg"]
    warm_up(trainer.parts(), trainer.step)
    assert trainer.digest() == before
    assert trainer.optimizer.state[first]["exp_avg"] is moment
    trainer.step()
    after = trainer.digest()
    other = tiny()
    other.step()
    other.step()
    assert other.digest() == after


def test_buffers_of_all_kinds_extra_state_and_the_users_own_are_put_back() -> None:
    model, scaler = Counting(), torch.amp.GradScaler("cpu", init_scale=4096.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    extra: dict[str, Any] = {"generator": generator, "best": [1.0], "ema": torch.ones(3), "nested": OrderedDict(a=1)}
    own = [extra[name] for name in extra]
    mean, drawn = model.mean, generator.get_state()

    def run() -> None:
        torch.autograd.backward([scaler.scale(model(torch.ones(2)).sum())])
        scaler.step(optimizer)
        scaler.update(1.0)
        torch.rand(1, generator=generator)
        extra["best"].append(2.0)
        extra["ema"] *= 2
        extra["nested"]["a"] = 2
        extra["more"] = 1

    warm_up(Parts(model=model, optimizer=optimizer, scaler=scaler, extra=extra), run)
    assert (model.seen.tolist(), model.mean.tolist(), model.calls) == ([0.0, 0.0], [1.0, 1.0], [0])
    assert model.mean is mean
    assert scaler.get_scale() == 4096.0
    assert torch.equal(generator.get_state(), drawn)
    assert [value is mine for value, mine in zip(extra.values(), own, strict=True)] == [True] * 4
    assert (extra["best"], extra["nested"]) == ([1.0], OrderedDict(a=1))
    assert raw(extra["ema"]) == raw(torch.ones(3))


@pytest.mark.parametrize("own_generator", [True, False])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_loader_that_has_not_begun_is_not_begun_by_a_warm_up(*, own_generator: bool) -> None:
    model = nn.Linear(1, 1)

    def train(*, warm: bool) -> list[tuple[list[int], float]]:
        torch.manual_seed(3)
        loader = torchdata_loader(torch.Generator().manual_seed(4) if own_generator else None)
        if warm:
            warm_up(Parts(model=model, dataloader=loader), lambda: torch.rand(7))
        return [(ids.tolist(), float(torch.rand(1))) for _ in range(3) for (ids,) in loader]

    assert train(warm=True) == train(warm=False)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_warm_up_that_begins_torchdatas_loader_is_refused() -> None:
    loader = torchdata_loader(None)
    with pytest.raises(UsageError, match="from elsewhere"):
        warm_up(Parts(model=nn.Linear(1, 1), dataloader=loader), lambda: next(iter(loader)))


def torchdata_loader(generator: torch.Generator | None) -> Any:  # noqa: ANN401 - it has no types
    return StatefulDataLoader(TensorDataset(torch.arange(12)), batch_size=4, shuffle=True, generator=generator)


def test_a_warm_up_may_take_its_batch_by_the_elastic_sampler() -> None:
    sampler = ElasticSampler(12, rank=0, world=1)
    data = TensorDataset(torch.arange(12))
    loader = DataLoader(data, batch_size=4, sampler=sampler, generator=torch.Generator())

    def run() -> None:
        sampler.advance(len(next(iter(loader))[0]))

    before = sampler.state_dict()
    warm_up(Parts(model=nn.Linear(1, 1), dataloader=sampler), run)
    assert (sampler.state_dict(), sampler.trained) == (before, False)


def test_a_warm_up_that_fails_is_heard_and_leaves_nothing() -> None:
    trainer = tiny()
    before = trainer.digest()

    def run() -> None:
        trainer.step()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        warm_up(trainer.parts(), run)
    assert trainer.digest() == before


@pytest.mark.parametrize("fresh", [True, False])
def test_a_run_with_a_warm_up_is_the_run_without(memory_dir: Path, *, fresh: bool) -> None:
    def train(name: str, *, warm: bool) -> tuple[int, str]:
        with FakeSidecar(memory_dir / name) as sidecar:
            if not fresh:
                train_two_steps(sidecar)
            trainer = tiny(seed=5)
            checkpointer = Checkpointer(job="j", socket=sidecar.socket_path, **trainer.named())
            begun = checkpointer.restore(warm_up=trainer.step if warm else None)
            for step in (begun + 1, begun + 2):
                trainer.step()
                checkpointer.end_step(step)
            checkpointer.close("nothing")
            return begun, trainer.digest()

    assert train("warm", warm=True) == train("cold", warm=False)
    assert train("again", warm=True)[0] == (0 if fresh else 2)


def train_two_steps(sidecar: FakeSidecar) -> None:
    """Leave a checkpoint of step 2."""
    trainer = tiny()
    checkpointer = Checkpointer(job="j", socket=sidecar.socket_path, **trainer.named())
    checkpointer.restore()
    for step in (1, 2):
        trainer.step()
        checkpointer.end_step(step)
        session = checkpointer._session
        assert session is not None
        with session._news:
            assert session._news.wait_for(lambda: len(session.slots._free) >= 3, 30)  # noqa: B023 - used at once
    checkpointer.close()


@pytest.mark.long
def test_default_ddp_goes_on_bit_for_bit_with_a_warm_up_and_only_then(tmp_path: Path, memory_dir: Path) -> None:
    with contextlib.ExitStack() as stack:
        jobs = {
            name: stack.enter_context(FakeSidecar(memory_dir / name))
            for name in ("warm-whole", "warm-parts", "cold-whole", "cold-parts")
        }
        server = stack.enter_context(ForkServer("tests.support.warming_rank", path=[ROOT]))
        sockets = json.dumps({name: str(job.socket_path) for name, job in jobs.items()})
        ranks = World(
            server=server,
            directory=tmp_path,
            arguments=(sockets,),
            world=WORLD,
            target="tests.support.warming_rank:main",
        )
        ranks.start()
        try:
            ranks.finish(timeout_s=110.0)
        finally:
            ranks.stop()
        found = [json.loads((ranks.out / f"found-{rank}.json").read_text()) for rank in range(WORLD)]
        said = ranks.log(0).read_text()
    assert [one["warm-parts"] == one["warm-whole"] for one in found] == [True] * WORLD
    assert [one["cold-parts"] == one["cold-whole"] for one in found] == [False] * WORLD
    assert said.count("DDP regroups its gradient buckets") == 3  # each cold launch


@pytest.mark.long
def test_default_ddp_goes_on_bit_for_bit_after_a_sigkill_with_a_warm_up(tmp_path: Path, memory_dir: Path) -> None:
    found = {}
    with ForkServer("tests.support.warming_rank", path=[ROOT]) as server:
        for dies in ("dies", "lives"):
            with FakeSidecar(memory_dir / dies) as sidecar:
                ranks = World(
                    server=server,
                    directory=tmp_path / dies,
                    arguments=(str(sidecar.socket_path), dies),
                    world=WORLD,
                    target="tests.support.warming_rank:killed",
                )
                ranks.start()
                try:
                    if dies == "dies":
                        wait_until(lambda: -9 in ranks.statuses().values(), what="the kill", timeout_s=110.0)  # noqa: B023 - used at once
                        ranks.restart()
                    ranks.finish(timeout_s=110.0)
                finally:
                    ranks.stop()
            found[dies] = [json.loads((ranks.out / f"found-{rank}.json").read_text()) for rank in range(WORLD)]
    assert [begun for begun, _ in found["dies"]] == [STOP] * WORLD
    assert [digest for _, digest in found["dies"]] == [digest for _, digest in found["lives"]]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own making, while it compiles
def test_a_warm_up_compiles_all_that_training_needs_and_changes_no_bit(memory_dir: Path) -> None:
    def launch(sidecar: FakeSidecar, *, last: int, seed: int) -> tuple[int, int, str]:
        """Return where it began, how many graphs training compiled after the warm-up, and a digest of the end."""
        torch.compiler.reset()  # as a new process begins
        trainer = tiny(seed)
        trainer.net = torch.compile(trainer.model)  # type: ignore[assignment] # it is called as a module
        hook = Checkpointer(job="j", socket=sidecar.socket_path, **{**trainer.named(), "model": trainer.model})
        begun = hook.restore(warm_up=trainer.step)
        before = counters["stats"]["unique_graphs"]
        assert before > 0
        for step in range(begun + 1, last + 1):
            trainer.step()
            hook.end_step(step)
            session = hook._session
            assert session is not None
            with session._news:
                assert session._news.wait_for(lambda: len(session.slots._free) >= 3, 30)  # noqa: B023 - used at once
        hook.close()
        return begun, counters["stats"]["unique_graphs"] - before, trainer.digest()

    counters.clear()
    with FakeSidecar(memory_dir / "whole") as whole, FakeSidecar(memory_dir / "parts") as parts:
        uninterrupted = launch(whole, last=4, seed=1)
        assert launch(parts, last=2, seed=1)[:2] == (0, 0)
        resumed = launch(parts, last=4, seed=9)
    assert (uninterrupted[:2], resumed[:2]) == ((0, 0), (2, 0))
    assert resumed[2] == uninterrupted[2]
