"""Data position with torchdata's StatefulDataLoader: the order of samples and the random streams go on as they were."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.fake_sidecar import FakeSidecar
from tests.support.tiny_trainer import load, save
from torch import nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

from toprope.trainer_hooks import Checkpointer
from toprope.trainer_hooks.capture.state import Parts

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torch 2.13 warns of its own call
SAMPLES, BATCH = 64, 4
EPOCH = SAMPLES // BATCH


class _Run:
    """A loop over epochs that notes each batch with a number drawn from the global stream, as dropout would draw."""

    def __init__(self, *, own_generator: bool, workers: int = 0) -> None:
        torch.manual_seed(3)
        generator = torch.Generator().manual_seed(4) if own_generator else None
        self.loader = StatefulDataLoader(
            TensorDataset(torch.arange(SAMPLES)),
            batch_size=BATCH,
            shuffle=True,
            generator=generator,
            num_workers=workers,
        )
        self.place = {"epoch": 0, "step": 0}
        self.parts = Parts(model=nn.Linear(1, 1), dataloader=self.loader, extra=self.place)
        self.seen: list[tuple[list[int], float]] = []
        self._batches = self._forever()

    def _forever(self) -> Iterator[list[int]]:
        while True:
            for (ids,) in self.loader:
                yield ids.tolist()
            self.place["epoch"] += 1

    def begin_epoch(self) -> None:
        """Make the iterator of the next epoch, and take nothing from it yet."""
        self.place["epoch"] += 1
        begun = iter(self.loader)

        def rest() -> Iterator[list[int]]:
            for (ids,) in begun:
                yield ids.tolist()
            self.place["epoch"] += 1
            yield from self._forever()

        self._batches = rest()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.seen.append((next(self._batches), float(torch.rand(1))))
            self.place["step"] += 1

    def ids(self, epoch: int) -> list[int]:
        return [number for ids, _ in self.seen[epoch * EPOCH : (epoch + 1) * EPOCH] for number in ids]


@pytest.mark.fault("B41")
@pytest.mark.parametrize("own_generator", [True, False])
@pytest.mark.parametrize("stop", [1, EPOCH - 1, EPOCH + 5])
def test_the_samples_go_on_in_the_same_order(tmp_path: Path, stop: int, *, own_generator: bool) -> None:
    plain = _Run(own_generator=own_generator)
    plain.steps(4 * EPOCH)
    first = _Run(own_generator=own_generator)
    first.steps(stop)
    assert_goes_on(first, plain, tmp_path, own_generator=own_generator)
    orders = [plain.ids(epoch) for epoch in range(4)]
    assert all(sorted(order) == list(range(SAMPLES)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.fault("B43")
@pytest.mark.parametrize("own_generator", [True, False])
@pytest.mark.parametrize(
    "where", ["after the last batch", "before the first of the next", "after the first of the next"]
)
def test_the_end_of_an_epoch_is_neither_trained_again_nor_left_out(
    tmp_path: Path, where: str, *, own_generator: bool
) -> None:
    def run() -> _Run:
        one = _Run(own_generator=own_generator)
        one.steps(EPOCH)
        if where == "before the first of the next":
            one.begin_epoch()
        one.steps(where == "after the first of the next")
        return one

    plain = run()
    plain.steps(4 * EPOCH - len(plain.seen))
    assert plain.place == {"epoch": 3, "step": 4 * EPOCH}
    assert_goes_on(run(), plain, tmp_path, own_generator=own_generator)
    assert all(sorted(plain.ids(epoch)) == list(range(SAMPLES)) for epoch in range(4))


def assert_goes_on(first: _Run, plain: _Run, directory: Path, *, own_generator: bool) -> None:
    """Restore the state of ``first`` in a fresh run, which then sees what the uninterrupted one saw."""
    path = save(first.parts, directory / "i")
    again = _Run(own_generator=own_generator)
    load(again.parts, path)
    assert again.place == first.place
    again.steps(len(plain.seen) - len(first.seen))
    assert first.seen + again.seen == plain.seen
    assert again.place == plain.place


def test_a_loader_that_has_not_begun_is_not_begun_by_the_hook(memory_dir: Path) -> None:
    def run(*, hooked: bool) -> list[tuple[list[int], float]]:
        trainer = _Run(own_generator=False)
        if hooked:
            with FakeSidecar(memory_dir / "s") as sidecar:
                checkpointer = Checkpointer(
                    job="j", model=trainer.parts.model, dataloader=trainer.loader, socket=sidecar.socket_path
                )
                checkpointer.restore()
                trainer.seen.append(([], float(torch.rand(1))))
                for step in range(1, 6):
                    trainer.steps(1)
                    checkpointer.end_step(step)
                checkpointer.close("nothing")
        else:
            trainer.seen.append(([], float(torch.rand(1))))
            trainer.steps(5)
        return trainer.seen

    assert run(hooked=True) == run(hooked=False)
