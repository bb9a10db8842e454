"""Points around what a trainer does to a slot, and after its steps; its hook has no ports: functions are wrapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from toprope.chaos.killpoints import STEP_ENDED, KillPoints, points_from_env
from toprope.chaos.patching import replace


def pass_points() -> None:
    """From now on this process passes points where it writes pages and slots and says that one is sealed."""
    points = points_from_env()
    replace(
        {
            ("toprope.trainer_hooks.link.sealing", "write_page"): lambda write: points.around("page.write", write),
            ("toprope.trainer_hooks.save.saving", "write_image"): lambda write: points.around("slot.write", write),
            ("toprope.trainer_hooks.link.session", "Session.sealed"): lambda say: points.around("socket.sealed", say),
        }
    )


def can_be_poisoned() -> None:
    """From now on this process passes a point when a step has ended, at which its next gradient can be spoilt."""
    points = points_from_env()
    replace({("toprope.trainer_hooks.checkpointer", "Checkpointer.end_step"): lambda end: _ending(points, end)})


def _ending(points: KillPoints, end: Callable[..., None]) -> Callable[..., None]:
    def end_step(self: Any, step: int, *arguments: Any, **named: Any) -> None:  # noqa: ANN401 - as Checkpointer.end_step
        end(self, step, *arguments, **named)
        if points.asked(STEP_ENDED, "nan"):
            models = self._parts.models()
            poison([models] if isinstance(models, torch.nn.Module) else list(models.values()))

    return end_step


def poison(models: list[torch.nn.Module]) -> None:
    """Let one gradient of the next backward pass be no number, once."""
    parameter = next(one for model in models for one in model.parameters() if one.requires_grad)

    def no_number(gradient: torch.Tensor) -> torch.Tensor:
        handle.remove()
        return gradient * float("nan")

    handle = parameter.register_hook(no_number)  # type: ignore[no-untyped-call]
