"""For trainers that save and load with ``torch.distributed.checkpoint``: a writer and a reader over the sidecar.

See ``Attempt``, and ``docs/guides/dcp.md``. No private name of torch is used.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from toprope.trainer_hooks.dcp.attempt import Attempt
from toprope.trainer_hooks.dcp.content import Contents, contents_of, inner_tensors, snapshot_of, stream_of
from toprope.trainer_hooks.errors import HookError, StateMismatchError, SupersededError, UsageError
from toprope.trainer_hooks.image.shard import Image, plan_image
from toprope.trainer_hooks.restore.blocks import Block, gap_in
from toprope.trainer_hooks.restore.reader import ShardReader
from toprope.trainer_hooks.save.ending import LEVELS, Level

__all__ = ["Attempt", "StorageReader", "StorageWriter", "step_of"]

logger = logging.getLogger("toprope")
_ID = re.compile(r"(?:.*/)?(?:step-)?([1-9][0-9]{0,17})/?")
_SKIPPED = "(skipped)"


def step_of(checkpoint_id: str | os.PathLike[str] | int | None) -> int:
    """Return the step that a checkpoint id names: ``1000``, ``"1000"``, ``"step-1000"``, ``"any/folder/step-1000"``.

    Raises:
        UsageError: it names none.
    """
    text = str(checkpoint_id) if isinstance(checkpoint_id, int) else os.fspath(checkpoint_id or "")
    match = _ID.fullmatch(text)
    if match is None:
        raise UsageError(f"checkpoint_id {checkpoint_id!r} names no step: give 'step-N', N the number of updates done")
    return int(match[1])


class StorageWriter(storage.StorageWriter):
    """Saves each rank's items as one snapshot. ``save()`` returns when the step is as safe as ``wait_for`` says.

    ``memory``: hashed in the memory of each rank's node; ``protected``: in that of a peer too; ``ready``: in the object
    store, and in the log. Each is waited for ``timeout_s``. A step that is not saved is an error on all ranks, as it is
    with torch's own writers; with ``strict=False`` it is logged, and training goes on.

    What is not a tensor is kept as typed JSON. Of a type that can't be, it is refused by name, or with ``allow_pickle``
    pickled; then it loads only with a reader that says the same.
    """

    def __init__(
        self,
        attempt: Attempt,
        *,
        wait_for: Level = "memory",
        timeout_s: float = 300.0,
        strict: bool = True,
        allow_pickle: bool = False,
    ) -> None:
        """Take what it works with.

        Raises:
            UsageError: there is no such level.
        """
        if wait_for not in LEVELS[1:]:
            raise UsageError(f"wait_for={wait_for!r} is no level; give one of {', '.join(LEVELS[1:])}")
        self._attempt, self._wait_for, self._timeout_s = attempt, wait_for, timeout_s
        self._strict, self._allow_pickle = strict, allow_pickle
        self._checkpoint_id: str | os.PathLike[str] | None = None
        self._step = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Take along what is needed in another process."""
        made = functools.partial(
            StorageWriter,
            wait_for=self._wait_for,
            timeout_s=self._timeout_s,
            strict=self._strict,
            allow_pickle=self._allow_pickle,
        )
        return made, (self._attempt,)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save."""
        self._checkpoint_id = checkpoint_id

    def set_up_storage_writer(self, is_coordinator: bool, *_args: object, **kwargs: object) -> None:  # noqa: ARG002, FBT001 - torch's signature
        """Check what is to be saved, and by whom.

        Raises:
            UsageError: the id names no step that can be saved now, or not all ranks save together.
            SupersededError: a later attempt was opened.
        """
        rank = kwargs.get("rank", self._attempt.world.rank)
        if not kwargs.get("use_collectives", True) or rank != self._attempt.world.rank:
            raise UsageError(
                "all ranks of the job save together, or the step can never be whole: give no process_group that has "
                "other ranks, and no use_collectives=False"
            )
        self._step = step_of(self._checkpoint_id)
        self._attempt.check_saving(self._step)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan with the step that this rank saves."""
        return SavePlan(plan.items, self._step, plan.planner_data, plan.usable)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans as they are.

        Raises:
            UsageError: not all ranks take part, or they save different steps.
        """
        size = self._attempt.world.size
        if len(plans) != size:
            raise UsageError(f"{len(plans)} of the {size} ranks of the job save; all of them must, or none")
        steps = sorted({plan.storage_data for plan in plans if plan.storage_data is not None})
        if len(steps) > 1:
            raise UsageError(f"the ranks save different steps: {', '.join(map(str, steps))}")
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the items of a plan into a slot, and wait until they are hashed.

        Raises:
            UnsupportedLeafError: an item can't be kept.
            HookError: the step was not saved, with ``strict``.
        """
        done: Future[list[WriteResult]] = Future()
        try:
            sizes = self._write(plan, planner)
        except (UsageError, SupersededError):
            self._attempt.skip(self._step, "not saved")
            raise
        except HookError as error:
            if self._strict:
                raise
            logger.warning("%s; training goes on", error)
            done.set_result([WriteResult(MetadataIndex(_SKIPPED), 0, str(error))])
            return done
        done.set_result([WriteResult(item.index, sizes.get(item.index.fqn, 0), None) for item in plan.items])
        return done

    def _write(self, plan: SavePlan, planner: SavePlanner) -> Mapping[str, int]:
        with torch.no_grad():
            snapshot = snapshot_of(plan, planner, self._attempt.world, allow_pickle=self._allow_pickle)
            image = plan_image(snapshot.tensors, self._attempt.metadata(), snapshot.pieces)
            self._attempt.save(self._step, image, snapshot, timeout_s=self._timeout_s)
        return {extent.name: extent.bytes for extent in image.extents}

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:  # noqa: ARG002 - torch's signature
        """Wait, on the rank that coordinates, until the step is as safe as asked for.

        Raises:
            HookError: it is not in time, with ``strict``.
        """
        skipped = [rank for rank, written in enumerate(results) if any(one.index.fqn == _SKIPPED for one in written)]
        if skipped:
            logger.warning("step %d was not saved: ranks %s skipped it", self._step, ", ".join(map(str, skipped)))
            return
        try:
            self._attempt.wait(self._step, self._wait_for, timeout_s=self._timeout_s)
        except SupersededError:
            raise
        except HookError as error:
            if self._strict:
                raise
            logger.warning("%s; training goes on", error)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Say whether an id names a step."""
        return _ID.fullmatch(os.fspath(checkpoint_id)) is not None


class StorageReader(storage.StorageReader):
    """Loads from the step that the attempt begins from, in any layout: torch's planner says which parts are needed.

    They are fetched from the nearest tier that has them, and verified, before the first of them is written. A value
    that was pickled when it was saved is unpickled only with ``allow_pickle``.
    """

    def __init__(self, attempt: Attempt, *, allow_pickle: bool = False) -> None:
        self._attempt, self._allow_pickle = attempt, allow_pickle
        self._checkpoint_id: str | os.PathLike[str] | None = None
        self._contents = Contents()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load."""
        self._checkpoint_id = checkpoint_id

    def read_metadata(self, *_args: object, **_more: object) -> Metadata:
        """Return what there is to load.

        Raises:
            UsageError: the job has no step yet, or stands at another one.
        """
        step = self._attempt.step
        if self._attempt.is_new:
            raise UsageError("this is a new job, and there is nothing to load: see attempt.is_new")
        if self._checkpoint_id is not None and step_of(self._checkpoint_id) != step:
            raise UsageError(
                f"the job stands at step {step}, on all ranks alike, and {self._checkpoint_id!r} is another one; give "
                "no checkpoint_id. 'ckpt export' gives any READY step to torch's own reader"
            )
        self._contents = contents_of(self._attempt.heads)
        return self._contents.metadata()

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_args: object, **_more: object) -> None:  # noqa: FBT001 - torch's signature
        """Do nothing: what there is to read is known."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fetch what the plan names, and then copy it to where the planner wants it.

        Raises:
            StateMismatchError: the shards do not hold each element once, or a value can't be read.
            RestoreError: something can't be had.
        """
        tensors = [item for item in plan.items if item.type is LoadItemType.TENSOR]
        values = [item for item in plan.items if item.type is LoadItemType.BYTE_IO]
        for name in sorted({item.storage_index.fqn for item in tensors}):
            self._check_whole(name)
        shards: dict[int, Image] = {}
        reader = ShardReader(self._contents.wholes, lambda rank, name: shards[rank].tensor(name))
        wanted = inner_tensors([self._contents.values[item.storage_index.fqn] for item in values])
        for rank, name in reader.used(LoadPlan(tensors)):
            wanted.setdefault(rank, set()).add(name)
        shards.update(self._attempt.tensors(wanted))
        streams = [self._stream(item.storage_index.fqn, shards) for item in values]
        reader.read_data(LoadPlan(tensors), planner)
        for item, stream in zip(values, streams, strict=True):
            planner.load_bytes(item, stream)
        self._attempt.note_loaded()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _stream(self, name: str, shards: Mapping[int, Image]) -> Any:  # noqa: ANN401 - a stream
        return stream_of(name, self._contents.values[name], shards, allow_pickle=self._allow_pickle)

    def _check_whole(self, name: str) -> None:
        whole = self._contents.wholes[name]
        blocks = [block for stored in whole.stored for block in stored.blocks if block.count]
        problem = gap_in(Block((0,) * len(whole.shape), whole.shape), blocks)
        if problem is not None and 0 not in whole.shape:
            raise StateMismatchError(f"{name}: {problem}")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Say whether an id names a step."""
        return _ID.fullmatch(os.fspath(checkpoint_id)) is not None
