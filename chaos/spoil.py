"""Runs a training script whose restore goes wrong on purpose: the proof that a comparison of two runs can say no.

``python -m toprope.chaos.spoil rng|weights SCRIPT ARGUMENTS…`` runs the script as it is, but each restore that brings
back a step leaves one random stream one draw ahead, or one weight off by its last bit.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from toprope.trainer_hooks import Checkpointer

SPOILS = ("rng", "weights")


def spoil(what: str) -> None:
    """Make each later ``Checkpointer.restore`` in this process bring back a slightly wrong state."""
    assert what in SPOILS, what
    made, restored = Checkpointer.__init__, Checkpointer.restore
    models: dict[int, torch.nn.Module] = {}

    def remember(self: Checkpointer, *arguments: Any, **named: Any) -> None:  # noqa: ANN401 - passes all on
        models[id(self)] = named["model"]
        made(self, *arguments, **named)

    def restore(self: Checkpointer, warm_up: Callable[[], object] | None = None, **allowed: bool) -> int:
        step = restored(self, warm_up, **allowed)
        if step > 0 and what == "rng":
            torch.rand(1)
        elif step > 0:
            _nudge(next(models[id(self)].parameters()))
        return step

    Checkpointer.__init__ = remember  # type: ignore[method-assign]
    Checkpointer.restore = restore  # type: ignore[method-assign]


def _nudge(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        first = parameter.view(-1)[:1]
        first.copy_(torch.nextafter(first, torch.full_like(first, float("inf"))))


def main() -> None:
    """Spoil, then run the script named on the command line as ``__main__``."""
    what, script, *arguments = sys.argv[1:]
    spoil(what)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
