"""One rank of a world of two under gloo; ``test_ddp`` starts both and reads what each found.

``python -m tests.support.ddp_rank RANK RENDEZVOUS_FILE SOCKET OUT``.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from tests.support.tiny_trainer import Tiny, tiny
from torch import distributed, nn

from toprope.trainer_hooks import Checkpointer, HookError
from toprope.trainer_hooks.checkpointer import _warn_of_regrouping

WORLD = 2
SAVED_STEPS = 5
ALL_STEPS = 8


def _trainer(rank: int, seed: int = 1, *, wrapped: bool = True) -> Tiny:
    trainer = tiny(seed, ddp=wrapped)
    torch.manual_seed(100 + rank)  # each rank has its own stream
    trainer.data.at = 4 * rank  # and its own place in the data
    return trainer


def _wait_free(checkpointer: Checkpointer, count: int) -> None:
    session = checkpointer._session
    assert session is not None
    with session._news:
        assert session._news.wait_for(lambda: len(session.slots._free) >= count, 30)


def _first_run(rank: int, socket: str) -> dict[str, Any]:
    trainer = _trainer(rank)
    checkpointer = Checkpointer(job="j", socket=socket, **trainer.named())
    found: dict[str, Any] = {"fresh": checkpointer.restore()}
    for step in range(1, SAVED_STEPS + 1):
        trainer.step()
        checkpointer.end_step(step)
        _wait_free(checkpointer, 3)
    checkpointer.close()
    found["saved"] = trainer.digest()
    for _ in range(SAVED_STEPS, ALL_STEPS):
        trainer.step()
    return {**found, "end": trainer.digest(), "snapshots": checkpointer.stats.snapshots}


def _second_run(rank: int, socket: str) -> dict[str, Any]:
    trainer = _trainer(rank, seed=50 + rank)
    checkpointer = Checkpointer(job="j", socket=socket, **trainer.named())
    found: dict[str, Any] = {"step": checkpointer.restore(), "restored": trainer.digest()}
    for step in range(SAVED_STEPS + 1, ALL_STEPS + 1):
        trainer.step()
        checkpointer.end_step(step)
    checkpointer.close()
    return {**found, "again": trainer.digest()}


def _error(make: Callable[[], Checkpointer]) -> list[str]:
    checkpointer = make()
    try:
        checkpointer.restore()
    except HookError as error:
        return [type(error).__name__, str(error)]
    finally:
        checkpointer.close("nothing")
    return []


def _not_the_same(rank: int, socket: str) -> list[str]:
    """Train without DDP, so that each rank goes its own way, and say that all weights are the same."""
    trainer = _trainer(rank, wrapped=False)
    checkpointer = Checkpointer(job="j", socket=socket, replicated=["*.weight"], **trainer.named())
    step = checkpointer.restore() + 1
    trainer.step()
    try:
        checkpointer.end_step(step)
    except HookError as error:
        return [type(error).__name__, str(error), str(checkpointer.stats.snapshots)]
    finally:
        checkpointer.close("nothing")
    return []


def _warnings() -> list[str]:
    heard: list[str] = []

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    logger, handler = logging.getLogger("toprope"), Listening()
    logger.addHandler(handler)
    for unused in (True, False):
        for world in (2, 3):
            net = nn.parallel.DistributedDataParallel(nn.Linear(1, 1), find_unused_parameters=unused)
            _warn_of_regrouping(net, world)
    logger.removeHandler(handler)
    return heard


def main() -> None:
    """Go through all scenarios; both ranks take the same way."""
    rank, rendezvous, socket, out = int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4])
    distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    found = {**_first_run(rank, socket), **_second_run(rank, socket)}
    found["not the same"] = _not_the_same(rank, socket)
    named = tiny(ddp=True).named()
    odd = {"f": print} if rank == 1 else {"f": None}
    found["odd"] = _error(lambda: Checkpointer(job="j", socket=socket, extra=odd, **named))
    nowhere = socket if rank == 0 else "/nowhere.sock"
    found["alone"] = _error(lambda: Checkpointer(job="j", socket=nowhere, sidecar_timeout_s=0.3, **named))
    found["warnings"] = _warnings()
    (out / f"rank-{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
