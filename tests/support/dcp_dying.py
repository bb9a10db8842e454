"""A trainer whose ``async_save`` saves in a process that dies alone: ``python -m tests.support.dcp_dying SOCKET``."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from concurrent.futures import Future

import torch
from torch import distributed
from torch.distributed.checkpoint import _async_process_executor as executor
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

from toprope.trainer_hooks.dcp import Attempt, StorageWriter


def main() -> None:
    """Save, have the process that saved killed, try again, and say what came of it; end when told to."""
    warnings.simplefilter("ignore")
    distributed.init_process_group("gloo")
    attempt = Attempt(job="j", socket=sys.argv[1])
    attempt.begin()
    writer = StorageWriter(attempt, timeout_s=20)

    def saved(step: int) -> None:
        saving = async_save(
            {"a": torch.full((4,), float(step))},
            checkpoint_id=f"step-{step}",
            storage_writer=writer,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        assert isinstance(saving, Future)
        saving.result(60)

    saved(1)
    child = executor._CHECKPOINT_PROCESS
    assert child is not None
    pid = child._save_process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    child._save_process.join()
    try:
        saved(2)
    except TimeoutError:  # an OSError too, and not a word of what went wrong
        raise
    except (RuntimeError, OSError) as error:
        sys.stdout.write(f"told: {error}\n")
        sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
