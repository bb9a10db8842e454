"""The public object against a fake sidecar: real frames, real socket, real slot files."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.fake_sidecar import FakeSidecar
from tests.support.tiny_trainer import Tiny, open_image, raw, tiny
from torch import nn

from toprope.trainer_hooks import (
    Checkpointer,
    HookError,
    RestoreError,
    SidecarUnavailableError,
    SpecMismatchError,
    StateMismatchError,
    SupersededError,
    UnsupportedLeafError,
    UsageError,
)
from toprope.trainer_hooks import (
    checkpointer as checkpointer_module,
)
from toprope.trainer_hooks.image.shard import write_image
from toprope.trainer_hooks.link import sealing, session, wire
from toprope.trainer_hooks.link.session import socket_path
from toprope.trainer_hooks.link.slot import Page, SlotState, read_page, write_page
from toprope.trainer_hooks.restore import entering
from toprope.trainer_hooks.save import saving


@pytest.fixture
def sidecar(memory_dir: Path) -> Iterator[FakeSidecar]:
    with FakeSidecar(memory_dir / "s") as fake:
        yield fake


@pytest.fixture
def made() -> Iterator[list[Checkpointer]]:
    """Checkpointers to close after the test."""
    checkpointers: list[Checkpointer] = []
    yield checkpointers
    for checkpointer in checkpointers:
        checkpointer.close("nothing")


def _hook(sidecar: FakeSidecar, made: list[Checkpointer], trainer: Tiny, **more: object) -> Checkpointer:
    checkpointer = Checkpointer(job="j", socket=sidecar.socket_path, **{**trainer.named(), **more})
    made.append(checkpointer)
    return checkpointer


def _train(trainer: Tiny, checkpointer: Checkpointer, first: int, last: int) -> None:
    for step in range(first, last + 1):
        loss = trainer.step()
        checkpointer.end_step(step, loss=loss)


def _wait_free(checkpointer: Checkpointer, count: int) -> None:
    """Wait until the hook has that many slots to fill."""
    session = checkpointer._session
    assert session is not None
    with session._news:
        assert session._news.wait_for(lambda: len(session.slots._free) >= count, 20)


def _begin(sidecar: FakeSidecar, checkpointer: Checkpointer, trainer: Tiny) -> None:
    """Restore and train step 1, at which there is no slot yet; then there are."""
    sidecar.lend = False
    first = checkpointer.restore() + 1
    _train(trainer, checkpointer, first, first)
    sidecar.lend_slots()
    _wait_free(checkpointer, sidecar.slot_count)


def _leave_step_2(sidecar: FakeSidecar, made: list[Checkpointer], **more: object) -> Tiny:
    """Let a trainer train two steps, of which the second is saved, and end; return it."""
    trainer = tiny()
    checkpointer = _hook(sidecar, made, trainer, **more)
    _begin(sidecar, checkpointer, trainer)
    _train(trainer, checkpointer, 2, 2)
    sidecar.wait_image(2)
    checkpointer.close()
    return trainer


def test_a_new_job_begins_at_0_and_a_restart_at_the_newest_snapshot(
    sidecar: FakeSidecar, made: list[Checkpointer]
) -> None:
    plain = tiny()
    for _ in range(9):
        plain.step()
    trainer = tiny()
    checkpointer = _hook(sidecar, made, trainer)
    _begin(sidecar, checkpointer, trainer)
    for step in range(2, 7):
        _train(trainer, checkpointer, step, step)
        _wait_free(checkpointer, 1)
    sidecar.wait_image(6)
    checkpointer.close()
    again = tiny(seed=7)
    checkpointer = _hook(sidecar, made, again)
    assert checkpointer.restore() == 6
    assert again.digest() == trainer.digest()
    _train(again, checkpointer, 7, 9)
    assert again.digest() == plain.digest()
    assert again.data.seen == plain.data.seen[6:]


def test_a_trainer_that_was_changed_goes_on_as_far_as_it_is_allowed_to(
    sidecar: FakeSidecar, made: list[Checkpointer]
) -> None:
    trainer = _leave_step_2(sidecar, made)
    again = tiny(seed=7)
    again.model.double()
    assert isinstance(again.model, torch.nn.Sequential)
    again.model.append(torch.nn.Linear(1, 1))
    checkpointer = _hook(sidecar, made, again)
    assert checkpointer.restore(partial=True, cast=True) == 2
    for name, tensor in trainer.model.state_dict().items():
        found = again.model.state_dict()[name]
        assert torch.equal(found, tensor.double() if tensor.is_floating_point() else tensor)
    assert checkpointer.report.missing == ("model.5.bias", "model.5.weight")
    assert "model.0.weight: torch.float32 to torch.float64" in checkpointer.report.cast


def test_a_run_with_hooks_is_the_run_without_bit_for_bit(sidecar: FakeSidecar, made: list[Checkpointer]) -> None:
    with_hooks, without = tiny(), None
    checkpointer = _hook(sidecar, made, with_hooks)
    _begin(sidecar, checkpointer, with_hooks)
    _train(with_hooks, checkpointer, 2, 12)
    digest = with_hooks.digest()
    without = tiny()
    for _ in range(12):
        without.step()
    assert without.digest() == digest
    assert checkpointer.stats.snapshots > 0


def test_each_image_is_the_state_of_its_own_step(
    sidecar: FakeSidecar, made: list[Checkpointer], tmp_path: Path
) -> None:
    trainer = tiny()
    checkpointer = _hook(sidecar, made, trainer)
    _begin(sidecar, checkpointer, trainer)
    golden = {}
    for step in range(2, 8):
        _wait_free(checkpointer, 1)
        _train(trainer, checkpointer, step, step)
        golden[step] = raw(trainer.model[0].weight)  # type: ignore[index]
    for step, expected in golden.items():
        path = tmp_path / str(step)
        path.write_bytes(sidecar.wait_image(step))
        image = open_image(path)
        assert raw(image.tensor("model.0.weight")) == expected
        assert image.metadata["step"] == str(step)
        assert image.metadata["attempt_uid"] == sidecar.rounds[0].attempt.uid


def test_a_page_is_writing_then_sealed_and_the_frame_comes_after(
    sidecar: FakeSidecar, made: list[Checkpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: list[SlotState] = []

    def page(path: Path, page: Page) -> None:
        pages.append(page.state)
        write_page(path, page)

    def image(*arguments: Any, **named: Any) -> int:  # noqa: ANN401 - passes all on
        assert pages[-1] is SlotState.WRITING
        return write_image(*arguments, **named)

    monkeypatch.setattr(sealing, "write_page", page)
    monkeypatch.setattr(saving, "write_image", image)
    trainer = tiny()
    checkpointer = _hook(sidecar, made, trainer)
    _begin(sidecar, checkpointer, trainer)
    _train(trainer, checkpointer, 2, 2)
    sidecar.wait_image(2)
    assert pages == [SlotState.WRITING, SlotState.SEALED]
    assert sidecar.states == [(2, SlotState.SEALED)]


def test_only_due_steps_are_saved(memory_dir: Path, made: list[Checkpointer]) -> None:
    with FakeSidecar(memory_dir / "s", every=3) as sidecar:
        trainer = tiny()
        checkpointer = _hook(sidecar, made, trainer)
        _begin(sidecar, checkpointer, trainer)
        _train(trainer, checkpointer, 2, 10)
        sidecar.wait_image(9)
        assert sorted(step for step, _ in sidecar.images) == [3, 6, 9]


def test_a_new_schedule_counts_from_the_step_that_it_names(sidecar: FakeSidecar, made: list[Checkpointer]) -> None:
    trainer = tiny()
    checkpointer = _hook(sidecar, made, trainer)
    _begin(sidecar, checkpointer, trainer)
    attempt = sidecar.rounds[0].attempt
    sidecar.say_desired(attempt=1, uid=attempt.uid, schedule=wire.Schedule(from_step=4, every=2))
    assert checkpointer._session is not None
    session = checkpointer._session
    with session._news:
        assert session._news.wait_for(lambda: session.desired is not None, 10)
    for step in range(2, 9):
        _wait_free(checkpointer, 3)
        _train(trainer, checkpointer, step, step)
    sidecar.wait_image(8)
    assert sorted(step for step, _ in sidecar.images) == [2, 3, 4, 6, 8]


def test_with_no_free_slot_steps_are_skipped_counted_and_said_once(
    sidecar: FakeSidecar, made: list[Checkpointer], caplog: pytest.LogCaptureFixture
) -> None:
    sidecar.lend_again = False
    trainer = tiny()
    checkpointer = _hook(sidecar, made, trainer)
    _begin(sidecar, checkpointer, trainer)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "toprope"):
        _train(trainer, checkpointer, 2, 10)
    sidecar.wait_image(4)
    assert sorted(step for step, _ in sidecar.images) == [2, 3, 4]
    assert checkpointer.stats.snapshots == 3
    assert checkpointer.stats.skipped == {"no free slot": 7}
    assert len(caplog.records) == 1
    sidecar.wait(lambda: len(sidecar.kinds(wire.Skipped)) == 7)
    assert read_page(sidecar.slot(0, 0).page).state is SlotState.HASHED


def test_a_sidecar_that_dies_never_stops_training_and_saving_goes_on_with_the_next(
    sidecar: FakeSidecar, made: list[Checkpointer]
) -> None:
    trainer = tiny()
    checkpointer = _hook(sidecar, made, trainer)
    _begin(sidecar, checkpointer, trainer)
    _train(trainer, checkpointer, 2, 2)
    sidecar.wait_image(2)
    sidecar.kill()
    _train(trainer, checkpointer, 3, 8)
    assert sum(checkpointer.stats.skipped.values()) >= 1
    sidecar.heard.clear()
    sidecar.start()
    _wait_free(checkpointer, 1)
    said = [type(frame) for frame in sidecar.heard[:4]]
    assert said == [wire.Hello, wire.Join, wire.Verdict, wire.Size]
    _wait_free(checkpointer, 2)
    _train(trainer, checkpointer, 9, 9)
    sidecar.wait_image(9)


def test_a_slot_filled_while_the_connection_broke_is_announced_on_the_next(
    sidecar: FakeSidecar, made: list[Checkpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = tiny()
    checkpointer = _hook(sidecar, made, trainer)
    _begin(sidecar, checkpointer, trainer)

    def broken(*arguments: Any, **named: Any) -> int:  # noqa: ANN401 - passes all on
        sidecar.kill()
        return write_image(*arguments, **named)

    monkeypatch.setattr(saving, "write_image", broken)
    _train(trainer, checkpointer, 2, 2)
    monkeypatch.setattr(saving, "write_image", write_image)
    sidecar.start()
    sidecar.wait_image(2)


def test_without_a_sidecar_memory_stays_flat_over_2000_steps(sidecar: FakeSidecar, made: list[Checkpointer]) -> None:
    trainer = tiny()
    checkpointer = _hook(sidecar, made, trainer)
    _begin(sidecar, checkpointer, trainer)
    sidecar.kill()
    for step in range(2, 202):
        checkpointer.end_step(step)
    tracemalloc.start()
    try:
        for step in range(202, 702):
            checkpointer.end_step(step)
        before, _ = tracemalloc.get_traced_memory()
        for step in range(702, 2702):
            checkpointer.end_step(step)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 16_384
    assert sum(checkpointer.stats.skipped.values()) >= 2700 - sidecar.slot_count


def test_a_restored_trainer_has_said_how_large_its_snapshots_are_when_it_begins_to_train(
    sidecar: FakeSidecar, made: list[Checkpointer]
) -> None:
    _leave_step_2(sidecar, made)
    begun = len(sidecar.heard)
    again = tiny(seed=7)
    checkpointer = _hook(sidecar, made, again)
    assert checkpointer.restore() == 2
    said = sidecar.heard[begun:]
    size = next(at for at, frame in enumerate(said) if isinstance(frame, wire.Size))
    assert size < next(at for at, one in enumerate(said) if isinstance(one, wire.Verdict) and one.phase == "applied")
    sidecar.lend_slots()
    _wait_free(checkpointer, sidecar.slot_count)
    _train(again, checkpointer, 3, 4)
    sidecar.wait_image(4)
    assert not checkpointer.stats.skipped
    sizes = [frame.bytes for frame in sidecar.heard[begun:] if isinstance(frame, wire.Size)]
    assert sizes == [sidecar.slot(0, 0).data.stat().st_size], "said once: it held after the first update, too"


class LookingSidecar(FakeSidecar):
    """Looks at each verdict how much this process has mapped of what was staged."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.mapped: list[tuple[str, int]] = []

    def _verdict(self, rank: int, frame: wire.Verdict) -> None:
        mapped = Path("/proc/self/maps").read_text().count(f"/staged-{frame.attempt_uid}-")
        self.mapped.append((frame.phase, mapped))
        super()._verdict(rank, frame)


def test_what_was_staged_is_mapped_no_more_when_a_rank_has_applied_it_since_slots_are_made_in_its_room(
    memory_dir: Path, made: list[Checkpointer]
) -> None:
    with LookingSidecar(memory_dir / "s") as sidecar:
        _leave_step_2(sidecar, made)
        sidecar.mapped.clear()
        again = _hook(sidecar, made, tiny(seed=7))
        assert again.restore() == 2
        again.close("nothing")
    assert sidecar.mapped == [("staged", 1), ("applied", 0)]


def test_a_grown_state_is_skipped_and_told_and_then_saved(sidecar: FakeSidecar, made: list[Checkpointer]) -> None:
    trainer, extra = tiny(), {"log": b""}
    checkpointer = _hook(sidecar, made, trainer, extra=extra)
    _begin(sidecar, checkpointer, trainer)
    extra["log"] = bytes(300_000)
    _train(trainer, checkpointer, 2, 2)
    assert checkpointer.stats.skipped["state has grown"] == 1
    sidecar.wait(lambda: len(sidecar.kinds(wire.Size)) == 2)
    sidecar.wait(lambda: len(sidecar.kinds(wire.Sealed)) == 1)
    (returned,) = sidecar.kinds(wire.Sealed)
    assert isinstance(returned, wire.Sealed)
    assert returned.bytes > 300_000, "what does not fit gives the slot back"
    sidecar.wait(lambda: sidecar._seq >= 6)
    while not sidecar.images:
        step = checkpointer._next_step
        _train(trainer, checkpointer, step, step)
    assert len(next(iter(sidecar.images.values()))) > 400_000


class _Moody:
    """A part of the trainer, written by others, whose state can't be had now and then."""

    moody = False

    def state_dict(self) -> dict[str, int]:
        if self.moody:
            raise RuntimeError("not while I prefetch")
        return {"at": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {"at": 1}


def test_a_part_that_raises_when_it_is_asked_for_its_state_costs_snapshots_and_not_the_training(
    sidecar: FakeSidecar, made: list[Checkpointer], caplog: pytest.LogCaptureFixture
) -> None:
    trainer, part = tiny(), _Moody()
    checkpointer = _hook(sidecar, made, trainer, extra={"loader": part})
    _begin(sidecar, checkpointer, trainer)
    part.moody = True
    _train(trainer, checkpointer, 2, 4)
    assert checkpointer.stats.skipped["unsupported value"] == 3
    assert any("extra.loader: state_dict() raised RuntimeError: not while I prefetch" in m for m in caplog.messages)
    part.moody = False
    saved = checkpointer.stats.snapshots
    _train(trainer, checkpointer, 5, 8)
    assert checkpointer.stats.snapshots > saved, "its slot was given back"


def test_a_value_that_cannot_be_kept_is_refused_at_restore_and_skipped_later(
    sidecar: FakeSidecar, made: list[Checkpointer], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UnsupportedLeafError, match=r"extra\.f: "):
        _hook(sidecar, made, tiny(), extra={"f": print}).restore()
    trainer, extra = tiny(), {"f": None}
    checkpointer = _hook(sidecar, made, trainer, extra=extra)
    _begin(sidecar, checkpointer, trainer)
    extra["f"] = print  # type: ignore[assignment]
    _train(trainer, checkpointer, 2, 4)
    assert checkpointer.stats.skipped["unsupported value"] == 3
    assert any("extra.f" in record.getMessage() for record in caplog.records)
    extra["f"] = None
    _train(trainer, checkpointer, 5, 5)
    sidecar.wait_image(5)


def test_strict_turns_a_skip_into_an_error(sidecar: FakeSidecar, made: list[Checkpointer]) -> None:
    sidecar.lend = False
    checkpointer = _hook(sidecar, made, tiny(), strict=True)
    checkpointer.restore()
    with pytest.raises(HookError, match="no free slot: step 1 was not saved"):
        checkpointer.end_step(1)


def test_a_later_attempt_ends_this_one(sidecar: FakeSidecar, made: list[Checkpointer]) -> None:
    checkpointer = _hook(sidecar, made, tiny())
    checkpointer.restore()
    checkpointer.end_step(1)
    sidecar.say_desired(attempt=2, uid="ff" * 16, schedule=wire.Schedule(from_step=0, every=1))
    session = checkpointer._session
    assert session is not None
    with session._news:
        assert session._news.wait_for(lambda: session.desired is not None, 10)
    with pytest.raises(SupersededError, match="attempt 2 of the job was opened after this one, number 1"):
        checkpointer.end_step(2)


def test_a_sidecar_that_says_superseded_ends_this_one(sidecar: FakeSidecar, made: list[Checkpointer]) -> None:
    checkpointer = _hook(sidecar, made, tiny())
    checkpointer.restore()
    checkpointer.end_step(1)
    sidecar._tell(wire.Error(code="superseded", text="attempt 2 was opened"))
    session = checkpointer._session
    assert session is not None
    with session._news:
        assert session._news.wait_for(lambda: bool(session.superseded), 10)
    with pytest.raises(SupersededError, match="attempt 2 was opened"):
        checkpointer.end_step(2)


def test_a_spec_that_no_frame_can_hold_is_refused(
    sidecar: FakeSidecar, made: list[Checkpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 600)
    with pytest.raises(UsageError, match="spec is too large to send: OPEN frame of"):
        _hook(sidecar, made, tiny()).restore()


@pytest.mark.parametrize("step", [0, 2, 7])
def test_the_first_step_is_the_restored_one_plus_one(sidecar: FakeSidecar, made: list[Checkpointer], step: int) -> None:
    checkpointer = _hook(sidecar, made, tiny())
    checkpointer.restore()
    with pytest.raises(UsageError, match=r"after step 0.*expected end_step\(1\)"):
        checkpointer.end_step(step)
    checkpointer.end_step(1)
    with pytest.raises(UsageError, match=r"expected end_step\(2\)"):
        checkpointer.end_step(1)


def test_end_step_before_restore_is_refused(sidecar: FakeSidecar, made: list[Checkpointer]) -> None:
    with pytest.raises(UsageError, match=r"call restore\(\) once"):
        _hook(sidecar, made, tiny()).end_step(1)


def test_without_a_sidecar_restore_says_so_once_and_raises_and_fresh_ok_begins_at_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(session, "_SILENT_S", 1.0)
    trainer = tiny()
    named = {"job": "j", "socket": tmp_path / "none.sock", **trainer.named()}
    checkpointer = Checkpointer(**named, sidecar_timeout_s=3.0)
    with pytest.raises(SidecarUnavailableError, match=r"no sidecar answered within 3 s .*none\.sock"):
        checkpointer.restore()
    (said,) = [text for text in caplog.messages if "no sidecar answers yet" in text]
    assert "none.sock" in said
    checkpointer.close("nothing")
    checkpointer = Checkpointer(**named, sidecar_timeout_s=0.2, fresh_ok=True)
    assert checkpointer.restore() == 0
    _train(trainer, checkpointer, 1, 3)
    checkpointer.close("nothing")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("spec-mismatch", SpecMismatchError),
        ("nothing-left", RestoreError),
        ("superseded", SupersededError),
    ],
)
def test_an_answer_that_will_not_change_is_raised_with_its_text(
    sidecar: FakeSidecar, made: list[Checkpointer], code: str, error: type[HookError]
) -> None:
    sidecar.refuse_open = lambda _: wire.Error(code=code, text="model.a: 3 here, 4 there")
    with pytest.raises(error, match=r"model\.a: 3 here, 4 there"):
        _hook(sidecar, made, tiny()).restore()


def test_busy_is_asked_again(sidecar: FakeSidecar, made: list[Checkpointer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entering, "RETRY_EVERY_S", 0.01)
    busy = iter(range(3))
    sidecar.refuse_open = lambda _: (
        None if next(busy, None) is None else wire.Error(code="busy", text="rank 0 on n1 lives")
    )
    assert _hook(sidecar, made, tiny()).restore() == 0
    assert len({(frame.launch_id, frame.round) for frame in sidecar.kinds(wire.Open)}) == 1  # type: ignore[union-attr]
    assert len(sidecar.kinds(wire.Open)) == 4


@pytest.mark.parametrize(("code", "cure"), [("busy", "end the other launch"), ("unavailable", "ckpt status")])
def test_asking_in_vain_ends_with_the_last_answer_and_what_to_do(
    sidecar: FakeSidecar, made: list[Checkpointer], monkeypatch: pytest.MonkeyPatch, code: str, cure: str
) -> None:
    monkeypatch.setattr(entering, "RETRY_EVERY_S", 0.01)
    monkeypatch.setattr(checkpointer_module, "Entry", functools.partial(entering.Entry, retry_for_s=0.2))
    sidecar.refuse_open = lambda _: wire.Error(code=code, text="rank 0 on n1 lives")
    with pytest.raises(HookError, match=rf"within 0\.2 s: rank 0 on n1 lives; .*{cure}"):
        _hook(sidecar, made, tiny()).restore()


def test_a_source_that_cannot_be_staged_leads_to_the_next_older_in_a_new_round(
    sidecar: FakeSidecar, made: list[Checkpointer]
) -> None:
    trainer = tiny()
    checkpointer = _hook(sidecar, made, trainer)
    checkpointer.restore()
    _train(trainer, checkpointer, 1, 1)
    for step in (2, 3):
        _wait_free(checkpointer, 3)
        _train(trainer, checkpointer, step, step)
        sidecar.wait_image(step)
    checkpointer.close()
    sidecar.spoil_staged = lambda known: "shard of rank 0 is nowhere" if known.attempt.from_step == 3 else ""
    assert _hook(sidecar, made, tiny()).restore() == 2
    assert len(sidecar.rounds) == 3
    assert sidecar.rounds[2].attempt.round == sidecar.rounds[1].attempt.round + 1


def test_a_shard_of_another_step_is_not_used_and_the_next_older_is(
    sidecar: FakeSidecar, made: list[Checkpointer]
) -> None:
    trainer = tiny()
    checkpointer = _hook(sidecar, made, trainer)
    _begin(sidecar, checkpointer, trainer)
    for step in (2, 3):
        _train(trainer, checkpointer, step, step)
        sidecar.wait_image(step)
    checkpointer.close()
    sidecar.images[3, 0] = sidecar.images[2, 0]
    assert _hook(sidecar, made, tiny()).restore() == 2
    assert "staged as {" in sidecar.rounds[1].failed
    assert not sidecar.rounds[1].misfit, "the source is to blame"


def test_a_checkpoint_of_another_extra_is_refused_and_the_verdict_says_why(
    sidecar: FakeSidecar, made: list[Checkpointer]
) -> None:
    _leave_step_2(sidecar, made, extra={"a": 1})
    with pytest.raises(StateMismatchError, match="extra: in the checkpoint, unexpected here"):
        _hook(sidecar, made, tiny()).restore()
    sidecar.wait(lambda: bool(sidecar.rounds[-1].failed))
    assert "extra" in sidecar.rounds[-1].failed
    assert sidecar.rounds[-1].misfit, "the checkpoint is not to blame"


def test_a_failure_while_applying_ends_the_process(sidecar: FakeSidecar, made: list[Checkpointer]) -> None:
    class Stubborn:
        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise KeyError("no")

    _leave_step_2(sidecar, made, extra=Stubborn())
    with pytest.raises(RestoreError, match=r"applying step 2 failed: KeyError\('no'\)"):
        _hook(sidecar, made, tiny(), extra=Stubborn()).restore()
    sidecar.wait(lambda: "KeyError" in sidecar.rounds[-1].failed)
    assert sidecar.rounds[-1].misfit, "what was verified is not to blame"


def test_close_waits_until_the_last_snapshot_is_hashed_and_says_bye(
    sidecar: FakeSidecar, made: list[Checkpointer]
) -> None:
    trainer = tiny()
    checkpointer = _hook(sidecar, made, trainer)
    _begin(sidecar, checkpointer, trainer)
    _train(trainer, checkpointer, 2, 2)
    assert checkpointer.close()
    assert (2, 0) in sidecar.images
    sidecar.wait(lambda: isinstance(sidecar.heard[-1], wire.Bye))
    assert not Checkpointer(job="j", **trainer.named()).close("ready")


@pytest.mark.parametrize("job", ["", "Job", "a/b", "..", "a" * 65, "a..b", "-a"])
def test_an_odd_job_name_is_refused(job: str) -> None:
    with pytest.raises(UsageError, match="is not usable"):
        Checkpointer(job=job, model=nn.Linear(1, 1))


def test_a_socket_path_that_no_socket_can_have_is_refused() -> None:
    with pytest.raises(UsageError, match="longer than 107 bytes"):
        Checkpointer(job="j", model=nn.Linear(1, 1), socket="/" + "a" * 107)


def test_several_ranks_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="init_process_group"):
        Checkpointer(job="j", model=nn.Linear(1, 1))


def test_a_script_can_end_with_one_line_and_the_right_status() -> None:
    code = (
        "import toprope.trainer_hooks as hooks\n"
        "with hooks.one_line_errors():\n"
        "    raise hooks.SpecMismatchError('job j: model.a: 3 here, 4 there')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (64, "error: job j: model.a: 3 here, 4 there\n")


def test_a_process_that_ends_without_close_has_none_of_our_threads_when_its_interpreter_goes(
    sidecar: FakeSidecar,
) -> None:
    code = (
        "import atexit, sys, threading\n"
        "from torch import nn\n"
        "from toprope.trainer_hooks import Checkpointer\n"
        "def threads():\n"
        "    print(sorted(one.name for one in threading.enumerate() if one.name.startswith('toprope')), flush=True)\n"
        "atexit.register(threads)\n"
        "checkpointer = Checkpointer(job='j', model=nn.Linear(1, 1), socket=sys.argv[1])\n"
        "checkpointer.restore()\n"
        "checkpointer._saver._copier.start(lambda: None)\n"
        "threads()\n"
        "raise RuntimeError('in the midst of training')\n"
    )
    command = [sys.executable, "-c", code, str(sidecar.socket_path)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert "in the midst of training" in ended.stderr
    assert (ended.returncode, ended.stdout) == (1, "['toprope-channel', 'toprope-copy']\n[]\n")


@pytest.mark.parametrize("said", ["", None], ids=["empty", "unset"])
def test_without_a_word_of_the_socket_it_is_at_the_usual_place(
    monkeypatch: pytest.MonkeyPatch, said: str | None
) -> None:
    monkeypatch.delenv("CKPT_SOCKET", raising=False)
    if said is not None:
        monkeypatch.setenv("CKPT_SOCKET", said)
    assert socket_path("gpt", None) == Path("/run/toprope/gpt/sidecar.sock")
    with pytest.raises(UsageError, match="socket='' is no path"):
        Checkpointer(job="gpt", model=nn.Linear(1, 1), socket="")


def test_the_frames_load_no_torch() -> None:
    frames = "toprope.trainer_hooks.link.wire, toprope.trainer_hooks.link.slot"
    code = f"import sys, {frames}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_is_drawn_from_a_random_stream_by_the_hook(sidecar: FakeSidecar, made: list[Checkpointer]) -> None:
    trainer = tiny()
    before = trainer.digest()
    checkpointer = _hook(sidecar, made, trainer)
    checkpointer.restore()
    checkpointer.end_step(1)
    _wait_free(checkpointer, 3)
    checkpointer.end_step(2)
    sidecar.wait_image(2)
    assert trainer.digest() == before
    assert os.getpid() == sidecar.kinds(wire.Hello)[0].pid  # type: ignore[union-attr]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_cuda_state_comes_back_bit_for_bit(sidecar: FakeSidecar, made: list[Checkpointer], tmp_path: Path) -> None:
    model = nn.Linear(1024, 1024, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = Checkpointer(job="j", model=model, optimizer=optimizer, socket=sidecar.socket_path)
    made.append(checkpointer)
    checkpointer.restore()
    for step in range(1, 21):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        if step > 1:
            _wait_free(checkpointer, 1)
        checkpointer.end_step(step)
        if step > 1:
            path = tmp_path / str(step)
            path.write_bytes(sidecar.wait_image(step))
            assert raw(open_image(path).tensor("model.weight")) == raw(model.weight)


class Counted(nn.Module):
    """Four tensors that say which step it is."""

    def __init__(self, mib: int, device: str) -> None:
        super().__init__()
        for number in range(4):
            self.register_buffer(f"b{number}", torch.zeros(mib << 16, device=device))  # a quarter of it each

    def count(self, step: int) -> None:
        """Ask the device for it, and don't wait."""
        for buffer in self.buffers():
            buffer.fill_(step)


@pytest.mark.parametrize(
    ("device", "mib", "steps"),
    [
        ("cpu", 4, 20),
        pytest.param(
            *("cuda", 1024, 200),
            marks=[
                *(pytest.mark.gpu, pytest.mark.long, pytest.mark.timeout(1200)),
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
            ],
        ),
    ],
)
def test_each_snapshot_of_a_busy_device_is_of_its_own_step(  # noqa: PLR0913, PLR0917 - fixtures
    sidecar: FakeSidecar,
    made: list[Checkpointer],
    memory_dir: Path,
    record_property: Callable[[str, object], None],
    device: str,
    mib: int,
    steps: int,
) -> None:
    """The state is overwritten as soon as ``end_step`` returns, by what is queued behind what keeps the device busy."""
    model = Counted(mib, device)
    load = torch.ones(2048 if device == "cuda" else 64, 2048 if device == "cuda" else 64, device=device)
    checkpointer = Checkpointer(job="j", model=model, socket=sidecar.socket_path)
    made.append(checkpointer)
    checkpointer.restore()
    took_s = 0.0
    for step in range(1, steps + 2):
        if step > 1:
            _wait_free(checkpointer, 1)
        for _ in range(20):
            torch.mm(load, load)
        model.count(step)
        began_s = time.perf_counter()
        checkpointer.end_step(step)
        took_s += time.perf_counter() - began_s
        model.count(-1)
        if step > 1:
            path = memory_dir / "image"
            path.write_bytes(sidecar.wait_image(step))
            sidecar.images.clear()  # they are large
            image = open_image(path)
            assert all(bool((image.tensor(f"model.b{number}") == step).all()) for number in range(4)), step
    stats = checkpointer.stats
    assert stats.snapshots + sum(stats.skipped.values()) == steps + 1
    assert stats.snapshots >= steps, "all but the first, which has a slot only if one is there in time"
    record_property(f"end_step with {mib} MiB on {device}, mean", f"{took_s / steps * 1000:.1f} ms")
