"""The shards that an attempt begins from, as the sidecar stages them: asked for, waited for, mapped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from toprope.trainer_hooks.errors import StateMismatchError
from toprope.trainer_hooks.image.shard import Image
from toprope.trainer_hooks.link import wire


class SourceError(Exception):
    """What was staged is not what the attempt begins from, or can't be read: another source may do."""


class StagedImage(Image):
    """A shard of which only some tensors are there: where others would lie is nothing that was ever saved."""

    def __init__(self, path: Path, length: int, tensors: frozenset[str]) -> None:
        super().__init__(path, length)
        self._there = tensors
        beside = path.with_suffix(wire.DIGESTS)
        self._digests: dict[str, str] = json.loads(beside.read_bytes()) if beside.exists() else {}

    def digest(self, name: str) -> str:
        """Return the digest of a tensor, wanted or not, if it came with the shard."""
        return self._digests.get(name, "")

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor that was wanted."""
        assert name in self._there or wire.ALL in self._there, f"{name} was not asked for"
        return super().tensor(name)


@dataclass(slots=True, kw_only=True)
class StagedSource:
    """The source of an attempt. ``ask(number, wants)`` returns what the sidecar staged for that.

    ``shards`` are the last that were staged of each rank, with the tier and the node that they came from.
    """

    attempt: wire.Attempt
    ask: Callable[[int, tuple[wire.Want, ...]], tuple[wire.StagedShard, ...]]
    shards: dict[int, wire.StagedShard] = field(default_factory=dict)
    asked: int = 0

    @property
    def world(self) -> int:
        """Return how many ranks saved it."""
        return self.attempt.source_world

    def join(self) -> None:
        """Say that this rank is in the attempt, and want nothing."""
        self._staged({})

    def whole(self, rank: int) -> Image:
        """Return the shard of a rank."""
        return self._staged({rank: {wire.ALL}})[rank]

    def heads(self, ranks: Iterable[int]) -> Mapping[int, Image]:
        """Return the shards of these ranks, of which only header and document can be read."""
        return self._staged({rank: set() for rank in ranks})

    def with_tensors(self, names: Mapping[int, set[str]]) -> Mapping[int, Image]:
        """Return the shards of these ranks, of which header, document and these tensors can be read."""
        return self._staged(names)

    def _staged(self, names: Mapping[int, set[str]]) -> dict[int, Image]:
        self.asked += 1
        wants = tuple(wire.Want(rank=rank, tensors=tuple(sorted(names[rank]))) for rank in sorted(names))
        try:
            staged = self.ask(self.asked, wants)
        except wire.WireError:  # the list is too long for a frame: whole shards then
            staged = self.ask(self.asked, tuple(wire.Want(rank=want.rank, tensors=(wire.ALL,)) for want in wants))
        found = {shard.rank: shard for shard in staged if shard.rank in names}
        missing = sorted(set(names) - set(found))
        if missing:
            raise SourceError(f"the sidecar staged no shard of rank {missing[0]}")
        self.shards.update(found)
        return {rank: self._image(found[rank], frozenset(names[rank])) for rank in found}

    def _image(self, shard: wire.StagedShard, tensors: frozenset[str]) -> Image:
        try:
            image = StagedImage(Path(shard.path), shard.bytes, tensors)
        except (OSError, ValueError, StateMismatchError) as error:
            raise SourceError(str(error)) from error
        job_uid, step = self.attempt.job_uid, self.attempt.from_step
        if self.attempt.source == "base":
            job_uid, step = self.attempt.base_job_uid, self.attempt.base_step
        expected = {"job_uid": job_uid, "step": str(step), "rank": str(shard.rank)}
        found = {key: image.metadata.get(key) for key in expected}
        if found != expected:
            raise SourceError(f"{shard.path}: staged as {expected} and says that it is {found}")
        return image
