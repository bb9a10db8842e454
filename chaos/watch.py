"""Watches a trainer from outside its script: which steps it ends, what saving costs them, in which state it ends.

``python -m toprope.chaos.watch OUT [--reference] [--step-s S] SCRIPT ARGUMENTS…`` runs the script as it is, with the
hook's own calls watched: a journal of each rank and digests of its final state go to the directory ``OUT``. With
``--reference`` the hook does nothing but tell: that is the run to compare with. A trainer must call ``close()``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from toprope.chaos.defects import switch_off_from_env
from toprope.chaos.trainer_points import can_be_spoilt, pass_points
from toprope.trainer_hooks import checkpointer as hook
from toprope.trainer_hooks.capture.state import capture
from toprope.trainer_hooks.checkpointer import Checkpointer
from toprope.trainer_hooks.save.ending import Closed
from toprope.trainer_hooks.warmup import warm_up as warmed

_SCHEDULED = Path("/proc/thread-self/schedstat")


@dataclass(slots=True)
class Watch:
    """What one rank writes about itself."""

    out: Path
    step_s: float = 0.0
    fence_s: float = 0.0
    """How long updates have waited for lazy copies so far."""
    rank: int = field(default_factory=lambda: int(os.environ.get("RANK", "0")))
    _ended_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)

    def write(self, event: str, **more: object) -> None:
        """Append an event to the journal, whole."""
        line = {"event": event, "rank": self.rank, "pid": os.getpid(), "monotonic_s": time.monotonic(), **more}
        with (self.out / f"rank-{self.rank}.jsonl").open("ab", buffering=0) as stream:
            stream.write(json.dumps(line).encode() + b"\n")

    def ended(self, step: int, loss: object, **more: object) -> None:
        """Note a step that has ended, and let it take as long as a step should."""
        known: Any = loss.detach() if isinstance(loss, torch.Tensor) else loss
        lost = 0.0 if known is None else float(known)
        self.write("step", step=step, loss=lost if math.isfinite(lost) else None, **more)
        if self.step_s:
            time.sleep(max(0.0, self._ended_s + self.step_s - time.monotonic()))
        self._ended_s = time.monotonic()

    def final(self, checkpointer: Checkpointer) -> None:
        """Leave digests of the state that the hook is to keep, by part."""
        step = checkpointer._next_step - 1  # noqa: SLF001 - a look from outside
        if (self.out / f"final-rank-{self.rank}.json").exists() or step < 1:
            return
        world = checkpointer._world  # noqa: SLF001 - a look from outside
        digests = state_digests(checkpointer, world.rank, world.size)
        final = {"rank": self.rank, "world": world.size, "step": step, "digests": digests}
        (self.out / f"final-rank-{self.rank}.json").write_text(json.dumps(final))
        self.write("end", step=step)


def has_saved(checkpointer: Checkpointer, step: int) -> bool:
    """Say whether a snapshot of this step was taken, or begun: a lazy one is sealed in the step after it."""
    saver = checkpointer._saver  # noqa: SLF001 - a look from outside
    begun = None if saver is None else saver._begun  # noqa: SLF001 - a look from outside
    return checkpointer.stats.snapshot_step == step or (begun is not None and begun[1] == step)


def queued_so_far_s() -> float:
    """Return how long this thread has been ready to run and no processor was free; 0 where that is not counted."""
    try:
        return int(_SCHEDULED.read_text().split()[1]) / 1e9
    except FileNotFoundError:
        return 0.0


def state_digests(checkpointer: Checkpointer, rank: int, world: int) -> dict[str, str]:
    """Return SHA-256 digests of what this rank would save now: of the tensors of each part, and of all else."""
    snapshot = capture(checkpointer._parts, rank=rank, world=world)  # noqa: SLF001 - a look from outside
    hashed = {"other": hashlib.sha256(snapshot.document)}
    for name, tensor in sorted(snapshot.tensors.items()):
        part = hashed.setdefault(name.partition(".")[0], hashlib.sha256())
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        part.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        part.update(plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
    return {part: one.hexdigest() for part, one in sorted(hashed.items())}


def listen(watch: Watch) -> None:
    """Note what the hook is asked for, and let it do it."""
    restored, ended, closed = Checkpointer.restore, Checkpointer.end_step, Checkpointer.close

    def restore(self: Checkpointer, warm_up: Callable[[], object] | None = None, **allowed: bool) -> int:
        step = restored(self, warm_up, **allowed)
        sources = [{"rank": one.rank, "tier": one.tier, "node": one.node} for one in self.sources]
        watch.write("begin", step=step, restored=sources)
        return step

    def end_step(self: Checkpointer, step: int, loss: object = None, **more: bool) -> None:
        began_s, queued_s, fence_s = time.monotonic(), queued_so_far_s(), watch.fence_s
        ended(self, step, loss, **more)
        watch.fence_s = self.stats.fence_wait_s  # an update that waited for a lazy copy was held up by saving too
        took_s = time.monotonic() - began_s + watch.fence_s - fence_s
        queued_s = min(queued_so_far_s() - queued_s, took_s)
        watch.ended(step, loss, took_s=took_s, queued_s=queued_s, saved=has_saved(self, step))

    def close(self: Checkpointer, *arguments: Any, **named: Any) -> Closed:  # noqa: ANN401 - passes all on
        watch.final(self)
        return closed(self, *arguments, **named)

    _put(restore, end_step, close)


def stand_in(watch: Watch) -> None:
    """Let the hook do nothing but tell the watch."""

    def restore(self: Checkpointer, warm_up: Callable[[], object] | None = None, **_allowed: bool) -> int:
        if warm_up is not None:
            warmed(self._parts, warm_up)
        watch.write("begin", step=0)
        self._next_step = 1
        return 0

    def end_step(self: Checkpointer, step: int, loss: object = None, **_more: bool) -> None:
        self._next_step = step + 1
        watch.ended(step, loss)

    def close(self: Checkpointer, *_arguments: Any, **_named: Any) -> Closed:  # noqa: ANN401 - takes all
        watch.final(self)
        return Closed(asked="nothing", saving=False)

    _put(restore, end_step, close)


def _put(restore: object, end_step: object, close: object) -> None:
    kind: Any = hook.Checkpointer
    kind.restore, kind.end_step, kind.close = restore, end_step, close


def main(arguments: Sequence[str] | None = None) -> None:
    """Watch the script that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--reference", action="store_true")
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    watch = Watch(options.out, options.step_s)
    watch.write("start", world=int(os.environ.get("WORLD_SIZE", "1")))
    if options.reference:
        stand_in(watch)
    else:
        switch_off_from_env("trainer")
        pass_points()
        can_be_spoilt()
        listen(watch)
    sys.argv = [options.script, *options.arguments]
    sys.path.insert(0, str(Path(options.script).parent))
    try:
        runpy.run_path(options.script, run_name="__main__")
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            watch.write("failed", error=f"{type(error).__name__}: {error}"[:500])
        raise


if __name__ == "__main__":
    main()
