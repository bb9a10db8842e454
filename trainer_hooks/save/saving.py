"""Saving: on a due step, one copy of the state into a lent slot. It never raises for what is not the user's doing."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from toprope.trainer_hooks.capture.state import Snapshot
from toprope.trainer_hooks.errors import HookError, SupersededError, UsageError
from toprope.trainer_hooks.image.copying import Copier, threads_for_copying
from toprope.trainer_hooks.image.shard import Plan, plan_image, write_image
from toprope.trainer_hooks.launch import World
from toprope.trainer_hooks.link import wire
from toprope.trainer_hooks.link.sealing import Sealer, is_hashed
from toprope.trainer_hooks.link.session import Session
from toprope.trainer_hooks.link.slot import Page
from toprope.trainer_hooks.link.slots import Grant
from toprope.trainer_hooks.save.lazy import Lazy

logger = logging.getLogger("toprope")


@dataclass(slots=True)
class Stats:
    """What came of the due steps. ``skipped`` counts by reason.

    ``lazy_snapshots`` are those of which a part was copied during the next step; ``fence_wait_s`` is how long updates
    have waited for that in all.
    """

    snapshots: int = 0
    snapshot_step: int = 0
    lazy_snapshots: int = 0
    fence_wait_s: float = 0.0
    skipped: Counter[str] = field(default_factory=Counter)


class Saver:
    """Takes the snapshots of one attempt."""

    def __init__(  # noqa: PLR0913 - what it works with
        self,
        session: Session,
        attempt: wire.Attempt,
        world: World,
        capture: Callable[[], Snapshot],
        *,
        strict: bool,
        stats: Stats,
        lazy_for: Mapping[str, torch.optim.Optimizer],
    ) -> None:
        """Take over. ``lazy_for`` are the optimizers whose tensors may be copied after the end of a step."""
        self.stats = stats
        self._session = session
        self._attempt = attempt
        self._sealer = Sealer(session, attempt, world)
        self._capture = capture
        self._strict = strict
        self._schedule = attempt.schedule
        self.extra_step = 0
        """A step that all ranks save, due or not, and end at, as this rank has heard; 0: none."""
        self._last_step = 0
        """The last of all, as the trainer has said; 0: it has not."""
        self._plan: Plan | None = None
        self._form: object = None
        """What the plan is for."""
        self._announced_bytes = 0
        self._trouble = ""
        self.skipped_step = 0
        """The newest step that was skipped; 0: none, or it was taken after all."""
        self._skip_reason = ""
        self._last: tuple[wire.Slot, wire.Sealed] | None = None
        self._copier = Copier(threads=threads_for_copying())
        self._lazy = Lazy(lazy_for, self._copier)
        self._begun: tuple[Grant, int, int] | None = None
        """The snapshot that was not sealed by the end of its step: slot, step, and length of its image."""

    def end_step(self, step: int, *, last: bool = False) -> None:
        """Take a snapshot if the step is due; the last of all is.

        Raises:
            SupersededError: a later attempt was opened.
            HookError: a snapshot was skipped, or a tier fails, and ``strict`` asks for an error.
        """
        self.heed(step)
        if self._announced_bytes == 0:
            self.announce()
        if last:
            self._last_step = step
        if self._schedule.due(step) or self._is_asked(step):
            self._save(step)

    def _is_asked(self, step: int) -> bool:
        """Say whether a step is due in each tier, whatever the cadence."""
        return step in {self.extra_step, self._last_step}

    def heed(self, step: int) -> None:
        """Take in, at the end of a step, what came of the snapshot before it and what the coordinator wants by now.

        Raises:
            SupersededError: a later attempt was opened.
            HookError: with ``strict``: the snapshot before is void, or saved steps do not reach a tier.
        """
        self._settle()
        if self._session.superseded:
            raise SupersededError(self._session.superseded)
        desired = self._session.desired
        if desired is not None:
            self._follow(desired, step)

    def _follow(self, desired: wire.Desired, step: int) -> None:
        if desired.attempt > self._attempt.number:
            raise SupersededError(
                f"attempt {desired.attempt} of the job was opened after this one, number {self._attempt.number}: "
                "this process saves nothing more and must end"
            )
        if desired.attempt_uid != self._attempt.uid:
            return
        if self._strict and desired.trouble:
            raise HookError(f"what is saved is not as safe as it should be: {desired.trouble}")
        if step > desired.schedule.from_step:
            self._schedule = desired.schedule
        self.extra_step = desired.extra_step

    def hear_extra(self, then: Callable[[], None]) -> None:
        """Call ``then`` on the background thread whenever the coordinator may have named another step."""
        self._session.on_desired = then

    def named_step(self) -> int:
        """Return the step that the coordinator has named by now for all ranks to save and end at; 0: none."""
        desired = self._session.desired
        return desired.extra_step if desired is not None and desired.attempt_uid == self._attempt.uid else 0

    def pass_over(self, step: int) -> None:
        """Count and tell that this rank had ended that step before it heard that it was to be saved. On any thread."""
        self.stats.skipped["heard too late"] += 1
        self._session.skipped(wire.Skipped(attempt_uid=self._attempt.uid, step=step, reason="heard too late"))

    def ask(self, *, after: int, step: int) -> None:
        """Ask that a step go to each tier; see ``wire.Ask``. May be called by a signal's handler."""
        self._session.ask(wire.Ask(attempt_uid=self._attempt.uid, after=after, step=step))

    def ask_for_last(self, step: int) -> None:
        """Ask that the last step go to each tier, if there is a snapshot of it."""
        if step and self.stats.snapshot_step == step:
            self.ask(after=step, step=step)

    def announce(self) -> None:
        """Tell the sidecar how large an image is, once the state of the optimizer is there.

        Raises:
            HookError: a value can't be kept, with ``strict``.
        """
        try:
            snapshot = self._capture()
            plan = self._plan_for(snapshot)
        except UsageError as error:
            self._note_trouble("unsupported value", str(error))
            return
        self._announce_size(plan.image_bytes(len(snapshot.document)), len(snapshot.document))

    def _announce_size(self, image_bytes: int, document_bytes: int) -> None:
        self._announced_bytes = self._sealer.announce(image_bytes, document_bytes)

    def _save(self, step: int) -> None:
        if not self._session.connected:
            self._skip(step, "no sidecar", self._session.trouble)
            return
        if self._lazy.busy:
            self._skip(step, "still copying", "the snapshot before it is not copied yet")
            return
        grant = self._session.slots.take()
        if grant is None:
            self._skip_for_want_of_a_slot(step)
            return
        try:
            snapshot = self._capture()
            plan = self._plan_for(snapshot)
        except UsageError as error:
            self._session.slots.give_back(grant)
            self._skip(step, "unsupported value", str(error))
            return
        needed = plan.image_bytes(len(snapshot.document))
        if needed > grant.target.bytes:
            self._announce_size(needed, len(snapshot.document))
            detail = f"a slot has {grant.target.bytes} bytes and the state needs {needed}"
            self._give_up(grant, step, needed, "state has grown", detail)
            return
        self._fill(grant, step, plan, snapshot)

    def _skip_for_want_of_a_slot(self, step: int) -> None:
        desired = self._session.desired
        if desired is not None and desired.no_slots:
            self._skip(step, "no memory for slots", desired.no_slots)
        else:
            self._skip(step, "no free slot", "all slots are in use, or the sidecar has not made them yet")

    def _plan_for(self, snapshot: Snapshot) -> Plan:
        if self._plan is None or self._form is not snapshot.form:
            self._plan = plan_image(snapshot.tensors, self._sealer.metadata(0), snapshot.pieces)
            self._form = snapshot.form
        return self._plan

    def _fill(self, grant: Grant, step: int, plan: Plan, snapshot: Snapshot) -> None:
        asked = self._is_asked(step)
        later = self._lazy.later(snapshot)  # asked or not: the proof is of the tensors as they are now
        if asked:
            later = frozenset()
        try:
            page = self._sealer.begin(grant, step, asked=asked)
            written = write_image(
                grant.target,
                plan,
                snapshot.tensors,
                snapshot.document,
                self._sealer.metadata(step),
                later=later,
                copier=self._copier,
            )
            if not later:
                self._seal(grant, page, written)
        except (OSError, RuntimeError) as error:
            self._give_up(grant, step, plan.image_bytes(len(snapshot.document)), "slot can't be written", str(error))
            return
        self._lazy.prove(grant.target, plan, snapshot)
        if later:
            self._begun = (grant, step, written)
            self._lazy.start(grant.target, plan, snapshot, later, lambda: self._seal(grant, page, written))
        elif self._trouble:
            self._note_recovery(step)

    def _seal(self, grant: Grant, page: Page, image_bytes: int) -> None:
        """Hand a slot over, now that all of it is written; on the thread that has written the last of it."""
        self._last = (grant.slot, self._sealer.seal(grant, page, image_bytes))
        self.stats.snapshot_step = page.step
        self.stats.snapshots += 1

    def _settle(self) -> None:
        """Take in what came of the snapshot that was not sealed by the end of its step."""
        if self._begun is None or self._lazy.busy:
            return
        grant, step, written = self._begun
        self._begun = None
        self.stats.fence_wait_s = self._lazy.waited_s
        trouble = self._lazy.trouble()
        if not trouble:
            self.stats.lazy_snapshots += 1
            self._note_recovery(step)
            return
        self._lazy.distrust(trouble)
        logger.warning("step %d is void: %s; all is copied at once from now on", step, trouble)
        self._give_up(grant, step, written, "void", trouble)

    def finish(self, timeout_s: float) -> bool:
        """Wait until the last snapshot is copied, and stop copying.

        When time is up that snapshot is given up, since its state may change from now on, and False is returned.
        """
        if not self._lazy.wait(timeout_s):
            self._lazy.abandon()  # or it would be sealed whatever becomes of the state that it is copied from
            step = self._begun[1] if self._begun is not None else 0
            self._skip(step, "copied too late", f"it was not copied within {timeout_s:.1f} s, and is given up")
            return False
        self._settle()
        self._lazy.close()
        self._copier.close()
        return True

    def _note_recovery(self, step: int) -> None:
        if self._trouble:
            logger.info("saving again: step %d is saved", step)
            self._trouble = ""

    def _give_up(self, grant: Grant, step: int, image_bytes: int, reason: str, detail: str) -> None:
        """Skip a step whose slot is not whole: the sidecar sees from its page that it is not, and takes it back."""
        self._sealer.give_up(grant, step, image_bytes)
        self._skip(step, reason, detail)

    def last_is_hashed(self) -> bool:
        """Say whether the sidecar has hashed the newest snapshot, or has gone on to use its slot again."""
        if self._lazy.busy:
            return False
        return self._last is None or is_hashed(*self._last)

    def retake(self, step: int) -> bool:
        """Take the snapshot that was skipped at the end of this step; return False when it can't be taken yet."""
        grant = self._session.slots.take() if self._session.connected and not self._lazy.busy else None
        if grant is None:
            return False
        self._session.slots.give_back(grant)
        self.stats.skipped[self._skip_reason] -= 1
        self.skipped_step = 0
        self._save(step)
        return True

    def _skip(self, step: int, reason: str, detail: str) -> None:
        self.stats.skipped[reason] += 1
        self.skipped_step, self._skip_reason = step, reason
        self._session.skipped(wire.Skipped(attempt_uid=self._attempt.uid, step=step, reason=reason))
        self._note_trouble(reason, f"step {step} was not saved: {detail}")

    def _note_trouble(self, reason: str, detail: str) -> None:
        if self._strict:
            raise HookError(f"{reason}: {detail}")
        if reason != self._trouble:
            self._trouble = reason
            logger.warning("%s: %s; training goes on", reason, detail)
