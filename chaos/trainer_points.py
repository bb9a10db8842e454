"""Points around what a trainer does to a slot, and after its steps; its hook has no ports: functions are wrapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from toprope.chaos.killpoints import SPOILT, STEP_ENDED, Action, KillPoints, points_from_env
from toprope.chaos.patching import replace

SWOLLEN = 8.0
"""By how much weights are larger once they are swollen."""


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


def can_be_spoilt() -> None:
    """From now on this process passes a point when an update is done, at which its numbers can be spoilt."""
    points = points_from_env()
    replace({("toprope.trainer_hooks.checkpointer", "Checkpointer.end_step"): lambda end: ending(points, end)})


def ending(points: KillPoints, end: Callable[..., None]) -> Callable[..., None]:
    """Return ``Checkpointer.end_step`` with a point before it, at which numbers are spoilt if that is armed."""

    def end_step(self: Any, step: int, *arguments: Any, **named: Any) -> None:  # noqa: ANN401 - as Checkpointer.end_step
        action = points.asked(STEP_ENDED, f"/{step}/")
        if action in _SPOILS:
            models = self._parts.models()
            done = _SPOILS[action]([models] if isinstance(models, torch.nn.Module) else list(models.values()))
            points.tell(STEP_ENDED, SPOILT, f"{done} after step {step}")
        end(self, step, *arguments, **named)

    return end_step


def poison(models: list[torch.nn.Module]) -> str:
    """Let one gradient of the next backward pass be no number, once."""
    parameter = _first(models)

    def no_number(gradient: torch.Tensor) -> torch.Tensor:
        handle.remove()
        return gradient * float("nan")

    handle = parameter.register_hook(no_number)  # type: ignore[no-untyped-call]
    return "the next gradient is NaN"


def swell(models: list[torch.nn.Module]) -> str:
    """Make all weights larger, as an update by far too long would."""
    with torch.no_grad():
        for model in models:
            for parameter in model.parameters():
                parameter.mul_(SWOLLEN)
    return f"all weights were multiplied by {SWOLLEN:g}"


def flip(models: list[torch.nn.Module]) -> str:
    """Flip the highest bit of the mantissa of one weight, as a faulty processor would."""
    with torch.no_grad():
        one = _first(models).view(-1)[:1]
        before = one.item()
        one.view(torch.int32).bitwise_xor_(1 << 22)
        return f"a weight was {before:.6g} and is {one.item():.6g}"


def _first(models: list[torch.nn.Module]) -> torch.nn.Parameter:
    return next(one for model in models for one in model.parameters() if one.requires_grad)


_SPOILS: dict[Action | None, Callable[[list[torch.nn.Module]], str]] = {"nan": poison, "spike": swell, "weight": flip}
