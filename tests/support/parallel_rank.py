"""One rank of a parallel trainer, forked from a warm process: trains, waits at its gate, and tells what it ends with.

Arguments: ``KIND STEPS --hooks|--no-hooks --out DIRECTORY``. At step ``GATE`` each rank waits until the file ``go`` is
in its directory, so that a test can kill it where it wants.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from tests.support.parallel_kinds import GATE, JOB
from tests.support.parallel_trainers import Trainer, build
from torch import distributed

from toprope.trainer_hooks import Checkpointer, one_line_errors

GATE_TIMEOUT_S = 90.0


class Journal:
    """Lines as ``toprope.chaos.journal`` reads them."""

    def __init__(self, out: Path, rank: int) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._rank = rank
        self._path = out / f"rank-{rank}.jsonl"

    def write(self, event: str, *, step: int) -> None:
        line = {"event": event, "rank": self._rank, "pid": os.getpid(), "monotonic_s": time.monotonic(), "step": step}
        with self._path.open("a") as stream:
            stream.write(json.dumps(line) + "\n")


def main(arguments: Sequence[str]) -> None:
    """Train as one rank.

    DDP must be gone before its process group is: else it drops the last reference with the interpreter locked, waits
    for gloo's threads to end, and one of them waits for the interpreter.
    """
    with one_line_errors():
        distributed.init_process_group("gloo", timeout=timedelta(seconds=100))
        _train(*arguments)
        distributed.destroy_process_group()


def _train(kind: str, steps: str, hooks: str, _: str, out: str) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    journal = Journal(Path(out), rank)
    trainer = build(kind)
    checkpointer = Checkpointer(job=JOB, **trainer.named()) if hooks == "--hooks" else None
    first = 0 if checkpointer is None else checkpointer.restore()
    journal.write("begin", step=first)
    for step in range(first + 1, int(steps) + 1):
        trainer.step()
        if checkpointer is not None:
            end_step(checkpointer, step)
            journal.write("step", step=step)
            if step == GATE:
                _wait(Path(out) / "go")
    if checkpointer is not None:
        checkpointer.close()
    _finish(trainer, Path(out), rank=rank, world=world, step=int(steps))


def end_step(checkpointer: Checkpointer, step: int) -> None:
    """End a step once there is a slot for it; the first of a process shows how large one must be."""
    session, saver = checkpointer._session, checkpointer._saver
    assert session is not None
    assert saver is not None
    if saver._announced_bytes:
        with session._news:
            assert session._news.wait_for(lambda: bool(session.slots._free), 30), session.trouble
    checkpointer.end_step(step)


def _wait(path: Path) -> None:
    end = time.monotonic() + GATE_TIMEOUT_S
    while not path.exists():
        assert time.monotonic() < end, f"no {path}"
        time.sleep(0.02)


def _finish(trainer: Trainer, out: Path, *, rank: int, world: int, step: int) -> None:
    final = {"rank": rank, "world": world, "step": step, "digests": trainer.digest()}
    (out / f"final-rank-{rank}.json").write_text(json.dumps(final))
