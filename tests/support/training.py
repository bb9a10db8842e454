"""Types that training tests share."""

from __future__ import annotations

from typing import Protocol

from toprope.chaos.journal import Final


class Reference(Protocol):
    """Returns the final state of a run without hooks and without interruption."""

    def __call__(self, *, world: int, arguments: tuple[str, ...]) -> tuple[Final, ...]: ...
