"""Restoring: all ranks come to the same attempt, check what they are given, and apply it, or all of them raise."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from toprope.trainer_hooks.capture import rng
from toprope.trainer_hooks.capture.state import Parts, model_devices
from toprope.trainer_hooks.errors import RestoreError, UsageError
from toprope.trainer_hooks.link import wire
from toprope.trainer_hooks.link.source import SourceError, StagedSource
from toprope.trainer_hooks.restore.apply import apply
from toprope.trainer_hooks.restore.entering import Entry, NextRound
from toprope.trainer_hooks.restore.fitting import Fit, fit, fit_weights
from toprope.trainer_hooks.restore.relaxing import Allowed, Report

logger = logging.getLogger("toprope")


@dataclass(slots=True)
class Restorer:
    """Brings this process into an attempt and its source into the trainer."""

    entry: Entry
    parts: Parts
    names: Mapping[str, frozenset[str]]
    """Of all ranks together."""
    allowed: Allowed
    applied: Callable[[wire.Attempt, Report], None] = lambda *_: None
    """Called once the source is in the trainer, before the others hear of that."""
    staged: tuple[wire.StagedShard, ...] = ()
    """The shards that the attempt began from, each with the tier and node that it came from."""
    report: Report = field(default_factory=Report)
    """What was done beyond bringing back what was saved."""

    def restore(self, members: tuple[wire.Member, ...]) -> wire.Attempt:
        """Return the attempt that this process is now in, its source applied.

        Raises:
            HookError: nothing could be restored, and why.
        """
        attempt, _ = self.entry.enter(members, self._enter)
        logger.info("attempt %d begins after step %d (%s)", attempt.number, attempt.from_step, attempt.source)
        return attempt

    def _enter(self, attempt: wire.Attempt) -> None:
        source = StagedSource(attempt=attempt, ask=lambda number, wants: self.entry.stage(attempt, number, wants))
        found = self._checked(attempt, source)
        self.staged = tuple(source.shards[rank] for rank in sorted(source.shards))
        self.entry.agree(attempt, "staged")
        try:
            if found is not None:
                self._apply(attempt, found)
            del found, source  # and with them what is mapped of the source: the sidecar makes slots in its room
            self.applied(attempt, self.report)
        except Exception as error:
            self.entry.say(attempt, "applied", ok=False, reason=repr(error), misfit=True)
            raise RestoreError(f"applying step {attempt.from_step} failed: {error!r}; this process must end") from error
        with suppress(NextRound):
            self.entry.agree(attempt, "applied")
            return
        raise RestoreError(f"attempt {attempt.number} failed while it was applied; this process must end")

    def _checked(self, attempt: wire.Attempt, source: StagedSource) -> Fit | None:
        """Return the checked state, None for a fresh start."""
        if attempt.source == "fresh":
            source.join()
            return None
        try:
            rank, world = self.entry.world.rank, self.entry.world.size
            if attempt.weights_only:
                return fit_weights(self.parts, source, self.names, rank=rank, world=world)
            return fit(self.parts, source, self.names, rank=rank, world=world, allowed=self.allowed)
        except SourceError as error:  # the source's fault: another one may do
            self.entry.say(attempt, "staged", ok=False, reason=str(error))
            raise NextRound(str(error)) from error
        except UsageError as error:  # the trainer's fault: no other source would fit
            self.entry.say(attempt, "staged", ok=False, reason=str(error), misfit=True)
            raise

    def _apply(self, attempt: wire.Attempt, found: Fit) -> None:
        apply(found.loaded)
        self.report = found.report
        for line in found.report.lines():
            logger.warning("step %d and this trainer differ, which was allowed: %s", attempt.from_step, line)
        for note in found.notes:
            logger.warning("step %d was saved in another layout: %s", attempt.from_step, note)
        if "rng" in found.loaded.left and not attempt.weights_only:
            # No rank of the checkpoint had this rank's streams: they begin anew, each rank's different from all others.
            devices = model_devices(found.loaded.model)
            rng.derive_streams(attempt.job_uid, step=attempt.from_step, rank=self.entry.world.rank, devices=devices)
            logger.warning(
                "step %d was saved by %d ranks, not %d: random streams are derived from job, step and rank",
                attempt.from_step,
                attempt.source_world,
                self.entry.world.size,
            )
