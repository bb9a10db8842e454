"""The models alone out of a checkpoint: what another job, or an import, has to give to a new one."""

from __future__ import annotations

from typing import Any

from toprope.trainer_hooks.capture.modules import ModelState
from toprope.trainer_hooks.capture.state import FORMAT
from toprope.trainer_hooks.image.shard import Image
from toprope.trainer_hooks.image.tree import Json

IMPORTED = "imported"
"""The section of a document of a checkpoint that was imported: it says nothing of a model."""


def weights_of(shard: Image, model: ModelState) -> dict[str, Json]:
    """Return what the document of a shard says of the models."""
    document: dict[str, Json] = shard.document()
    if IMPORTED in document:
        return _of_names(shard, model)
    return {key: value for key, value in document.items() if key in {"format", "world", "model", "meshes"}}


def _of_names(shard: Image, model: ModelState) -> dict[str, Json]:
    """Return a document by the names of tensors: parameters and buffers as ``model.NAME``, or all of them as NAME.

    Where names begin with ``model.``, others are no part of the models. What is there under another name than the
    trainer's is named as unexpected by the check.
    """
    prefix = "model." if any(name.startswith("model.") for name in shard.extents) else ""
    model_part: dict[str, Any] = {"params": {}, "buffers": {}, "tied": model.tied, "extra_state": {}}
    for stored in sorted(shard.extents):
        name = stored.removeprefix(prefix)
        if stored == shard.metadata.get("document") or not stored.startswith(prefix) or name in model.tied:
            continue
        part = "buffers" if name in model.buffers else "params"
        model_part[part][name] = {"$": "tensor", "name": stored, "rank": 0, "device": "cpu"}
    return {"format": FORMAT, "world": 1, "model": model_part, "meshes": []}
