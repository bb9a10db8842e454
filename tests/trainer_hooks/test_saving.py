"""What is saved is the state as it is now, and what is called safe is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support.fake_sidecar import FakeSidecar, Peer
from tests.support.tiny_trainer import Tiny, load, open_image, tiny

from toprope.trainer_hooks import Checkpointer, HookError, RestoreError, SidecarUnavailableError, UsageError
from toprope.trainer_hooks.link import wire
from toprope.trainer_hooks.link.session import Session
from toprope.trainer_hooks.link.slot import SlotState, read_page
from toprope.trainer_hooks.save.ending import Level, reaches


@pytest.fixture
def sidecar(memory_dir: Path) -> Iterator[FakeSidecar]:
    with FakeSidecar(memory_dir / "s") as fake:
        yield fake


class NeverHashes(FakeSidecar):
    """Lends slots and looks at none of them."""

    def _take(self, peer: Peer, frame: wire.Sealed) -> None:
        pass


def begun(sidecar: FakeSidecar, trainer: Tiny, **more: object) -> Checkpointer:
    """Return a hook whose trainer has done step 1, with slots to write into."""
    checkpointer = Checkpointer(job="j", socket=sidecar.socket_path, **{**trainer.named(), **more})
    sidecar.lend = False
    assert checkpointer.restore() == 0
    trainer.step()
    checkpointer.end_step(1)
    sidecar.lend_slots()
    session = checkpointer._session
    assert session is not None
    with session._news:
        assert session._news.wait_for(lambda: len(session.slots._free) == sidecar.slot_count, 20)
    return checkpointer


def tell(sidecar: FakeSidecar, session: Session, frame: wire.Desired) -> None:
    """Send DESIRED to everyone, and wait until a hook has heard it."""
    with sidecar._mutex:
        for peer in sidecar._peers:
            sidecar._send(peer, frame)
    with session._news:
        assert session._news.wait_for(lambda: session.desired == frame, 20)


@pytest.mark.parametrize(
    "later", [torch.arange(5.0), torch.arange(2.0), torch.arange(3), torch.arange(3.0).reshape(3, 1)]
)
def test_a_tensor_that_has_another_form_than_before_is_saved_as_it_is_now(
    sidecar: FakeSidecar, tmp_path: Path, later: torch.Tensor
) -> None:
    trainer, extra = tiny(), {"hist": torch.zeros(3)}
    checkpointer = begun(sidecar, trainer, extra=extra)
    checkpointer.end_step(2)
    extra["hist"] = later
    checkpointer.end_step(3)
    for step, expected in ((2, torch.zeros(3)), (3, later)):
        (tmp_path / f"{step}").write_bytes(sidecar.wait_image(step))
        saved = open_image(tmp_path / f"{step}").tensor("extra.hist")
        assert (saved.dtype, saved.tolist()) == (expected.dtype, expected.tolist())
    checkpointer.close("nothing")


def test_the_welcome_of_a_sidecar_that_has_gone_counts_no_longer(sidecar: FakeSidecar) -> None:
    checkpointer = Checkpointer(job="j", socket=sidecar.socket_path, sidecar_timeout_s=0.3, **tiny().named())
    assert checkpointer.restore() == 0
    session = checkpointer._session
    assert session is not None
    sidecar.kill()
    with session._news:
        assert session._news.wait_for(lambda: not session.connected, 20)
    with pytest.raises(SidecarUnavailableError, match="no sidecar answered"):
        checkpointer.restore()
    checkpointer.close("nothing")


@pytest.mark.parametrize("wait_for", ["memory", "protected", "ready"])
def test_close_does_not_call_safe_what_no_sidecar_has_hashed(memory_dir: Path, wait_for: Level) -> None:
    with NeverHashes(memory_dir / "s") as sidecar:
        checkpointer = begun(sidecar, tiny())
        checkpointer.end_step(2)
        assert not checkpointer.close(wait_for, timeout_s=0.1)


@pytest.mark.parametrize("wait_for", ["protected", "ready"])
def test_close_waits_for_the_tier_that_it_was_asked_for(sidecar: FakeSidecar, wait_for: Level) -> None:
    checkpointer = begun(sidecar, tiny())
    checkpointer.end_step(2)
    hear(sidecar, checkpointer, protected=2 if wait_for == "ready" else 1, ready=1)
    assert not reaches(checkpointer._level(), wait_for)
    hear(sidecar, checkpointer, protected=2, ready=2 if wait_for == "ready" else 1)
    closed = checkpointer.close(wait_for)
    assert closed
    assert (closed.step, closed.level, closed.skipped, str(closed)) == (
        2,
        wait_for,
        0,
        f"the last snapshot is step 2: {wait_for}",
    )


def test_close_says_what_it_got_when_that_is_less(sidecar: FakeSidecar) -> None:
    checkpointer = begun(sidecar, tiny())
    checkpointer.end_step(2)
    sidecar.wait_image(2)
    closed = checkpointer.close("ready", timeout_s=0.1)
    assert not closed
    assert (closed.step, closed.level) == (2, "memory")


def test_close_takes_the_last_snapshot_that_found_no_free_slot(sidecar: FakeSidecar, tmp_path: Path) -> None:
    trainer = tiny()
    checkpointer = begun(sidecar, trainer)
    sidecar.lend_again = False
    for step in range(2, sidecar.slot_count + 3):
        trainer.step()
        checkpointer.end_step(step)
    last = sidecar.slot_count + 2
    assert checkpointer.stats.skipped["no free slot"] == 2  # the first step, before there were slots, and the last
    assert (last, 0) not in sidecar.images
    expected = trainer.digest()
    with sidecar._mutex:
        for number in range(sidecar.slot_count):
            sidecar._grant(sidecar._peers[0], number)
    assert checkpointer.close().step == last
    assert checkpointer.stats.skipped["no free slot"] == 1
    path = tmp_path / "image"
    path.write_bytes(sidecar.images[last, 0])
    again = tiny(9)
    load(again.parts(), path)
    assert again.digest() == expected


def test_close_does_not_take_a_state_that_is_not_that_of_the_last_step(
    sidecar: FakeSidecar, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = tiny()
    sidecar.lend = False
    checkpointer = Checkpointer(job="j", socket=sidecar.socket_path, **trainer.named())
    checkpointer.restore()
    trainer.step()
    checkpointer.end_step(1)
    trainer.step()
    sidecar.lend_slots()
    closed = checkpointer.close(timeout_s=5.0)
    assert not closed
    assert (closed.step, closed.skipped) == (0, 1)
    assert "the model was changed after step 1" in caplog.text
    assert not sidecar.images


def test_close_sees_an_update_that_torch_does_not_count(sidecar: FakeSidecar, caplog: pytest.LogCaptureFixture) -> None:
    """As fused and ``foreach`` optimizers make."""
    trainer = tiny()
    checkpointer = begun(sidecar, trainer)
    grants = [checkpointer._session.slots.take() for _ in range(3)] if checkpointer._session is not None else []
    checkpointer.end_step(2)
    parameter = next(trainer.model.parameters())
    version = parameter._version
    parameter.data.add_(1.0)
    assert parameter._version == version
    assert checkpointer._session is not None
    assert grants[0] is not None
    checkpointer._session.slots.give_back(grants[0])
    assert checkpointer.close(timeout_s=5.0).skipped == 2
    assert "the model was changed after step 2" in caplog.text


def test_close_ends_the_connection_although_strict_makes_an_error_of_the_last_snapshot(sidecar: FakeSidecar) -> None:
    extra: dict[str, object] = {"value": 1}
    checkpointer = begun(sidecar, tiny(), extra=extra)
    session, saver = checkpointer._session, checkpointer._saver
    assert session is not None
    assert saver is not None
    grants = [session.slots.take() for _ in range(3)]
    checkpointer.end_step(2)
    extra["value"] = object()
    saver._strict = True
    assert grants[0] is not None
    session.slots.give_back(grants[0])
    with pytest.raises(HookError, match="unsupported value"):
        checkpointer.close()
    sidecar.wait(lambda: bool(sidecar.kinds(wire.Bye)))
    assert not session._channel._thread.is_alive()
    assert not checkpointer.close(), "it is closed"


@pytest.mark.parametrize("last", [True, False])
def test_the_last_step_of_all_is_due_whatever_the_schedule(memory_dir: Path, *, last: bool) -> None:
    with FakeSidecar(memory_dir / "s", every=100) as sidecar:
        checkpointer = begun(sidecar, tiny())
        sidecar.lend_again = False
        checkpointer.end_step(2, last=last)
        assert checkpointer.close().step == (2 if last else 0)
        pages = [read_page(page) for number in range(3) if (page := sidecar.slot(0, number).page).exists()]
        assert [(page.step, page.asked) for page in pages if page.state is SlotState.HASHED] == [(2, True)] * last


@pytest.mark.parametrize(("wait_for", "asks"), [("ready", [(2, 2)]), ("protected", [])])
def test_close_asks_for_the_last_step_in_each_tier_when_it_is_to_be_ready(
    sidecar: FakeSidecar, wait_for: Level, asks: list[tuple[int, int]]
) -> None:
    checkpointer = begun(sidecar, tiny())
    checkpointer.end_step(2)
    sidecar.wait_image(2)
    checkpointer.close(wait_for, timeout_s=0.2)
    sidecar.wait(lambda: bool(sidecar.kinds(wire.Bye)))
    frames = sidecar.kinds(wire.Ask)
    assert [(frame.after, frame.step) for frame in frames if isinstance(frame, wire.Ask)] == asks


def test_close_ends_when_no_slot_comes(sidecar: FakeSidecar) -> None:
    trainer = tiny()
    sidecar.lend = False
    checkpointer = Checkpointer(job="j", socket=sidecar.socket_path, **trainer.named())
    checkpointer.restore()
    trainer.step()
    checkpointer.end_step(1)
    closed = checkpointer.close(timeout_s=0.1)
    assert not closed
    assert str(closed) == "no snapshot was taken; step 1 was due and was not saved"


def hear(sidecar: FakeSidecar, checkpointer: Checkpointer, *, protected: int, ready: int) -> None:
    """Let the hook be told what is safe."""
    attempt = sidecar.rounds[0].attempt
    sidecar.say_desired(attempt=1, uid=attempt.uid, schedule=attempt.schedule, protected=protected, ready=ready)
    session = checkpointer._session
    assert session is not None

    def heard() -> bool:
        desired = session.desired
        return desired is not None and (desired.protected_step, desired.ready_step) == (protected, ready)

    with session._news:
        assert session._news.wait_for(heard, 20)


class Refuses(FakeSidecar):
    """Another rank of the world fails in a phase of each restore that has a source."""

    phase = ""
    misfit = False

    def _verdict(self, rank: int, frame: wire.Verdict) -> None:
        known = self._round(frame.attempt_uid)
        if frame.ok and frame.phase == self.phase and known.attempt.from_step:
            known.failed = "another rank could not"
            go = wire.Go(attempt_uid=frame.attempt_uid, phase=frame.phase, ok=False, reason=known.failed)
            self._tell(replace(go, misfit=self.misfit))
        else:
            super()._verdict(rank, frame)


def saved_then_restored_with_a_refusal(directory: Path, phase: str, *, misfit: bool = False) -> tuple[str, str, int]:
    """Return the digests of a fresh trainer before and after its restore, and the step that it was given."""
    with Refuses(directory / "s") as sidecar:
        first = begun(sidecar, tiny())
        first.end_step(2)
        sidecar.wait_image(2)
        first.close("nothing")
        sidecar.phase, sidecar.misfit = phase, misfit
        trainer = tiny(9)
        before = trainer.digest()
        second = Checkpointer(job="j", socket=sidecar.socket_path, **trainer.named())
        try:
            step = second.restore()
        finally:
            second.close("nothing")
        return before, trainer.digest(), step


def test_nothing_is_applied_before_all_ranks_have_checked_what_was_staged(memory_dir: Path) -> None:
    before, after, step = saved_then_restored_with_a_refusal(memory_dir, "staged")
    assert step == 0, "the source was struck off"
    assert after == before


def test_no_rank_asks_again_after_another_that_did_not_fit_since_that_one_has_ended(memory_dir: Path) -> None:
    with pytest.raises(UsageError, match="another rank could not"):
        saved_then_restored_with_a_refusal(memory_dir, "staged", misfit=True)


def test_no_rank_trains_before_all_have_applied(memory_dir: Path) -> None:
    with pytest.raises(RestoreError, match="failed while it was applied; this process must end"):
        saved_then_restored_with_a_refusal(memory_dir, "applied")


def test_a_trainer_whose_slots_do_not_fit_says_so_with_what_the_sidecar_says(
    sidecar: FakeSidecar, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = tiny()
    checkpointer = Checkpointer(job="j", socket=sidecar.socket_path, **trainer.named())
    sidecar.lend = False
    checkpointer.restore()
    session = checkpointer._session
    assert session is not None
    frame = wire.Desired(
        attempt=1,
        attempt_uid="ff" * 16,
        schedule=wire.Schedule(from_step=0, every=1),
        protected_step=0,
        ready_step=0,
        no_slots="300 bytes of memory needed, 20 bytes free",
    )
    tell(sidecar, session, frame)
    for step in (1, 2):
        trainer.step()
        checkpointer.end_step(step)
    assert checkpointer.stats.skipped == {"no memory for slots": 2}
    assert "300 bytes of memory needed, 20 bytes free" in caplog.text


def say_that_a_tier_fails(sidecar: FakeSidecar, checkpointer: Checkpointer) -> None:
    session, saver = checkpointer._session, checkpointer._saver
    assert session is not None
    assert saver is not None
    frame = wire.Desired(
        attempt=1,
        attempt_uid=saver._attempt.uid,
        schedule=wire.Schedule(from_step=0, every=1),
        protected_step=0,
        ready_step=0,
        trouble="the object tier fails: 500 InternalError",
    )
    tell(sidecar, session, frame)


def test_a_tier_that_fails_is_an_error_with_strict(sidecar: FakeSidecar) -> None:
    trainer = tiny()
    checkpointer = Checkpointer(job="j", socket=sidecar.socket_path, strict=True, **trainer.named())
    checkpointer.restore()
    say_that_a_tier_fails(sidecar, checkpointer)
    trainer.step()
    with pytest.raises(HookError, match="not as safe as it should be: the object tier fails: 500 InternalError"):
        checkpointer.end_step(1)
    checkpointer.close()


def test_a_tier_that_fails_costs_no_snapshot_without_strict(sidecar: FakeSidecar) -> None:
    trainer = tiny()
    checkpointer = begun(sidecar, trainer)
    say_that_a_tier_fails(sidecar, checkpointer)
    trainer.step()
    checkpointer.end_step(2)
    assert (checkpointer.stats.snapshots, checkpointer.stats.snapshot_step) == (1, 2)
    checkpointer.close()
