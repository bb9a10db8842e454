"""What the hook calls a step: accumulated gradients, the last step of a job, and states that become odd on the way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.fake_sidecar import FakeSidecar
from tests.support.tiny_trainer import Tiny, tiny
from torch import nn

from toprope.trainer_hooks import Checkpointer, HookError, wire


@pytest.fixture
def sidecar(memory_dir: Path) -> Iterator[FakeSidecar]:
    with FakeSidecar(memory_dir / "s") as fake:
        yield fake


def hook(sidecar: FakeSidecar, trainer: Tiny, *, strict: bool = False) -> Checkpointer:
    return Checkpointer(job="j", socket=sidecar.socket_path, strict=strict, **trainer.named())


def end_step(checkpointer: Checkpointer, step: int) -> None:
    """End a step when there is a slot for it; the first of a process shows how large one must be."""
    session, saver = checkpointer._session, checkpointer._saver
    assert session is not None
    assert saver is not None
    if saver._announced_bytes:
        with session._news:
            assert session._news.wait_for(lambda: bool(session.slots._free), 20)
    checkpointer.end_step(step)


def train(checkpointer: Checkpointer, trainer: Tiny, *, last: int) -> int:
    """Train from where the job stands to the last step; return how many steps that took."""
    first = checkpointer.restore() + 1
    for step in range(first, last + 1):
        trainer.step()
        end_step(checkpointer, step)
    assert checkpointer.close()
    return last + 1 - first


@pytest.mark.fault("B48")
def test_a_job_that_is_at_its_last_step_ends_well_and_saves_nothing(sidecar: FakeSidecar) -> None:
    trainer = tiny()
    assert train(hook(sidecar, trainer), trainer, last=4) == 4
    image, sealed = sidecar.images[4, 0], len(sidecar.kinds(wire.Sealed))
    again = tiny(seed=9)
    checkpointer = hook(sidecar, again)
    assert train(checkpointer, again, last=4) == 0
    assert (checkpointer.stats.snapshots, len(sidecar.kinds(wire.Sealed))) == (0, sealed)
    assert sidecar.images[4, 0] == image
    assert again.digest() == trainer.digest()


class Accumulating:
    """Updates once in so many micro-batches; a step ends only there."""

    def __init__(self, seed: int, *, window: int) -> None:
        self.window, self.tiny = window, tiny(seed)

    def step(self) -> None:
        self.tiny.optimizer.zero_grad()
        for _ in range(self.window):
            ids = self.tiny.data.next().float()
            (self.tiny.net(torch.stack([ids, ids], dim=1)) ** 2).mean().backward()
        self.tiny.optimizer.step()
        self.tiny.schedule.step()


@pytest.mark.fault("B47")
def test_a_snapshot_is_of_the_edge_of_a_window_of_accumulated_gradients(sidecar: FakeSidecar) -> None:
    """The job is killed in the middle of a window; what was accumulated there is computed again."""
    reference = Accumulating(1, window=4)
    for _ in range(4):
        reference.step()
    expected = reference.tiny.digest()
    saved = Accumulating(1, window=4)  # which seeds all streams anew
    checkpointer = hook(sidecar, saved.tiny)
    assert checkpointer.restore() == 0
    for step in (1, 2):
        saved.step()
        end_step(checkpointer, step)
    for _ in range(2):  # micro-batches 9 and 10
        saved.tiny.data.next()
    checkpointer.close()
    live = Accumulating(9, window=4)
    checkpointer = hook(sidecar, live.tiny)
    assert checkpointer.restore() == 2
    for step in (3, 4):
        live.step()
        end_step(checkpointer, step)
    checkpointer.close()
    assert saved.tiny.data.seen[:8] + live.tiny.data.seen == reference.tiny.data.seen
    assert live.tiny.digest() == expected


def test_a_state_that_becomes_one_that_cannot_be_kept_costs_snapshots_and_no_training(sidecar: FakeSidecar) -> None:
    trainer = tiny()
    checkpointer = hook(sidecar, trainer)
    assert checkpointer.restore() == 0
    trainer.step()
    checkpointer.end_step(1)
    trainer.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})  # of no model that the hook knows
    for step in (2, 3):
        trainer.step()
        end_step(checkpointer, step)
    assert checkpointer.stats.skipped["unsupported value"] == 2
    assert 2 not in {step for step, _ in sidecar.images}
    checkpointer.close("nothing")


def test_strict_makes_an_error_of_it(sidecar: FakeSidecar) -> None:
    trainer = tiny()
    checkpointer = hook(sidecar, trainer, strict=True)
    assert checkpointer.restore() == 0
    trainer.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(HookError, match="is not in the model"):
        checkpointer.end_step(1)
    checkpointer.close("nothing")
