"""A trainer whose machine is to go ends at a step that all ranks save, and says how safe that is."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.fake_sidecar import FakeSidecar
from tests.support.tiny_trainer import Tiny, load, tiny

from toprope.trainer_hooks import Checkpointer, PreemptedError, UsageError
from toprope.trainer_hooks.link import wire
from toprope.trainer_hooks.link.session import Session
from toprope.trainer_hooks.link.slot import read_page
from toprope.trainer_hooks.save.leaving import steps_ahead
from toprope.trainer_hooks.save.saving import Saver

EVERY = 100
"""No step of these tests is due by itself."""


@pytest.fixture
def sidecar(memory_dir: Path) -> Iterator[FakeSidecar]:
    with FakeSidecar(memory_dir / "s", every=EVERY) as fake:
        yield fake


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Leave the handler of SIGTERM as it was."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) is before
    signal.signal(signal.SIGTERM, before)


class Run:
    """A trainer of one rank that has done a step and has slots."""

    def __init__(self, sidecar: FakeSidecar, *, grace_s: float = 60.0, on_sigterm: bool = False) -> None:
        self.sidecar = sidecar
        self.trainer: Tiny = tiny()
        self.hook = Checkpointer(
            job="j", socket=sidecar.socket_path, grace_s=grace_s, on_sigterm=on_sigterm, **self.trainer.named()
        )
        self.at = self.hook.restore()
        self.step()
        self.wait(lambda: len(self.session.slots._free) == sidecar.slot_count)

    @property
    def session(self) -> Session:
        assert self.hook._session is not None
        return self.hook._session

    @property
    def saver(self) -> Saver:
        assert self.hook._saver is not None
        return self.hook._saver

    def wait(self, condition: object) -> None:
        assert callable(condition)
        with self.session._news:
            assert self.session._news.wait_for(condition, 20)

    def step(self) -> None:
        self.trainer.step()
        self.at += 1
        self.hook.end_step(self.at)

    def hear(self, *, extra: int, protected: int = 0) -> None:
        """Let the hook be told which step all save, and what is protected."""
        attempt = self.sidecar.rounds[-1].attempt
        self.sidecar.say_desired(
            attempt=attempt.number, uid=attempt.uid, schedule=attempt.schedule, protected=protected, extra=extra
        )

        def heard() -> bool:
            desired = self.session.desired
            return desired is not None and (desired.extra_step, desired.protected_step) == (extra, protected)

        self.wait(heard)

    def asks(self) -> list[tuple[int, int]]:
        """Return what it has asked for."""
        frames = self.sidecar.kinds(wire.Ask)
        return [(frame.after, frame.step) for frame in frames if isinstance(frame, wire.Ask)]

    def wait_asks(self, count: int) -> list[tuple[int, int]]:
        self.sidecar.wait(lambda: len(self.asks()) >= count)
        return self.asks()


@contextmanager
def meanwhile(*acts: Callable[[], object]) -> Iterator[None]:
    """Let another thread do these one after the other, while this one goes on."""
    with ThreadPoolExecutor(1) as pool:
        done = [pool.submit(act) for act in acts]
        yield
    for one in done:
        one.result()


def test_told_to_end_it_asks_for_a_step_to_come_and_ends_there_with_a_snapshot(
    sidecar: FakeSidecar, tmp_path: Path
) -> None:
    run = Run(sidecar)
    run.hook.preempt()
    ((after, step),) = run.wait_asks(1)
    assert after == 1 < step
    run.hear(extra=4, protected=4)
    run.step()
    run.step()
    assert sidecar.images == {}, "nothing is due before"
    with pytest.raises(PreemptedError, match="ends after step 4, which is saved: protected") as ended:
        run.step()
    assert ended.value.exit_status == 128 + signal.SIGTERM
    path = tmp_path / "image"
    path.write_bytes(sidecar.wait_image(4))
    again = tiny(9)
    load(again.parts(), path)
    assert again.digest() == run.trainer.digest()
    run.hook.close()


def test_a_rank_that_was_told_nothing_ends_at_the_same_step(sidecar: FakeSidecar) -> None:
    run = Run(sidecar)
    run.hear(extra=3, protected=3)
    run.step()
    with pytest.raises(PreemptedError, match="step 3"):
        run.step()
    assert run.asks() == []
    run.hook.close()


def test_the_page_says_that_the_step_was_asked_for(sidecar: FakeSidecar) -> None:
    run = Run(sidecar)
    sidecar.lend_again = False
    run.hear(extra=2, protected=2)
    with pytest.raises(PreemptedError):
        run.step()
    sidecar.wait_image(2)
    pages = [read_page(sidecar.slot(0, number).page) for number in range(sidecar.slot_count) if number == 0]
    assert [(page.step, page.asked) for page in pages] == [(2, True)]
    run.hook.close()


def test_it_waits_until_the_step_is_safe_elsewhere(sidecar: FakeSidecar) -> None:
    run = Run(sidecar)
    run.hear(extra=2)
    with (
        meanwhile(lambda: sidecar.wait_image(2), lambda: run.hear(extra=2, protected=2)),
        pytest.raises(PreemptedError, match="which is saved: protected"),
    ):
        run.step()
    run.hook.close()


def test_the_grace_has_an_end_and_it_says_what_it_got(sidecar: FakeSidecar) -> None:
    run = Run(sidecar, grace_s=1.0)
    run.hear(extra=2)
    with pytest.raises(PreemptedError, match=r"for its grace of 1 s is over: memory"):
        run.step()
    assert (2, 0) in sidecar.images
    run.hook.close()


def test_a_step_heard_of_too_late_is_skipped_counted_and_another_asked_for(sidecar: FakeSidecar) -> None:
    run = Run(sidecar)
    run.step()
    run.step()
    run.hear(extra=2)
    ((after, step),) = run.wait_asks(1)
    assert after == 3 < step, "at once, for the next step may never end while others wait"
    run.step()
    assert run.hook.stats.skipped["heard too late"] == 1
    skips = [frame for frame in sidecar.kinds(wire.Skipped) if isinstance(frame, wire.Skipped)]
    assert [(skip.step, skip.reason) for skip in skips] == [(2, "heard too late")]
    assert sidecar.images == {}, "a later state never goes by the name of an earlier step"
    run.hear(extra=6, protected=6)
    run.step()
    with pytest.raises(PreemptedError, match="step 6"):
        run.step()
    assert run.hook.stats.skipped["heard too late"] == 1
    sidecar.wait_image(6)
    assert set(sidecar.images) == {(6, 0)}
    run.hook.close()


def test_one_that_waits_goes_on_when_a_later_step_is_named(sidecar: FakeSidecar) -> None:
    run = Run(sidecar)
    run.hear(extra=2)
    with meanwhile(lambda: sidecar.wait_image(2), lambda: run.hear(extra=4, protected=4)):
        run.step()
    run.step()
    with pytest.raises(PreemptedError, match="step 4"):
        run.step()
    sidecar.wait_image(4)
    assert set(sidecar.images) == {(2, 0), (4, 0)}
    run.hook.close()


def test_with_no_coordinator_to_name_a_step_it_ends_when_the_grace_is_over(sidecar: FakeSidecar) -> None:
    run = Run(sidecar, grace_s=0.0)
    run.hook.preempt()
    with pytest.raises(PreemptedError, match="step 2, which is not saved: no coordinator named a step"):
        run.step()
    run.hook.close()


def test_without_a_sidecar_it_ends_at_the_next_step(tmp_path: Path) -> None:
    trainer = tiny()
    hook = Checkpointer(
        job="j", socket=tmp_path / "none", sidecar_timeout_s=0.05, fresh_ok=True, on_sigterm=True, **trainer.named()
    )
    assert hook.restore() == 0
    hook.end_step(1)
    hook.preempt()
    with pytest.raises(PreemptedError, match="there is no sidecar"):
        hook.end_step(2)
    hook.close()


def test_told_before_training_it_asks_at_the_first_step(sidecar: FakeSidecar) -> None:
    trainer = tiny()
    hook = Checkpointer(job="j", socket=sidecar.socket_path, **trainer.named())
    hook.preempt()
    hook.restore()
    trainer.step()
    hook.end_step(1)
    sidecar.wait(lambda: len(sidecar.kinds(wire.Ask)) == 1)
    hook.close("nothing")


def test_a_snapshot_that_finds_no_slot_is_taken_when_there_is_one(sidecar: FakeSidecar, tmp_path: Path) -> None:
    run = Run(sidecar)
    grants = [run.session.slots.take() for _ in range(sidecar.slot_count)]
    run.hear(extra=2, protected=2)
    first = grants[0]
    assert first is not None
    with (
        meanwhile(
            lambda: sidecar.wait(lambda: bool(sidecar.kinds(wire.Skipped))),
            lambda: run.session.slots.give_back(first),
        ),
        pytest.raises(PreemptedError, match="step 2, which is saved"),
    ):
        run.step()
    path = tmp_path / "image"
    path.write_bytes(sidecar.wait_image(2))
    again = tiny(9)
    load(again.parts(), path)
    assert again.digest() == run.trainer.digest()
    run.hook.close()


def test_a_new_connection_hears_of_it_again(sidecar: FakeSidecar) -> None:
    run = Run(sidecar)
    run.hook.preempt()
    first = run.wait_asks(1)
    sidecar.kill()
    sidecar.start()
    assert run.wait_asks(2) == first * 2
    run.hook.close("nothing")


@pytest.mark.parametrize(
    ("pace_s", "begun_s", "ahead"),
    [(0.5, 0.0, 4), (0.5, 0.25, 5), (2.0, 0.0, 1), (2.0, 1.0, 2), (30.0, 10.0, 1), (0.5, 60.0, 5), (0.0, 0.0, 2000)],
)
def test_it_asks_for_the_first_step_that_all_can_have_heard_of(pace_s: float, begun_s: float, ahead: int) -> None:
    """A step that takes far longer than the one before it says little, and one that takes no time says nothing."""
    assert steps_ahead(pace_s=pace_s, begun_s=begun_s) == ahead


def test_sigterm_is_a_notice_only_if_asked_for(sidecar: FakeSidecar) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        run = Run(sidecar)
        os.kill(os.getpid(), signal.SIGTERM)
        run.step()
        assert (heard, run.asks()) == ([signal.SIGTERM], [])
        run.hook.close("nothing")
    finally:
        signal.signal(signal.SIGTERM, before)


def test_sigterm_is_a_notice_once_and_goes_on_to_whoever_handled_it_before(sidecar: FakeSidecar) -> None:
    heard: list[int] = []

    def mine(number: int, _: object) -> None:
        heard.append(number)

    before = signal.signal(signal.SIGTERM, mine)
    try:
        run = Run(sidecar, on_sigterm=True)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert len(run.wait_asks(1)) == 1
        assert heard == [signal.SIGTERM] * 2
        run.hear(extra=2, protected=2)
        with pytest.raises(PreemptedError):
            run.step()
        run.hook.close()
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_that_came_later_is_left_alone(sidecar: FakeSidecar) -> None:
    before = signal.getsignal(signal.SIGTERM)
    run = Run(sidecar, on_sigterm=True)
    mine = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert mine is not before
    run.hook.close("nothing")
    assert signal.signal(signal.SIGTERM, before) is signal.SIG_IGN


def test_before_training_the_signal_ends_the_process_as_ever(sidecar: FakeSidecar) -> None:
    before = signal.getsignal(signal.SIGTERM)
    hook = Checkpointer(job="j", socket=sidecar.socket_path, on_sigterm=True, **tiny().named())
    assert signal.getsignal(signal.SIGTERM) is before
    hook.close()


def test_on_another_thread_it_is_refused_with_what_to_do(sidecar: FakeSidecar) -> None:
    refused: list[UsageError] = []

    def make() -> None:
        try:
            Checkpointer(job="j", socket=sidecar.socket_path, on_sigterm=True, **tiny().named())
        except UsageError as error:
            refused.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "call preempt() from your own handler" in str(refused[0])
