"""For trainers that save and load with ``torch.distributed.checkpoint``: a writer and a reader over the sidecar."""

from __future__ import annotations

from toprope.trainer_hooks.dcp.storage import Attempt, StorageReader, StorageWriter, step_of

__all__ = ["Attempt", "StorageReader", "StorageWriter", "step_of"]
