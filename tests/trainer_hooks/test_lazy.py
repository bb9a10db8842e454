"""What only an optimizer changes may be copied during the next step, and is what it was when its own step ended."""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.fake_sidecar import FakeSidecar
from tests.support.lazy_trial import HeldCopier, Net, Trial
from torch import nn
from torch.optim.swa_utils import AveragedModel

from toprope.trainer_hooks import HookError
from toprope.trainer_hooks.capture.state import Parts, capture
from toprope.trainer_hooks.image import copying, cuda
from toprope.trainer_hooks.link import wire
from toprope.trainer_hooks.link.slot import SlotState, read_page
from toprope.trainer_hooks.save import fence, lazy


@pytest.fixture
def sidecar(memory_dir: Path) -> Iterator[FakeSidecar]:
    torch.manual_seed(3)
    with FakeSidecar(memory_dir / "s") as fake:
        yield fake


def trial(sidecar: FakeSidecar, *, lazily: bool = True) -> Trial:
    """Return a trainer with AdamW."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    return Trial(sidecar, Parts(model=model, optimizer=optimizer), stepping(optimizer), lazy=lazily)


def stepping(*optimizers: torch.optim.Optimizer) -> Callable[[], None]:
    def update() -> None:
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return update


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "one by one": lambda params: torch.optim.AdamW(params, foreach=False),
    "foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, fused=True),
    "amsgrad": lambda params: torch.optim.Adam(params, amsgrad=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "plain": lambda params: torch.optim.SGD(params, lr=0.1),
    "Adafactor": torch.optim.Adafactor,
    "NAdam": torch.optim.NAdam,
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_lazy_snapshot_equals_the_state_at_the_end_of_its_step(
    sidecar: FakeSidecar, tmp_path: Path, kind: str
) -> None:
    model = Net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    one = Trial(sidecar, Parts(model=model, optimizer=optimizer), stepping(optimizer))
    one.until_lazy()
    one.train(2)
    assert one.hook.close()
    assert one.hook.stats.lazy_snapshots == one.step - 1 - lazy.PROOFS
    assert one.check(tmp_path) == one.step - 1


def test_clipping_accumulation_and_a_changed_learning_rate_leave_it_exact(sidecar: FakeSidecar, tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def update() -> None:
        for _ in range(2):
            (model(torch.randn(8, 128)) ** 2).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        stepping(optimizer)()
        schedule.step()

    one = Trial(sidecar, Parts(model=model, optimizer=optimizer, lr_scheduler=schedule), update)
    one.until_lazy()
    one.train(2)
    assert one.hook.close()
    assert one.check(tmp_path) == one.step - 1


def test_each_of_several_optimizers_waits_for_its_own_tensors(sidecar: FakeSidecar, tmp_path: Path) -> None:
    models = {"gen": Net(), "disc": Net()}
    optimizers = {name: torch.optim.AdamW(model.parameters()) for name, model in models.items()}
    one = Trial(sidecar, Parts(model=models, optimizer=optimizers), stepping(*optimizers.values()))
    one.until_lazy()
    one.train(2)
    assert one.hook.close()
    assert one.check(tmp_path) == one.step - 1


def test_averages_of_the_weights_are_copied_at_once(sidecar: FakeSidecar, tmp_path: Path) -> None:
    model = Net()
    average = AveragedModel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    parts = Parts(model={"net": model, "ema": average}, optimizer=optimizer)

    def update() -> None:
        stepping(optimizer)()
        average.update_parameters(model)

    one = Trial(sidecar, parts, update, backward=lambda: (model(torch.randn(8, 128)) ** 2).mean().backward())
    one.until_lazy()
    held = one.hold()
    update()
    one.end_step()
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.zero_()
    held.release()
    sidecar.wait_image(one.step)
    assert one.hook.close()
    assert one.check(tmp_path) == one.step - 1


def test_a_frozen_parameter_and_one_of_two_optimizers_are_copied_at_once() -> None:
    model = Net()
    model.first.weight.requires_grad_(False)  # noqa: FBT003 - its signature
    optimizers = [torch.optim.SGD(model.parameters()), torch.optim.SGD(model.last.parameters())]
    kept = capture(Parts(model=model, optimizer=optimizers), rank=0, world=1)
    assert "model.first.bias" in kept.updated_by
    assert {"model.first.weight", "model.last.weight", "model.norm.running_mean"}.isdisjoint(kept.updated_by)
    assert {"model.first.weight", "model.last.weight", "model.norm.running_mean"} <= kept.tensors.keys()


def test_the_fence_holds_the_update_until_the_copy_is_made(sidecar: FakeSidecar, tmp_path: Path) -> None:
    one = trial(sidecar)
    one.until_lazy()
    held = one.hold()
    one.update()
    one.end_step()
    for part in one.parts_copied():
        part.done = held.event()
    assert len(held.held) == 1, "nothing was copied yet"
    one.forward_backward()
    one.update()
    assert not held.held
    sidecar.wait_image(one.step)
    assert one.check(tmp_path) == one.step - 1
    assert one.hook.close()


def test_nothing_is_sealed_before_all_is_copied(sidecar: FakeSidecar) -> None:
    one = trial(sidecar)
    one.until_lazy()
    held = one.hold()
    one.update()
    one.end_step()
    states = [read_page(sidecar.slot(0, number).page) for number in range(3)]
    assert [page.step for page in states if page.state is SlotState.WRITING] == [one.step], "torn, if this is killed"
    assert one.step not in [frame.step for frame in sidecar.kinds(wire.Sealed)]  # type: ignore[union-attr]
    assert one.hook.stats.snapshot_step == one.step - 1
    held.release()
    sidecar.wait_image(one.step)
    one.hook.close()


def test_a_snapshot_that_would_wait_for_the_one_before_is_skipped_and_counted(
    sidecar: FakeSidecar, tmp_path: Path
) -> None:
    one = trial(sidecar)
    one.until_lazy()
    held = one.hold()
    one.update()
    one.end_step()
    one.end_step()
    assert one.hook.stats.skipped["still copying"] == 1
    held.release()
    sidecar.wait_image(one.step - 1)
    one.update()
    one.end_step()
    assert one.hook.close()
    assert (one.step - 1, 0) not in sidecar.images
    assert one.check(tmp_path) == one.step - 2


def test_close_waits_for_the_copy_before_it_says_goodbye(sidecar: FakeSidecar, tmp_path: Path) -> None:
    one = trial(sidecar)
    one.until_lazy()
    held = one.hold()
    one.update()
    one.end_step()
    assert held.held
    assert one.hook.close("memory")
    sidecar.wait(lambda: bool(sidecar.kinds(wire.Bye)))
    assert [type(frame) for frame in sidecar.heard[-2:]] == [wire.Sealed, wire.Bye]
    assert one.check(tmp_path) == one.step - 1


def _data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


def _by_hand(model: nn.Module) -> None:
    assert isinstance(model, Net)
    with torch.no_grad():
        model.last.weight[0, 0] += 1


def _numpy(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.detach().numpy()[...] += 1


CHANGES: dict[str, Callable[[nn.Module], None]] = {"data": _data, "by hand": _by_hand, "numpy": _numpy}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_while_it_is_copied_voids_the_snapshot_and_ends_lazy_copies(
    sidecar: FakeSidecar, tmp_path: Path, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    one = trial(sidecar)
    one.until_lazy()
    held = one.hold()
    one.update()
    one.end_step()
    void, before = one.step, one.hook.stats.lazy_snapshots
    CHANGES[change](one.models()[0])
    held.release()
    one.train(3)
    assert one.hook.close()
    assert (void, 0) not in sidecar.images
    assert (one.hook.stats.skipped["void"], one.hook.stats.lazy_snapshots) == (1, before)
    assert f"step {void} is void" in caplog.text
    assert one.check(tmp_path) == one.step - 2


def test_a_void_snapshot_is_an_error_with_strict(sidecar: FakeSidecar) -> None:
    one = trial(sidecar)
    one.until_lazy()
    held = one.hold()
    one.update()
    one.end_step()
    _data(one.models()[0])
    held.release()
    saver = one.hook._saver
    assert saver is not None
    saver._strict = True
    with pytest.raises(HookError, match=r"void: step .* changed while it was copied"):
        one.end_step()
    one.hook.close("nothing")


def test_a_copy_that_close_has_not_waited_for_is_never_sealed(sidecar: FakeSidecar) -> None:
    """After close() the state may change under it, in its samples or beside them."""
    one = trial(sidecar)
    one.until_lazy()
    held = one.hold()
    assert one.hook._saver is not None
    one.hook._saver._lazy._ended = ended = threading.Event()  # which makes no copy when it is waited for
    ended.set()
    one.update()
    one.end_step()
    step = one.step
    closed = one.hook.close(timeout_s=0.1)
    assert not closed
    assert (closed.skipped, one.hook.stats.skipped["copied too late"]) == (step, 1)
    held.release()
    assert (step, 0) not in sidecar.images
    pages = [read_page(sidecar.slot(0, number).page) for number in range(sidecar.slot_count)]
    assert [page.state for page in pages if page.step == step] == [SlotState.WRITING]


def test_a_step_that_is_asked_for_is_copied_at_once(sidecar: FakeSidecar, tmp_path: Path) -> None:
    one = trial(sidecar)
    one.until_lazy()
    before = one.hook.stats.lazy_snapshots
    one.forward_backward()
    one.update()
    one.step += 1
    one.hook.end_step(one.step, last=True)
    assert one.hook._saver is not None
    assert not one.hook._saver._lazy.busy
    assert one.hook.close()
    assert one.hook.stats.lazy_snapshots == before
    assert (one.step, 0) in sidecar.images


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_are_changed_before_each_update_are_never_copied_later(
    sidecar: FakeSidecar, tmp_path: Path, change: str
) -> None:
    one = trial(sidecar)
    one.backward = lambda: CHANGES[change](one.models()[0])
    one.train(lazy.PROOFS + 3)
    assert one.hook.close()
    assert one.hook.stats.lazy_snapshots == 0
    assert one.check(tmp_path) == one.step - 1


def test_an_optimizer_in_the_backward_pass_is_never_copied_later(sidecar: FakeSidecar, tmp_path: Path) -> None:
    model = Net()
    optimizers = {str(number): torch.optim.AdamW([parameter]) for number, parameter in enumerate(model.parameters())}
    updates = {id(group["params"][0]): stepping(o) for o in optimizers.values() for group in o.param_groups}
    for parameter in model.parameters():
        hooked: Any = parameter
        hooked.register_post_accumulate_grad_hook(lambda parameter: updates[id(parameter)]())
    one = Trial(sidecar, Parts(model=model, optimizer=optimizers), lambda: None)
    one.train(lazy.PROOFS + 2)
    assert one.hook.close()
    assert one.hook.stats.lazy_snapshots == 0
    assert one.check(tmp_path) == one.step - 1


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # the compiler's own
def test_a_compiled_update_has_no_fence_and_is_never_copied_later(sidecar: FakeSidecar, tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update = torch.compile(optimizer.step, backend="eager")
    one = Trial(sidecar, Parts(model=model, optimizer=optimizer), update)
    one.train(lazy.PROOFS + 2)
    assert one.hook.close()
    assert one.hook.stats.lazy_snapshots == 0
    assert one.check(tmp_path) == one.step - 1


@pytest.mark.long
def test_a_compiled_model_is_copied_later(sidecar: FakeSidecar, tmp_path: Path) -> None:
    model: Any = torch.compile(Net(), backend="eager")
    optimizer = torch.optim.AdamW(model.parameters())
    one = Trial(sidecar, Parts(model=model, optimizer=optimizer), stepping(optimizer))
    one.until_lazy()
    assert one.hook.close()
    assert one.check(tmp_path) == one.step - 1


def test_a_group_that_was_added_is_proved_anew(sidecar: FakeSidecar, tmp_path: Path) -> None:
    one = trial(sidecar)
    model, optimizer = one.models()[0], one.parts.optimizers()["optimizer"]
    one.until_lazy()
    before = one.hook.stats.lazy_snapshots
    more = nn.Linear(128, 128)
    model.more = more
    optimizer.add_param_group({"params": list(more.parameters())})
    one.backward = lambda: (model.more(model(torch.randn(8, 128))) ** 2).mean().backward()
    saver = one.hook._saver
    assert saver is not None
    one.forward_backward()
    one.update()
    assert not saver._lazy.later(capture(one.parts, rank=0, world=1))
    assert one.hook.stats.lazy_snapshots == before
    one.hook.close("nothing")


def test_lazy_off_copies_all_at_once(sidecar: FakeSidecar, tmp_path: Path) -> None:
    one = trial(sidecar, lazily=False)
    one.train(lazy.PROOFS + 2)
    assert one.hook.close()
    assert one.hook.stats.lazy_snapshots == 0
    assert one.check(tmp_path) == one.step - 1


def test_a_closed_hook_and_a_copied_optimizer_have_no_fence(sidecar: FakeSidecar) -> None:
    one = trial(sidecar)
    optimizer = one.parts.optimizers()["optimizer"]
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    assert not copy.deepcopy(optimizer)._optimizer_step_pre_hooks
    one.hook.close("nothing")
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize(
    ("on_cuda", "capturable", "fit"), [(True, True, False), (True, False, True), (False, True, True)]
)
def test_what_may_be_part_of_a_cuda_graph_is_not_fit(*, on_cuda: bool, capturable: bool, fit: bool) -> None:
    optimizer: Any = SimpleNamespace(
        param_groups=[{"capturable": capturable, "params": [SimpleNamespace(is_cuda=on_cuda)]}]
    )
    assert (fence.why_unfit(optimizer) == "") is fit


@pytest.mark.parametrize("error", [OSError("no room"), KeyError("unforeseen")])
def test_work_that_fails_voids_the_snapshot_and_opens_the_fence(sidecar: FakeSidecar, error: Exception) -> None:
    one = trial(sidecar)
    one.until_lazy()
    held: HeldCopier = one.hold()
    one.update()
    one.end_step()
    saver = one.hook._saver
    assert saver is not None

    def broken() -> None:
        raise error

    with nullcontext() if isinstance(error, OSError) else pytest.raises(KeyError):
        saver._lazy._copy(one.parts_copied(), broken)
    held.held.clear()
    one.forward_backward()
    one.update()
    one.end_step()
    assert one.hook.stats.skipped["void"] == 1
    one.hook.close("nothing")


def test_a_lazy_copy_that_fails_as_nobody_foresaw_is_said_and_the_next_steps_are_saved_by_both_threads(
    sidecar: FakeSidecar,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    thread_errors: queue.SimpleQueue[type[BaseException]],
) -> None:
    monkeypatch.setattr(copying, "WORTH_A_THREAD_BYTES", 0)
    one = trial(sidecar)
    one.until_lazy()
    saver = one.hook._saver
    assert saver is not None
    saver._copier._threads = 2
    nothing: dict[str, int] = {}
    with monkeypatch.context() as broken:
        broken.setattr(saver, "_seal", lambda *_: nothing["unforeseen"])
        one.forward_backward()
        one.update()
        one.end_step()
        assert saver._lazy.wait(20)
    one.train(2)
    assert one.hook.close()
    assert (thread_errors.get(timeout=20), one.hook.stats.skipped["void"]) == (KeyError, 1)
    assert f"step {one.step - 2} is void: the copy failed in a way that was not foreseen" in caplog.text
    assert one.check(tmp_path) == one.step - 2


def test_a_copy_from_a_device_is_asked_for_compared_and_sampled_like_any_other() -> None:
    source = torch.arange(4096.0)
    move = cuda.DeviceMove(torch.zeros(4096), source)
    sound = [move.sample(turn) for turn in range(3)]
    assert not move.same()
    with cuda.beside([]):
        move.run()
    assert move.same()
    assert all(check() for check in sound)
    source.add_(1)
    assert not move.same()
    assert not any(check() for check in sound), "the live tensor is not what it was"
    move.run()
    assert not any(check() for check in sound), "nor is the copy, although both are the same"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_lazy_snapshot_of_a_device_equals_the_state_at_the_end_of_its_step(
    sidecar: FakeSidecar, tmp_path: Path
) -> None:
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    one = Trial(
        sidecar,
        Parts(model=model, optimizer=optimizer),
        stepping(optimizer),
        backward=lambda: (model(torch.randn(8, 128, device="cuda")) ** 2).mean().backward(),
    )
    one.until_lazy()
    one.train(20)
    assert one.hook.close()
    assert one.check(tmp_path) == one.step - 1
