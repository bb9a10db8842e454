"""One rank that saves states of many kinds into a directory, or restores into this world what others have saved there.

Arguments: ``OUT save KIND...`` or ``OUT load KIND:KIND,KIND... ...`` (saved kind, then those to restore it into). What
each pair came to is in ``OUT/<world>-ranks-rank-<rank>.json``: nothing, or what was wrong.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from tests.support.parallel_kinds import JOB
from tests.support.parallel_layouts import build, full, named
from tests.support.parallel_rank import end_step
from tests.support.tiny_trainer import METADATA, open_image, raw, snapshot_file
from torch import distributed

from toprope.trainer_hooks import Checkpointer, one_line_errors
from toprope.trainer_hooks.capture.names import names_of, of_all, union
from toprope.trainer_hooks.capture.state import Parts, capture
from toprope.trainer_hooks.errors import UsageError
from toprope.trainer_hooks.image.shard import Image
from toprope.trainer_hooks.launch import this_world
from toprope.trainer_hooks.restore.apply import apply
from toprope.trainer_hooks.restore.fitting import fit


class Saved:
    """The shards of a kind as files, as ``fit`` asks for them; it notes what was taken of whose."""

    def __init__(self, out: Path, kind: str) -> None:
        self.paths = sorted(out.glob(f"{kind}-of-*"))
        self.world = len(self.paths)
        self.taken: dict[int, set[str]] = {}

    def _image(self, rank: int) -> Image:
        return open_image(self.paths[rank])

    def whole(self, rank: int) -> Image:
        self.taken[rank] = {"*"}
        return self._image(rank)

    def heads(self, ranks: Iterable[int]) -> Mapping[int, Image]:
        return {rank: self._image(rank) for rank in ranks}

    def with_tensors(self, names: Mapping[int, set[str]]) -> Mapping[int, Image]:
        for rank, wanted in names.items():
            self.taken.setdefault(rank, set()).update(wanted)
        return {rank: self._image(rank) for rank in names}


def main(arguments: Sequence[str]) -> None:
    """Save or restore; all ranks take the same way."""
    out, doing, *items = arguments[:-2]  # the last two say where a training rank leaves its journal
    world = int(os.environ["WORLD_SIZE"])
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = distributed.get_rank()
    if doing == "save":
        for kind in items:
            save(Path(out), kind)
    else:
        pairs = [
            (saved, here)
            for item in items
            for saved, _, several in [item.partition(":")]
            for here in several.split(",")
        ]
        found = {f"{saved} -> {here}": load(Path(out), saved, here) for saved, here in pairs}
        (Path(out) / f"{world}-ranks-rank-{rank}.json").write_text(json.dumps(found))
    distributed.barrier()
    os._exit(0)  # DDP must not outlive its process group, nor be let go of before it


def train(arguments: Sequence[str]) -> None:
    """Restore through a sidecar, compare, train two steps on and leave the full tensors. Arguments: ``OUT LAYOUT``."""
    out, layout = Path(arguments[0]), arguments[1]
    with one_line_errors():
        distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
        trainer = build(layout)
        checkpointer = Checkpointer(job=JOB, **named(trainer))
        step = checkpointer.restore()
        wrong = _differences(full(trainer), open_image(out / f"full-{step}")) if step else ""
        found = {"step": step, "wrong": wrong, "sources": [[one.rank, one.tier] for one in checkpointer.sources]}
        (out / f"found-{step}-rank-{distributed.get_rank()}.json").write_text(json.dumps(found))
        for number in (step + 1, step + 2):
            trainer.step()
            end_step(checkpointer, number)
        whole = full(trainer)
        if distributed.get_rank() == 0:
            snapshot_file(out / f"full-{step + 2}", whole)
        assert checkpointer.close("protected"), "not protected"
    distributed.barrier()
    os._exit(0)  # DDP must not outlive its process group, nor be let go of before it


def save(out: Path, kind: str) -> None:
    """Train two steps, write this rank's image, and from rank 0 the full tensors as torch joins them."""
    trainer = build(kind)
    for _ in range(2):
        trainer.step()
    rank, world = distributed.get_rank(), distributed.get_world_size()
    snapshot = capture(Parts(**named(trainer)), rank=rank, world=world)
    metadata = METADATA | {"rank": str(rank), "world": str(world)}
    path = out / f"{kind}-of-{rank:02d}"
    snapshot_file(path, snapshot.tensors, snapshot.document, metadata, snapshot.pieces)
    whole = full(trainer)
    if rank == 0:
        snapshot_file(out / f"{kind}-full", whole)
    distributed.barrier()


def load(out: Path, saved: str, kind: str) -> dict[str, Any]:
    """Restore into a trainer of a kind at step 0; return what was wrong, and what was taken of the shards."""
    trainer = build(kind)
    parts, world = Parts(**named(trainer)), this_world()
    source = Saved(out, saved)
    names = union(of_all(world, names_of(parts)))
    try:
        found = fit(parts, source, names, rank=world.rank, world=world.size)
    except UsageError as error:
        return {"wrong": f"{type(error).__name__}: {error}", "taken": len(source.taken)}
    apply(found.loaded)
    wrong = _differences(full(trainer), open_image(out / f"{saved}-full"))
    taken = {str(rank): sorted(names) for rank, names in source.taken.items()}
    return {"wrong": wrong, "notes": list(found.notes), "taken": taken}


def _differences(found: dict[str, torch.Tensor], expected: Image) -> str:
    wanted = set(expected.extents) - {"__document__"}
    if set(found) != wanted:
        return f"names: {sorted(wanted ^ set(found))}"
    wrong = [
        name
        for name in sorted(wanted)
        if found[name].dtype != (there := expected.tensor(name)).dtype
        or found[name].shape != there.shape
        or raw(found[name]) != raw(there)
    ]
    return f"differs: {wrong}" if wrong else ""
