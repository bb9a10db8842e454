"""What the hook calls a step: accumulated gradients, the last step of a job, and states that become odd on the way."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.fake_sidecar import FakeSidecar
from tests.support.tiny_trainer import Tiny, raw, tiny
from torch import nn

from toprope.trainer_hooks import Checkpointer, HookError
from toprope.trainer_hooks.image.shard import Image
from toprope.trainer_hooks.link import wire


@pytest.fixture
def sidecar(memory_dir: Path) -> Iterator[FakeSidecar]:
    with FakeSidecar(memory_dir / "s") as fake:
        yield fake


def hook(sidecar: FakeSidecar, trainer: Tiny, **more: Any) -> Checkpointer:  # noqa: ANN401 - as the Checkpointer has it
    return Checkpointer(job="j", socket=sidecar.socket_path, **trainer.named(), **more)


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


@pytest.mark.fault("B47")
@pytest.mark.parametrize("window", [4, 3])
def test_a_resume_with_another_window_loses_and_doubles_no_sample_and_is_told_of_the_change(
    sidecar: FakeSidecar, caplog: pytest.LogCaptureFixture, window: int
) -> None:
    """The job is killed at micro-batch 10 of windows of 4; its newest snapshot is of the edge, at 8."""
    reference = Accumulating(1, window=4)
    for _ in range(2):
        reference.step()
    reference.window = window
    for _ in range(4):
        reference.step()
    saved = Accumulating(1, window=4)
    checkpointer = hook(sidecar, saved.tiny, extra={"accumulation": saved.window})
    assert checkpointer.restore() == 0
    for step in (1, 2):
        saved.step()
        end_step(checkpointer, step)
    for _ in range(2):  # micro-batches 9 and 10
        saved.tiny.data.next()
    checkpointer.close()
    live = Accumulating(9, window=window)
    extra = {"accumulation": window}
    checkpointer = hook(sidecar, live.tiny, extra=extra)
    with caplog.at_level(logging.INFO, "toprope"):
        assert checkpointer.restore() == 2
    told = [line for line in caplog.messages if "accumulation" in line]
    assert told == ([] if window == 4 else ["extra.accumulation was 3 here and is 4 now, as in the checkpoint"])
    assert extra == {"accumulation": 4}
    for step in range(3, 7):
        live.step()
        end_step(checkpointer, step)
    checkpointer.close()
    assert saved.tiny.data.seen[:8] + live.tiny.data.seen == reference.tiny.data.seen
    assert live.tiny.digest() == reference.tiny.digest()


def test_slots_that_are_read_late_hold_the_bytes_of_their_own_step(sidecar: FakeSidecar, tmp_path: Path) -> None:
    """A peer that is slow has a slot for long: the steps that find none are skipped, and none is a blend."""
    sidecar.lend = sidecar.lend_again = False
    trainer = tiny()
    checkpointer = hook(sidecar, trainer)
    assert checkpointer.restore() == 0
    trainer.step()
    checkpointer.end_step(1)  # which shows how large a slot must be
    sidecar.lend_slots()
    session = checkpointer._session
    assert session is not None
    with session._news:
        assert session._news.wait_for(lambda: len(session.slots._free) == sidecar.slot_count, 20)
    golden = {}
    for step in range(2, 8):
        trainer.step()
        checkpointer.end_step(step)
        golden[step] = {name: raw(tensor) for name, tensor in trainer.model.state_dict().items()}
    sidecar.wait_image(4)
    found = {}
    for number in range(sidecar.slot_count):
        path = tmp_path / str(number)
        path.write_bytes(sidecar.slot(0, number).data.read_bytes())  # only now, after the last step
        image = Image(path, path.stat().st_size)
        found[int(image.metadata["step"])] = {name: raw(image.tensor(f"model.{name}")) for name in golden[2]}
    assert found == {step: golden[step] for step in (2, 3, 4)}
    assert checkpointer.stats.skipped == {"no free slot": 4}
    checkpointer.close("nothing")


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
