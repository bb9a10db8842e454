"""The standing of a trainer that saves and loads with ``torch.distributed.checkpoint``: which attempt it is in."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from toprope.trainer_hooks.capture.state import Snapshot
from toprope.trainer_hooks.errors import HookError, RestoreError, StateMismatchError, SupersededError, UsageError
from toprope.trainer_hooks.image.shard import Image, Plan, write_image
from toprope.trainer_hooks.launch import World, own_launch_id, this_world
from toprope.trainer_hooks.link import wire
from toprope.trainer_hooks.link.sealing import Sealer, is_hashed
from toprope.trainer_hooks.link.session import Session, socket_path, usable_job
from toprope.trainer_hooks.link.slots import Grant
from toprope.trainer_hooks.link.source import SourceError, StagedSource
from toprope.trainer_hooks.restore.entering import Entry, NextRound, located
from toprope.trainer_hooks.save.ending import Level, level_of, reaches

SPEC: dict[str, Any] = {
    "model": {"class": "torch.distributed.checkpoint", "params": {}, "buffers": {}, "tied": {}},
}
"""What a job of this kind depends on: nothing that is known before it loads. Torch's planner checks keys and shapes."""
_POLL_S = 0.02


class Attempt:
    """One launch of a job that saves with ``torch.distributed.checkpoint``. Make it on all ranks at once.

    ::

        attempt = dcp.Attempt(job="gpt")
        if not attempt.is_new:
            torch_dcp.load(state, storage_reader=dcp.StorageReader(attempt))
        attempt.begin()
        writer = dcp.StorageWriter(attempt)
        for step in range(attempt.step + 1, steps + 1):
            train(step)
            if step % 1000 == 0:
                torch_dcp.save(state, checkpoint_id=f"step-{step}", storage_writer=writer)
        attempt.close()

    Make it after ``init_process_group()`` and shortly before you load: the ranks have five minutes from here to
    ``begin()``. When it is pickled, as ``async_save`` in a process does, it goes on where it is unpickled.
    """

    def __init__(
        self, *, job: str, socket: str | os.PathLike[str] | None = None, sidecar_timeout_s: float = 60.0
    ) -> None:
        """Open the attempt, and fetch the headers of what it begins from.

        Raises:
            UsageError: the name of the job can't be used, or it was started with another kind of trainer.
            SidecarUnavailableError: on every rank, when one of them has no sidecar.
            RestoreError: checkpoints exist and none can be had.
        """
        self._job, self._socket = usable_job(job), socket_path(job, socket)
        self._sidecar_timeout_s = sidecar_timeout_s
        self._world = this_world()
        launch_id = str(self._world.broadcast(own_launch_id()))
        session = self._connect(launch_id)
        members = located(self._world, lambda: session.wait_welcome(sidecar_timeout_s))
        assert members is not None
        self._entry = Entry(session, self._world, launch_id, SPEC)
        self._attempt, (self._source, self._found) = self._entry.enter(members, self._look)
        self._loaded = self._begun = self._closed = False
        self._set_out()

    def _set_out(self) -> None:
        """Have saved nothing yet."""
        self._sealer = Sealer(self._entry.session, self._attempt, self._world)
        self._saving = threading.Lock()
        self._announced_bytes = 0
        self._tried_step = self.step

    def _go_on(
        self,
        job: str,
        socket: str,
        sidecar_timeout_s: float,
        world: World,
        launch_id: str,
        attempt: wire.Attempt,
    ) -> None:
        """Go on with an attempt that has begun, over a connection of this process."""
        self._job, self._socket, self._sidecar_timeout_s, self._world = job, Path(socket), sidecar_timeout_s, world
        session = self._connect(launch_id)
        session.wait_welcome(sidecar_timeout_s)
        self._entry = Entry(session, world, launch_id, SPEC)
        self._attempt, self._found = attempt, {}
        self._source = StagedSource(
            attempt=attempt, ask=lambda number, wants: self._entry.stage(attempt, number, wants)
        )
        try:
            self._source.join()
        except NextRound as error:
            raise SupersededError(f"attempt {attempt.number} is over: {error}; this process must end") from error
        self._loaded, self._begun, self._closed = True, True, False
        self._set_out()

    def _connect(self, launch_id: str) -> Session:
        rank, size = self._world.rank, self._world.size
        session = Session(
            self._socket, wire.Hello(job=self._job, launch_id=launch_id, rank=rank, world=size, pid=os.getpid())
        )
        session.start()
        return session

    def _look(self, attempt: wire.Attempt) -> tuple[StagedSource, Mapping[int, Image]]:
        """Join the attempt, and look at the headers and documents of all shards that it begins from."""
        source = StagedSource(attempt=attempt, ask=lambda number, wants: self._entry.stage(attempt, number, wants))
        if attempt.source == "fresh":
            source.join()
            return source, {}
        try:
            return source, source.heads(range(attempt.source_world))
        except SourceError as error:
            self._entry.say(attempt, "staged", ok=False, reason=str(error))
            raise NextRound(str(error)) from error

    @property
    def step(self) -> int:
        """The step that the job stands at; 0 for a new job. What is loaded is of this step."""
        return self._attempt.from_step

    @property
    def is_new(self) -> bool:
        """Whether there is nothing to load."""
        return self._attempt.source == "fresh"

    @property
    def number(self) -> int:
        """The number of the attempt."""
        return self._attempt.number

    @property
    def world(self) -> World:
        """This rank, and how many there are."""
        return self._world

    # Loading

    @property
    def heads(self) -> Mapping[int, Image]:
        """The shards of all ranks of the source, of which only headers and documents can be read.

        Raises:
            UsageError: training has begun.
        """
        self._check_loading()
        return self._found

    def _check_loading(self) -> None:
        if self._begun:
            raise UsageError("load before begin(): what the job stands at is let go of when training begins")

    def tensors(self, names: Mapping[int, set[str]]) -> Mapping[int, Image]:
        """Return the shards of these ranks, of which these tensors were fetched and verified.

        Raises:
            UsageError: training has begun.
            RestoreError: they can't be had: the launch must end, and the next one begins from another checkpoint.
        """
        self._check_loading()
        try:
            return self._source.with_tensors(names) if names else {}
        except (SourceError, NextRound, StateMismatchError) as error:
            self._entry.say(self._attempt, "staged", ok=False, reason=str(error))
            raise RestoreError(f"step {self.step} can't be had: {error}; start again: it is struck off") from error

    def note_loaded(self) -> None:
        """Take in that something was loaded."""
        self._loaded = True

    def begin(self) -> None:
        """Say that this rank has loaded what it wants, and wait until all have. From now on steps can be saved.

        Raises:
            UsageError: the job stands at a step, and nothing of it was loaded: that would be a silent fresh start.
            RestoreError: another rank could not load; this process must end.
        """
        if self._begun:
            return
        if not self.is_new and not self._loaded:
            raise UsageError(
                f"the job stands at step {self.step} and nothing was loaded: call torch.distributed.checkpoint.load() "
                "with a StorageReader of this attempt first, or give the job another name to begin afresh"
            )
        try:
            self._entry.agree(self._attempt, "staged")
            self._entry.agree(self._attempt, "applied")
        except NextRound as error:
            raise RestoreError(f"attempt {self.number} failed before it began: {error}; start again") from error
        self._begun, self._found = True, {}
        self._announced_bytes = self._sealer.announce(0, 0)  # the lock of a slot says that this world lives

    # Saving

    def check_saving(self, step: int) -> None:
        """Check that a step may be saved now.

        Raises:
            UsageError: it may not; the message says what to do.
            SupersededError: a later attempt was opened.
        """
        if not self._begun:
            raise UsageError("call begin() on all ranks, after what is to be loaded was loaded, and then save")
        if step <= self._tried_step:
            raise UsageError(
                f"step {step} can't be saved after step {self._tried_step}: each save has a step of its own, greater "
                "than the last, whether that was saved or not"
            )
        self._check_standing()

    def _check_standing(self) -> None:
        desired, superseded = self._entry.session.desired, self._entry.session.superseded
        if not superseded and desired is not None and desired.attempt > self.number:
            superseded = f"attempt {desired.attempt} of the job was opened after this one, number {self.number}"
        if superseded:
            raise SupersededError(f"{superseded}: this process saves nothing more and must end")

    def save(self, step: int, plan: Plan, snapshot: Snapshot, *, timeout_s: float) -> None:
        """Write a snapshot into a slot, and wait until the sidecar has hashed it.

        Raises:
            HookError: there is no slot, or the sidecar does not hash it in time; the step is skipped.
            SupersededError: a later attempt was opened.
        """
        with self._saving:
            self._tried_step = step
            try:
                self._fill(step, plan, snapshot, end_s=time.monotonic() + timeout_s)
            except (OSError, HookError) as error:
                self.skip(step, "not saved")
                if isinstance(error, OSError):
                    raise HookError(f"step {step} was not saved: the slot can't be written: {error}") from error
                raise

    def metadata(self) -> dict[str, str]:
        """Return the keys of an image's header, for its planning."""
        return self._sealer.metadata(0)

    def skip(self, step: int, reason: str) -> None:
        """Say that a step is not saved by this rank, so that nobody waits for it."""
        self._tried_step = max(self._tried_step, step)
        self._entry.session.skipped(wire.Skipped(attempt_uid=self._attempt.uid, step=step, reason=reason))

    def _fill(self, step: int, plan: Plan, snapshot: Snapshot, *, end_s: float) -> None:
        needed = plan.image_bytes(len(snapshot.document))
        if needed > self._announced_bytes:
            self._announced_bytes = self._sealer.announce(needed, len(snapshot.document))
        grant = self._await(lambda: self._granted(step, needed), end_s=end_s)
        if grant is None:
            trouble = "all are in use, or there is no room" if self._entry.session.connected else self._why_alone()
            raise HookError(f"step {step} was not saved: no free slot of {needed} bytes in time: {trouble}")
        try:
            page = self._sealer.begin(grant, step, asked=True)
            written = write_image(grant.target, plan, snapshot.tensors, snapshot.document, self._sealer.metadata(step))
            sealed = self._sealer.seal(grant, page, written)
        except OSError:
            self._sealer.give_up(grant, step, needed)
            raise
        if not self._await(lambda: is_hashed(grant.slot, sealed), end_s=end_s):
            raise HookError(f"step {step} was not hashed by the sidecar in time; see its log")

    def _granted(self, step: int, needed: int) -> Grant | None:
        session = self._entry.session
        grant = session.slots.take() if session.connected else None
        if grant is not None and grant.target.bytes < needed:
            self._sealer.give_up(grant, step, 1)  # empty, and too small by now: it is made anew
            return None
        return grant

    def _await(self, look: Callable[[], Any], *, end_s: float) -> Any:  # noqa: ANN401 - what is awaited
        while not (found := look()) and time.monotonic() < end_s:
            self._check_standing()
            time.sleep(_POLL_S)
        return found

    def _why_alone(self) -> str:
        return f"no sidecar ({self._entry.session.trouble})"

    def wait(self, step: int, asked: Level, *, timeout_s: float) -> None:
        """Wait until a step that all ranks have in memory is as safe as asked for.

        Raises:
            HookError: it is not in time.
            SupersededError: a later attempt was opened.
        """
        session = self._entry.session
        end_s = time.monotonic() + timeout_s
        if not self._await(lambda: reaches(self._level(step), asked), end_s=end_s):
            trouble = "'ckpt status' says what it waits for" if session.connected else self._why_alone()
            raise HookError(f"step {step} is safe in {self._level(step)!r} and not {asked!r} in time: {trouble}")

    def _level(self, step: int) -> Level:
        desired = self._entry.session.desired
        of_this = desired is not None and desired.attempt_uid == self._attempt.uid
        return level_of(desired if of_this else None, step, is_hashed=lambda: True)

    # The end, and another process

    def close(self) -> None:
        """End the connection; what was saved stays and is carried on."""
        if not self._closed:
            self._closed = True
            self._entry.session.close(timeout_s=5.0)

    def __reduce__(self) -> tuple[Any, ...]:
        """Go on in the process that unpickles this, and no more here: a rank has one connection that is lent slots."""
        if not self._begun:
            raise UsageError("call begin() before an attempt is handed to another process")
        with self._saving:
            self.close()
            self._entry.session.slots.hand_over()
        entry = self._entry
        given = (self._job, str(self._socket), self._sidecar_timeout_s, self._world, entry.launch_id, self._attempt)
        return _resume, given


_RESUMED: dict[str, Attempt] = {}
"""By uid the attempts that were handed over to this process."""


def _resume(
    job: str, socket: str, sidecar_timeout_s: float, world: World, launch_id: str, attempt: wire.Attempt
) -> Attempt:
    """Return the attempt that another process has handed over, the same each time."""
    if attempt.uid not in _RESUMED:
        resumed = object.__new__(Attempt)
        resumed._go_on(job, socket, sidecar_timeout_s, world, launch_id, attempt)
        _RESUMED[attempt.uid] = resumed
    return _RESUMED[attempt.uid]
