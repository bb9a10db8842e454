"""A rank that starts late, or whose state holds at some steps what can't be kept; it notes what it began from and did.

``LATE_S`` in its environment are the seconds that it sleeps before anything, ``ODD_STEPS`` the steps, with commas, at
which there is a value that can't be kept, ``LEFT_OUT`` those that it does not call ``end_step`` for; ``STRICT``: a step
that is not saved ends it. It writes ``OUT/rank-R.jsonl``:
a line for its restore, and one for each step with how long ``end_step`` took, how many collectives it called, and how
many snapshots there have been.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.tiny_trainer import tiny
from torch import distributed

from toprope.trainer_hooks.checkpointer import Checkpointer

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "broadcast",
    "barrier",
    "gather",
    "scatter",
    "reduce",
)


class Watch:
    """Counts the collectives that are called while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.count = 0
        for name in COLLECTIVES:
            setattr(distributed, name, self._counted(getattr(distributed, name)))

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: object, **more: object) -> object:
            self.count += self.on
            return real(*args, **more)

        return called


def steps_of(variable: str) -> set[int]:
    return {int(step) for step in os.environ.get(variable, "").split(",") if step}


def main(arguments: list[str]) -> None:
    """Train some steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-delay", type=float, default=0.0)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    rank = int(os.environ["RANK"])
    time.sleep(float(os.environ.get("LATE_S", "0")))
    distributed.init_process_group("gloo")
    odd, left_out = steps_of("ODD_STEPS"), steps_of("LEFT_OUT")
    trainer, watch = tiny(ddp=True), Watch()
    extra: dict[str, Any] = {"kept": 1}
    strict = "STRICT" in os.environ
    ckpt = Checkpointer(job=options.job, **trainer.named(), extra=extra, strict=strict)
    first = ckpt.restore() + 1
    with (options.out / f"rank-{rank}.jsonl").open("a", buffering=1) as lines:
        lines.write(json.dumps({"restored": first - 1}) + "\n")
        for step in range(first, options.steps + 1):
            trainer.step()
            if step in left_out:
                continue
            extra["odd"] = object() if step in odd else None
            watch.on, watch.count = True, 0
            began_s = time.monotonic()
            ckpt.end_step(step)
            took_s, watch.on = time.monotonic() - began_s, False
            said = {"step": step, "took_s": took_s, "collectives": watch.count, "skipped": dict(ckpt.stats.skipped)}
            lines.write(json.dumps(said | {"snapshots": ckpt.stats.snapshots}) + "\n")
            time.sleep(options.step_delay)
    ckpt.close()
    distributed.destroy_process_group()
