"""The door to the formats that need PyTorch: only a word of ``ckpt`` that writes or reads one of them opens it."""

from __future__ import annotations

import importlib
import types

from toprope.store.errors import UsageError


def dcp_write() -> types.ModuleType:
    """Return what writes PyTorch DCP directories; raises UsageError without torch, as the others do."""
    return _loaded("dcp_write")


def torch_file() -> types.ModuleType:
    """Return what writes files as ``torch.save`` does."""
    return _loaded("torch_file")


def reading() -> types.ModuleType:
    """Return what reads the tensors of DCP directories and of files of ``torch.save``."""
    return _loaded("reading")


def _loaded(name: str) -> types.ModuleType:
    try:
        return importlib.import_module(f"toprope.store.transfer.torch_formats.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise UsageError("this format needs torch, which is not installed here; nothing was changed") from error
