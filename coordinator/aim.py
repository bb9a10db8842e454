"""The step that all holders go for while pulls take long. Pure.

A holder takes the newest snapshot of each rank. While a pull is shorter than the time between snapshots, all take the
same steps. When it is not, they could miss each other for ever, each with another step of its rank. So a step that all
ranks have held for a while, and that is not protected yet, is named: it is copied first, and kept, until it is
protected, or one of its shards is lost, or its time is up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from toprope.coordinator.protection import Safety
from toprope.coordinator.roll import Node

SLOW_AFTER_S = 5.0
PATIENCE_S = 60.0
LEAST_BYTES_PER_S = 20e6
"""Whoever copies more slowly than this, and than the patience, is not waited for."""


@dataclass(slots=True)
class Aim:
    """``step`` is gone for (0: none); ``common_since`` says from when on all ranks have held a step."""

    step: int = 0
    common_since: dict[int, float] = field(default_factory=dict)
    given_up: int = 0
    steps_missed: int = 0
    """So many steps were done while the last one that was gone for was copied; 0: copies keep up."""
    _until_s: float = 0.0
    _guarded: int = 0

    def forget(self) -> None:
        """Go for nothing, and know nothing."""
        self.step, self.given_up, self.steps_missed = 0, 0, 0
        self.common_since.clear()

    def advice(self, every: int) -> str:
        """Return what cadence copies could keep up with, if not with this one."""
        enough = every
        while enough < self.steps_missed:
            enough *= 2
        return (
            f"copies are slower than the cadence: {self.steps_missed} steps were done while one was copied; "
            f"--every {enough} would keep up"
        )

    def steer(self, safety: Safety, nodes: Sequence[Node], *, reached: int, now_s: float) -> None:
        """Choose what to go for from now on; ``reached`` is the newest step of any rank, if one is gone for."""
        open_steps = [step for step in safety.common if step > safety.guarded_step]
        self.common_since = {step: self.common_since.get(step, now_s) for step in open_steps}
        if self.step in open_steps and now_s < self._until_s:
            return
        if self.step in open_steps:
            self.given_up = self.step
        if self.step:
            self.steps_missed = reached - self.step
        elif safety.guarded_step > self._guarded:
            self.steps_missed = 0  # one was protected that nobody had to go for
        self._guarded = safety.guarded_step
        slow = [step for step in open_steps if step > self.given_up and now_s - self.common_since[step] >= SLOW_AFTER_S]
        self.step = max(slow, default=0)
        if not self.step:
            return
        largest = max((c.bytes for node in nodes for c in node.inventory.copies if c.step == self.step), default=0)
        self._until_s = now_s + PATIENCE_S + largest / LEAST_BYTES_PER_S
