"""The documents of all ranks of a checkpoint as one: what may be taken from any rank, and what differs.

A tensor that is spread over ranks, or that one rank stored for several, is one tensor. Everything else that several
ranks have must be the same on all of them, or it can't be given to another number of ranks, and is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeAlias

import torch

from toprope.trainer_hooks.errors import StateMismatchError
from toprope.trainer_hooks.image.shard import Extent, Piece
from toprope.trainer_hooks.image.tree import Json
from toprope.trainer_hooks.restore.blocks import Block, run_of
from toprope.trainer_hooks.restore.reader import Stored, Whole

Kind: TypeAlias = Literal["plain", "spread", "flat"]
"""How a tensor was stored: whole, in the blocks of a DTensor, or in runs of what FSDP1 flattened."""


class Shard(Protocol):
    """A rank's shard as far as it is at hand: its header, its document, and tensors that were fetched."""

    extents: dict[str, Extent]

    def document(self) -> Any:  # noqa: ANN401 - JSON, which is checked here
        """Return the document."""

    def piece(self, name: str) -> Piece:
        """Return where a tensor lies in the larger one of which it is a piece."""

    def digest(self, name: str) -> str:
        """Return the digest of a tensor; empty if it is not known."""

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logical:
    """A tensor of the checkpoint under its key. ``device`` is where it lay."""

    key: str
    kind: Kind
    whole: Whole
    device: str


Leaf: TypeAlias = Callable[[Logical, Any], Json]
"""Returns what stands for a tensor in the merged document, given what the trainer has in its place."""


@dataclass(slots=True)
class Merger:
    """Merges values that ranks have under one key. ``problems`` says what can't be merged.

    ``copies``: by key the plain tensors of further ranks, which must have the same values.
    """

    shards: Mapping[int, Shard]
    documents: Mapping[int, dict[str, Json]]
    problems: list[str] = field(default_factory=list)
    copies: dict[str, tuple[tuple[int, str], ...]] = field(default_factory=dict)
    wholes: dict[str, Whole] = field(default_factory=dict)

    def tree(self, key: str, values: Mapping[int, Json], live: Any, leaf: Leaf) -> Json:  # noqa: ANN401 - any value of the trainer
        """Return the one value that all of these ranks have under ``key``."""
        rank, first = next(iter(values.items()))
        for other, value in values.items():
            if not _alike(first, value):
                self.problems.append(
                    f"{key}: {_short(first)} on rank {rank} and {_short(value)} on rank {other} of the checkpoint; "
                    "what differs between ranks has no place on others"
                )
                return None
        if isinstance(first, dict) and first.get("$") == "tensor":
            found = self.tensor(key, values)
            return None if found is None else leaf(found, live)
        if isinstance(first, dict):
            return {
                name: self.tree(
                    key if name == "v" and "$" in first else f"{key}.{name}",
                    {number: value[name] for number, value in values.items()},
                    _inside(live, name),
                    leaf,
                )
                for name in first
            }
        if isinstance(first, list):
            return [
                self.tree(
                    f"{key}.{at}", {number: value[at] for number, value in values.items()}, _inside(live, at), leaf
                )
                for at in range(len(first))
            ]
        return first

    def tensor(self, key: str, entries: Mapping[int, dict[str, Json]]) -> Logical | None:
        """Return the one tensor that the ranks' entries are about, or None and a problem."""
        stored = {(entry["rank"], entry["name"]): entry for entry in entries.values()}
        kinds = {_kind(entry) for entry in entries.values()}
        try:
            parts = [self._part(rank, name, entry) for (rank, name), entry in sorted(stored.items())]
        except StateMismatchError as error:
            self.problems.append(f"{key}: {error}")
            return None
        dtypes = {self.shards[part.rank].extents[part.name].dtype for part, _ in parts}
        shapes = {shape for _, shape in parts}
        if max(len(kinds), len(dtypes), len(shapes)) > 1:
            forms = ", ".join(sorted({*kinds, *map(str, shapes), *map(str, dtypes)}))
            self.problems.append(f"{key}: stored in different ways by the ranks of the checkpoint: {forms}")
            return None
        (kind,) = kinds
        whole = Whole(dtypes.pop(), shapes.pop(), tuple(part for part, _ in parts))
        if kind == "plain" and len(parts) > 1:
            self.copies[key] = tuple((part.rank, part.name) for part, _ in parts)
            whole = Whole(whole.dtype, whole.shape, whole.stored[:1])
        self.wholes[key] = whole
        return Logical(key=key, kind=kind, whole=whole, device=next(iter(entries.values()))["device"])

    def _part(self, rank: int, name: str, entry: dict[str, Json]) -> tuple[Stored, tuple[int, ...]]:
        """Return what a rank stored of a tensor, and the shape of the whole."""
        shard = self.shards.get(rank)
        if shard is None or name not in shard.extents:
            raise StateMismatchError(f"not in the shard of rank {rank}")
        shape = shard.extents[name].shape
        if _kind(entry) == "flat":
            offset, whole = entry["flat"]
            original = tuple(entry.get("shape", (whole,)))
            begin, count = entry.get("run", (0, shape[0]))  # of what was stored, other parameters may lie around it
            blocks = run_of(original, offset, offset + count)
            return Stored(rank, name, tuple(replace(one, begin=one.begin + begin) for one in blocks)), original
        piece = shard.piece(name)
        return Stored(rank, name, (Block(piece.offsets, shape),)), piece.global_shape


def known(shards: Mapping[int, Shard], stored: Sequence[tuple[int, str]]) -> bool:
    """Say whether the digest of each of these tensors is known."""
    return all(shards[rank].digest(name) for rank, name in stored)


def unlike_the_first(shards: Mapping[int, Shard], stored: Sequence[tuple[int, str]], *, by_digest: bool) -> list[int]:
    """Return the ranks whose tensors are not as the first one, by their digests or by their bytes."""
    first, *others = stored
    if by_digest:
        return [rank for rank, name in others if shards[rank].digest(name) != shards[first[0]].digest(first[1])]
    values = _bytes_of(shards, first)
    return [one[0] for one in others if not torch.equal(values, _bytes_of(shards, one))]


def _bytes_of(shards: Mapping[int, Shard], stored: tuple[int, str]) -> torch.Tensor:
    values = shards[stored[0]].tensor(stored[1])
    return values.reshape(-1).view(torch.uint8) if values.numel() else torch.empty(0, dtype=torch.uint8)


def _kind(entry: dict[str, Json]) -> Kind:
    return "spread" if "spread" in entry else "flat" if "flat" in entry else "plain"


def _alike(one: Json, other: Json) -> bool:
    """Say whether two values are of one form and, if they are not containers, equal."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.get("$") == other.get("$") and (one.get("$") == "tensor" or set(one) == set(other))
    if isinstance(one, list):
        return len(one) == len(other)
    return bool(one == other)


def _inside(live: Any, at: str | int) -> Any:  # noqa: ANN401 - any value of the trainer
    if isinstance(live, dict):
        return live.get(at)
    if isinstance(live, (list, tuple)) and isinstance(at, int) and at < len(live):
        return live[at]
    return live if at == "v" else None


def _short(value: Json) -> str:
    if isinstance(value, dict) and value.get("$") == "tensor":
        return "a tensor"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."  # noqa: PLR2004 - enough to know it by
