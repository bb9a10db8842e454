"""Puts functions in the place of others, by name: how a safeguard is switched off to see whether anybody notices."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Patches: TypeAlias = Mapping[tuple[str, str], Callable[[Any], Any]]
"""Module and dotted name to what makes, of what is there, what takes its place."""


def replace(patches: Patches) -> list[Callable[[], None]]:
    """Put each in place, and return what undoes it."""
    undo: list[Callable[[], None]] = []
    for (module, dotted), make in patches.items():
        owner: Any = importlib.import_module(module)
        *path, name = dotted.split(".")
        for part in path:
            owner = getattr(owner, part)
        undo.append(_put(owner, name, make(getattr(owner, name))))
    return undo


def _put(owner: Any, name: str, value: object) -> Callable[[], None]:  # noqa: ANN401 - a module or a class
    before = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)
