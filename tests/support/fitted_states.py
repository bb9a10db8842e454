"""States of several ranks saved by one process, and what a trainer of another layout is given of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.support.tiny_trainer import METADATA, open_image, snapshot_file
from torch import nn

from toprope.trainer_hooks.capture.names import names_of, union
from toprope.trainer_hooks.capture.state import Parts, capture
from toprope.trainer_hooks.image.shard import Image
from toprope.trainer_hooks.restore.fitting import Fit, fit
from toprope.trainer_hooks.restore.relaxing import Allowed


class Files:
    """Shards as files, of which ``fit`` may ask for all."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths, self.world = paths, len(paths)

    def whole(self, rank: int) -> Image:
        return open_image(self.paths[rank])

    def heads(self, ranks: Iterable[int]) -> Mapping[int, Image]:
        return {rank: open_image(self.paths[rank]) for rank in ranks}

    def with_tensors(self, names: Mapping[int, set[str]]) -> Mapping[int, Image]:
        return self.heads(names)


def saved(directory: Path, ranks: list[dict[str, Any]]) -> Files:
    """Save the parts of each rank of a world that is this process alone."""
    paths = []
    for rank, parts in enumerate(ranks):
        snapshot = capture(Parts(**parts), rank=rank, world=len(ranks))
        metadata = METADATA | {"rank": str(rank), "world": str(len(ranks))}
        path = directory / f"{rank}"
        paths.append(snapshot_file(path, snapshot.tensors, snapshot.document, metadata, snapshot.pieces))
    return Files(paths)


def fitted(
    source: Files,
    *,
    rank: int = 0,
    world: int = 1,
    allowed: Allowed = Allowed(),  # noqa: B008 - it is immutable
    **parts: Any,  # noqa: ANN401 - parts of a trainer
) -> Fit:
    """Return what ``fit`` gives a rank whose world has no other names than its own."""
    names = union([names_of(Parts(**parts))])
    return fit(Parts(**parts), source, names, rank=rank, world=world, allowed=allowed)


def linear(value: float, rows: int = 2) -> nn.Linear:
    """Return a layer of four inputs with this weight."""
    layer = nn.Linear(4, rows, bias=False)
    nn.init.constant_(layer.weight, value)
    return layer
