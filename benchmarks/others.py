"""Others' ways to save, as ``stall.py`` drives them: each save tells when the call returned, and what came later."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class Took:
    """How long a save took until it returned, until the state may change, until it can be read back (None: never)."""

    blocked_s: float
    free_s: float
    saved_s: float | None


Save: TypeAlias = Callable[[dict[str, Any], int], Took]


@contextmanager
def dcp(directory: Path, *, process: bool) -> Iterator[Save]:
    """``dcp.async_save`` in a thread, or in a process to which a stager hands shared memory."""
    import torch.distributed as dist  # noqa: PLC0415 - only a trainer needs it
    from torch.distributed import checkpoint  # noqa: PLC0415 - as above
    from torch.distributed.checkpoint import staging, state_dict_saver  # noqa: PLC0415 - as above

    kinds = state_dict_saver.AsyncCheckpointerType
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    stager = staging.DefaultStager(staging.StagingOptions(False, process, False, False))  # noqa: FBT003 - as it comes

    def save(state: dict[str, Any], number: int) -> Took:
        began = time.perf_counter()
        response: Any = checkpoint.async_save(
            state,
            checkpoint_id=directory / str(number),
            async_checkpointer_type=kinds.PROCESS if process else kinds.THREAD,
            async_stager=stager,
        )
        blocked_s = time.perf_counter() - began
        staged = getattr(response, "staging_completion", None)
        if staged is not None:
            staged.result()
        free_s = time.perf_counter() - began
        (getattr(response, "upload_completion", None) or response).result()
        return Took(blocked_s, free_s, time.perf_counter() - began)

    try:
        yield save
    finally:
        stager.close()
        dist.destroy_process_group()


@contextmanager
def torch_checkpointing(directory: Path) -> Iterator[Save]:
    """torch-checkpointing as its manual says for a machine without CUDA: a staging thread and a writing process."""
    from torch_checkpointing import CheckpointManager  # noqa: PLC0415 - may be absent
    from torch_checkpointing.config import AsyncCheckpointSaverConfig  # noqa: PLC0415 - as above
    from torch_checkpointing.staging import CheckpointStagerConfig  # noqa: PLC0415 - as above

    staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
    manager = CheckpointManager(CheckpointManager.Config(save=AsyncCheckpointSaverConfig(staging_config=staging)))

    def save(state: dict[str, Any], number: int) -> Took:
        began = time.perf_counter()
        written = manager.save(str(directory / str(number)), {"state": state})
        blocked_s = time.perf_counter() - began
        with manager.lock():
            free_s = time.perf_counter() - began
        written.result()
        return Took(blocked_s, free_s, time.perf_counter() - began)

    try:
        yield save
    finally:
        manager.close()


@contextmanager
def lm_resiliency(directory: Path) -> Iterator[Save]:
    """The copies in memory of lm-resiliency. One rank has no partner, so nothing protects them here."""
    from lm_resiliency.checkpointing import InMemoryCheckpointManager, InMemoryCkptConfig  # noqa: PLC0415 - may be absent

    config = InMemoryCkptConfig(disk_flush_interval=0, disk_folder=str(directory), pin_memory=False)
    manager = InMemoryCheckpointManager(config)

    def save(state: dict[str, Any], number: int) -> Took:
        began = time.perf_counter()
        manager.save_tensors(list(state.values()), number + 1)
        blocked_s = time.perf_counter() - began
        manager.maybe_wait()
        return Took(blocked_s, time.perf_counter() - began, None)

    try:
        yield save
    finally:
        manager.close()


OTHERS: dict[str, Callable[[Path], Any]] = {
    "dcp thread": partial(dcp, process=False),
    "dcp process": partial(dcp, process=True),
    "torch-checkpointing": torch_checkpointing,
    "lm-resiliency": lm_resiliency,
}
NEED_PEERS = ("torch-checkpointing", "lm-resiliency")
"""Those that are no part of torch."""


@contextmanager
def saving(kind: str) -> Iterator[Save]:
    """Save in this way into a temporary directory, where each save is deleted once it is whole."""
    directory = Path(tempfile.mkdtemp())
    try:
        with OTHERS[kind](directory) as save:

            def save_and_delete(state: dict[str, Any], number: int) -> Took:
                took: Took = save(state, number)
                shutil.rmtree(directory / str(number), ignore_errors=True)
                return took

            yield save_and_delete
    finally:
        shutil.rmtree(directory, ignore_errors=True)  # one that timed out may still write
