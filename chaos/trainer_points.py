"""Kill points around what a trainer does to a slot; its hook has no ports, so functions are wrapped by name."""

from __future__ import annotations

from toprope.chaos.killpoints import points_from_env
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
