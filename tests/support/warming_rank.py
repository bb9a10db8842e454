"""One rank of four under default DDP, which regroups its buckets after its first backward pass.

Each launch makes its trainer anew, DDP and all, as a new process would.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from tests.support.tiny_trainer import Tiny, tiny
from torch import distributed, nn

from toprope.trainer_hooks import Checkpointer

WORLD = 4
STOP, STEPS = 3, 6


def _trainer(rank: int, seed: int) -> Tiny:
    trainer = tiny(seed)
    trainer.net = nn.parallel.DistributedDataParallel(trainer.model)
    torch.manual_seed(100 + rank)  # each rank has its own stream
    trainer.data.at = 4 * rank  # and its own place in the data
    return trainer


def _launch(rank: int, socket: str, steps: Sequence[int], seed: int, *, warm: bool) -> tuple[int, str]:
    """Restore, train these steps, and return where it began and a digest of where it ended."""
    trainer = _trainer(rank, seed)
    warm_up: Callable[[], object] | None = trainer.step if warm else None
    checkpointer = Checkpointer(job="j", socket=socket, **trainer.named())
    begun = checkpointer.restore(warm_up=warm_up)
    for step in steps:
        trainer.step()
        checkpointer.end_step(step)
        _wait_free(checkpointer, 3)
    checkpointer.close()
    return begun, trainer.digest()


def _wait_free(checkpointer: Checkpointer, count: int) -> None:
    session = checkpointer._session
    assert session is not None
    with session._news:
        assert session._news.wait_for(lambda: len(session.slots._free) >= count, 100)


def killed(arguments: Sequence[str]) -> None:
    """Train to the end, from wherever the job stands; told to die, rank 1 does so by SIGKILL in its first launch."""
    socket, dies, out = arguments[0], arguments[1] == "dies", Path(arguments[3])
    rank = int(os.environ["RANK"])
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    trainer = _trainer(rank, 1)
    checkpointer = Checkpointer(job="j", socket=socket, **trainer.named())
    begun = checkpointer.restore(warm_up=trainer.step)
    for step in range(begun + 1, STEPS + 1):
        trainer.step()
        checkpointer.end_step(step)
        _wait_free(checkpointer, 3)
        if dies and begun == 0 and step == STOP:
            distributed.barrier()  # all have saved it
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.close()
    out.mkdir(exist_ok=True, parents=True)
    (out / f"found-{rank}.json").write_text(json.dumps([begun, trainer.digest()]))
    distributed.destroy_process_group()


def main(arguments: Sequence[str]) -> None:
    """Train with warm-up and without, each time uninterrupted and then interrupted; a socket is a job of its own."""
    sockets, out = json.loads(arguments[0]), Path(arguments[2])
    rank = int(os.environ["RANK"])
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    found: dict[str, Any] = {}
    for name, warm in (("warm", True), ("cold", False)):
        whole, parts = sockets[f"{name}-whole"], sockets[f"{name}-parts"]
        _, found[f"{name}-whole"] = _launch(rank, whole, range(1, STEPS + 1), 1, warm=warm)
        _launch(rank, parts, range(1, STOP + 1), 1, warm=warm)
        begun, found[f"{name}-parts"] = _launch(rank, parts, range(STOP + 1, STEPS + 1), 50 + rank, warm=warm)
        assert begun == STOP
    out.mkdir(exist_ok=True, parents=True)
    (out / f"found-{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()
