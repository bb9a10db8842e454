"""The public object: restore, end each step, close."""

from __future__ import annotations

import atexit
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from toprope.trainer_hooks import warmup
from toprope.trainer_hooks.capture.modules import model_state
from toprope.trainer_hooks.capture.names import joined, names_of, of_all, union
from toprope.trainer_hooks.capture.replicated import check_equal, check_on_all
from toprope.trainer_hooks.capture.spec import spec_of
from toprope.trainer_hooks.capture.state import Memory, Parts, Stateful, capture, check_values
from toprope.trainer_hooks.elastic import sampler_of
from toprope.trainer_hooks.errors import SidecarUnavailableError, UsageError
from toprope.trainer_hooks.launch import own_launch_id, this_world
from toprope.trainer_hooks.link import wire
from toprope.trainer_hooks.link.session import Session, socket_path, usable_job
from toprope.trainer_hooks.restore.entering import Entry, located
from toprope.trainer_hooks.restore.relaxing import Allowed, Report
from toprope.trainer_hooks.restore.restoring import Restorer
from toprope.trainer_hooks.save.ending import Closed, Level, Traces, level_of, reaches, traces
from toprope.trainer_hooks.save.leaving import Leaving, must_be_main_thread
from toprope.trainer_hooks.save.saving import Saver, Stats

logger = logging.getLogger("toprope")
_POLL_S = 0.02
_EXIT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a Checkpointer behaves; see there."""

    strict: bool = False
    socket: Path | None = None
    sidecar_timeout_s: float = 60.0
    fresh_ok: bool = False
    lazy: bool = True
    on_sigterm: bool = False


class Checkpointer:
    """Keeps the state of a trainer safe, and brings it back.

    ::

        ckpt = Checkpointer(job="gpt", model=model, optimizer=optimizer, lr_scheduler=scheduler, dataloader=data)
        for step in range(ckpt.restore() + 1, steps + 1):
            train(step)
            ckpt.end_step(step, loss=loss)
        ckpt.close()

    Make it after ``init_process_group()``, the same way on each rank. Several models, optimizers or schedulers go in a
    dict or a list: ``model={"gen": gen, "disc": disc}``.

    ``strict`` turns a skipped snapshot, and a tier that fails, into an error. ``fresh_ok`` lets ``restore()`` begin at
    step 0 when there is no sidecar; nothing is saved then. ``allow_pickle`` pickles values of types that can't be kept
    exactly, and unpickles them in ``restore()``, which runs what they say: give it only where you trust whoever can
    write the store.

    What only an optimizer changes is copied while the next forward and backward run, once several snapshots have shown
    that nothing else changes it; ``lazy=False`` copies all before ``end_step()`` returns.

    ``replicated`` has patterns (as of ``fnmatch``) of names of plain parameters and buffers that all ranks have with
    the same values though no DDP wraps them: they are stored once, split among the ranks. At the end of the first step
    after ``restore()`` the ranks compare digests of them, before anything is saved; at later steps they do not.

    ``on_sigterm`` takes SIGTERM, from the end of ``restore()`` to ``close()``, for the notice that ``preempt()`` gives.
    ``grace_s`` is how long this process may live on after a notice.
    """

    def __init__(  # noqa: PLR0913 - the parts of a trainer, all by keyword
        self,
        *,
        job: str,
        model: nn.Module | Mapping[str, nn.Module] | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer
        | Mapping[str, torch.optim.Optimizer]
        | Sequence[torch.optim.Optimizer]
        | None = None,
        lr_scheduler: Stateful | Mapping[str, Stateful] | Sequence[Stateful] | None = None,
        dataloader: Stateful | Iterable[Any] | None = None,
        extra: Stateful | MutableMapping[str, Any] | None = None,
        scaler: Stateful | None = None,
        strict: bool = False,
        socket: str | os.PathLike[str] | None = None,
        sidecar_timeout_s: float = 60.0,
        fresh_ok: bool = False,
        allow_pickle: bool = False,
        replicated: Sequence[str] = (),
        lazy: bool = True,
        on_sigterm: bool = False,
        grace_s: float = 20.0,
    ) -> None:
        """Check what can be checked before training.

        Raises:
            UsageError: the job's name or a part can't be used, or a signal can't be handled here.
        """
        if on_sigterm:
            must_be_main_thread()
        self._job = usable_job(job)
        self._sampler = sampler_of(dataloader)
        data: Any = dataloader  # one that has no state is refused below
        self._parts = Parts(
            model=model,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            dataloader=self._sampler if self._sampler is not None else data,
            scaler=scaler,
            extra=extra,
            allow_pickle=allow_pickle,
            replicated=tuple(replicated),
        )
        self._parts.check()
        self._settings = Settings(
            strict=strict,
            socket=socket_path(job, socket),
            sidecar_timeout_s=sidecar_timeout_s,
            fresh_ok=fresh_ok,
            lazy=lazy,
            on_sigterm=on_sigterm,
        )
        self._leaving = Leaving(grace_s=grace_s, level=self._level)
        self._world = this_world()
        self._session: Session | None = None
        self._saver: Saver | None = None
        self._restored = False
        self._next_step = self._first_step = 0
        self._stats = Stats()
        self._traces: Traces = []
        """Of the model at the end of the last step that was skipped."""
        self._sources: tuple[wire.StagedShard, ...] = ()
        self._report = Report()

    @property
    def sources(self) -> tuple[wire.StagedShard, ...]:
        """The shards that ``restore()`` used, each with the tier and node that it came from; empty for a new job."""
        return self._sources

    @property
    def report(self) -> Report:
        """What ``restore()`` left alone or cast on this rank, by name; empty if all fitted."""
        return self._report

    @property
    def stats(self) -> Stats:
        """What came of the due steps so far."""
        return self._stats

    def restore(self, warm_up: Callable[[], object] | None = None, *, partial: bool = False, cast: bool = False) -> int:
        """Bring the trainer to where the job stands and return that step; 0 for a new job.

        ``warm_up`` is called before that and does one forward and backward pass on any batch, on all ranks: DDP's
        buckets, ``torch.compile`` and autotuning settle, so that a restarted run computes as one that never ended. All
        that it changed in what the hook keeps is put back, and gradients are set to None.

        A trainer that was changed since is refused, but for what is allowed: with ``partial`` what the checkpoint does
        not have is left as it is, and what only the checkpoint has is not taken; with ``cast`` other floating-point or
        complex dtypes are cast, and moments with their parameter. What was done is logged, and in ``report``. A job
        whose spec is another one for that is to accept it first, as its refusal says.

        Raises:
            SidecarUnavailableError: on every rank, when one of them has no sidecar.
            UsageError: the trainer does not fit the job; nothing was changed.
            RestoreError: nothing could be restored.
        """
        world = self._world
        launch_id = str(world.broadcast(own_launch_id()))
        if warm_up is None:
            _warn_of_regrouping(self._parts.models(), world.size)
        members = self._members(launch_id)
        if warm_up is not None:
            warmup.warm_up(self._parts, warm_up)
        if members is None:
            logger.warning("no sidecar, and fresh_ok: training begins at step 0 and nothing is saved")
            return self._begin(0)
        assert self._session is not None
        spec = joined(of_all(world, spec_of(self._parts)))
        names = union(of_all(world, names_of(self._parts)))
        check_on_all(world, self._parts)
        allowed = Allowed(partial=partial, cast=cast)
        entry = Entry(self._session, world, launch_id, spec)
        restorer = Restorer(entry, self._parts, names, allowed, self._take_over)
        attempt = restorer.restore(members)
        self._sources, self._report = restorer.staged, restorer.report
        return self._begin(attempt.from_step)

    def _take_over(self, attempt: wire.Attempt, report: Report) -> None:
        """Make ready to save in an attempt whose source is in the trainer, before the sidecar is told so."""
        assert self._session is not None
        if self._saver is not None:
            self._saver.finish(self._settings.sidecar_timeout_s)
        world, memory = self._world, Memory()
        self._saver = Saver(
            self._session,
            attempt,
            world,
            lambda: capture(self._parts, rank=world.rank, world=world.size, memory=memory),
            strict=self._settings.strict,
            stats=self._stats,
            lazy_for=self._parts.optimizers() if self._settings.lazy else {},
        )
        if attempt.source != "fresh" and not attempt.weights_only and report == Report():
            self._saver.announce()  # the optimizer's state is there, so that this holds after the first update, too

    def _begin(self, step: int) -> int:
        self._restored = True
        self._next_step = self._first_step = step + 1
        self._leaving.begin(step, self._saver)
        if self._settings.on_sigterm:
            self._leaving.listen()
        return step

    def _members(self, launch_id: str) -> tuple[wire.Member, ...] | None:
        """Return where all ranks sit; None to go on without a sidecar."""

        def greet() -> wire.Welcome | None:
            check_values(self._parts, rank=self._world.rank, world=self._world.size)
            try:
                return self._connected(launch_id).wait_welcome(self._settings.sidecar_timeout_s)
            except SidecarUnavailableError:
                if self._settings.fresh_ok:
                    return None
                raise

        return located(self._world, greet)

    def _connected(self, launch_id: str) -> Session:
        if self._session is None:
            hello = wire.Hello(
                job=self._job,
                launch_id=launch_id,
                rank=self._world.rank,
                world=self._world.size,
                pid=os.getpid(),
            )
            assert self._settings.socket is not None
            self._session = Session(self._settings.socket, hello)
            atexit.register(_at_exit, weakref.ref(self), hello.pid)
            self._session.start()
        return self._session

    def end_step(self, step: int, loss: object = None, *, last: bool = False) -> None:  # noqa: ARG002 - loss: for the trainer's progress, not shown yet
        """Say that ``step`` optimizer updates are done; a snapshot is taken if the step is due.

        ``last``: it is the last of all, and so due in each tier. Say so on all ranks.

        Raises:
            UsageError: ``restore()`` was not called, the step is not the one after the last, or what was said to be
                ``replicated`` is not.
            SupersededError: a later attempt was opened: this process must end.
            PreemptedError: a rank was told that it will be ended: all end here, as saved as the message says.
            HookError: a snapshot was skipped, or a tier of this node fails, with ``strict``.
        """
        if step != self._next_step:
            raise UsageError(self._wrong_step(step))
        self._next_step = step + 1
        if self._sampler is not None and not self._sampler.trained:
            raise UsageError(
                f"end_step({step}) and no sample was said to be trained on: call sampler.advance(n) with the number of "
                "this rank's samples before end_step"
            )
        if self._saver is not None:
            if step == self._first_step:
                check_equal(self._world, self._parts, step)
            self._saver.end_step(step, last=last)
            if self._saver.skipped_step == step:
                self._traces = traces(self._parts)
        self._leaving.end_step(step)

    def preempt(self) -> None:
        """Give notice that this process will be ended soon, as a cloud announces it; on any thread, on any rank.

        Training goes on for about two seconds to a step that all ranks save, due or not; there ``end_step()`` raises
        ``PreemptedError`` on all of them, once that step is protected or stored, or their ``grace_s`` is over.
        """
        self._leaving.notice()

    def _wrong_step(self, step: int) -> str:
        if not self._restored:
            return "call restore() once before the first end_step()"
        return (
            f"end_step({step!r}) after step {self._next_step - 1}; the first is one more than what restore() returned, "
            f"each one more than the last: expected end_step({self._next_step})"
        )

    def close(self, wait_for: Level = "memory", timeout_s: float = 60.0) -> Closed:
        """End the connection once the last snapshot is as safe as asked for; return what it got, true if it is.

        ``memory``: hashed in this node's memory; ``protected``: in a peer's too; ``ready``: in the object store. If the
        last step was due and skipped, for want of a free slot for instance, its snapshot is taken now; call it before
        you change the model. To get more than a step of the cadence into the object store, say ``end_step(last=True)``.

        Raises:
            HookError: the last snapshot came to nothing, with ``strict``. The connection is ended all the same.
        """
        try:
            return self._awaited(wait_for, time.monotonic() + timeout_s)
        finally:
            self._leaving.close()
            if self._session is not None:
                self._session.close(timeout_s=5.0)
            self._session, self._saver = None, None

    def _end_threads(self) -> None:
        """End what runs beside the training thread, in a process that ends without ``close()``.

        A thread that comes back from C++ when there is no interpreter any more takes the process along by SIGABRT.
        """
        try:
            if self._saver is not None:
                self._saver.finish(_EXIT_S)
        finally:
            if self._session is not None:
                self._session.close(timeout_s=_EXIT_S)

    def _awaited(self, wait_for: Level, end: float) -> Closed:
        """Wait until the last snapshot is as safe as asked for, or time is up."""
        if self._session is None:
            return Closed(asked=wait_for, saving=False)
        if wait_for != "nothing":
            self._retake(end)
        if self._saver is not None:
            self._saver.finish(max(0.0, end - time.monotonic()))
            if wait_for == "ready":
                self._saver.ask_for_last(self._next_step - 1)
        while not reaches(self._level(), wait_for) and self._stats.snapshot_step and time.monotonic() < end:
            time.sleep(_POLL_S)
        missed = self._missed()
        closed = Closed(
            asked=wait_for,
            level=self._level(),
            step=self._stats.snapshot_step,
            skipped=missed,
            saving=self._saver is not None,
        )
        logger.log(logging.INFO if closed else logging.WARNING, "%s; asked for: %s", closed, wait_for)
        return closed

    def _missed(self) -> int:
        """Return the last step if it was due and skipped, else 0."""
        last = self._next_step - 1
        return last if self._saver is not None and self._saver.skipped_step == last > 0 else 0

    def _retake(self, end: float) -> None:
        """Take the snapshot of the last step, if that was skipped and the state is still the same."""
        if self._saver is None or not self._missed():
            return
        if traces(self._parts) != self._traces:
            logger.warning("the model was changed after step %d, which is not saved for that", self._missed())
            return
        while not self._saver.retake(self._missed()) and time.monotonic() < end:
            time.sleep(_POLL_S)

    def _level(self) -> Level:
        """Return how safe the last snapshot is."""
        step = self._stats.snapshot_step
        if step == 0 or self._saver is None or self._session is None:
            return "nothing"
        return level_of(self._session.desired, step, is_hashed=self._saver.last_is_hashed)


def _at_exit(checkpointer: weakref.ref[Checkpointer], pid: int) -> None:
    there = checkpointer()
    if there is not None and os.getpid() == pid:  # a forked child has none of these threads
        there._end_threads()  # noqa: SLF001 - ours, without which it would never be collected


def _warn_of_regrouping(models: nn.Module | Mapping[str, nn.Module], world: int) -> None:
    """Say so when DDP would sum gradients in another order after a restart than before it."""
    if world <= 2:  # noqa: PLR2004 - the sum of two does not depend on their order
        return
    for ddp in model_state(models, world=world).ddp:
        if ddp.static_graph or not ddp.find_unused_parameters:
            logger.warning(
                "DDP regroups its gradient buckets after the first backward pass of each process; with %d ranks a "
                "restarted run then sums in another order and is not bit-identical. If that matters, give "
                "restore(warm_up=...) a forward and backward pass, or wrap with "
                "DistributedDataParallel(..., find_unused_parameters=True)",
                world,
            )
            return
