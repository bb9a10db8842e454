"""Tensors that are spread over a mesh of ranks: which block of the whole this rank holds, and who holds the same one.

Pure but for the last part, which knows DTensor: its private names are used there and nowhere else.
"""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from toprope.trainer_hooks.errors import StateMismatchError, UnsupportedLeafError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

Block: TypeAlias = tuple[tuple[int, int], ...]
"""Begin and end along each dimension."""
_PLACEMENT = re.compile(r"R|S([0-9]{1,2})(?:/([0-9]{1,9}))?")


@dataclass(frozen=True, slots=True)
class Mesh:
    """A mesh by what it consists of: its shape, and the ranks of the job in it."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    def __hash__(self) -> int:
        """Return the same for equal meshes without a look at each of thousands of ranks."""
        return hash((self.shape, self.ranks[:1], self.ranks[-1:]))


@dataclass(frozen=True, slots=True)
class Spread:
    """How a tensor of a global ``shape`` is spread, seen from one rank.

    ``placements`` has a word for each dimension of the mesh: ``R`` for a replica, ``S0`` for a shard along dimension 0
    of the tensor, ``S0/2`` for a strided one with split factor 2.
    """

    mesh: Mesh
    rank: int
    placements: tuple[str, ...]
    shape: tuple[int, ...]


class LayoutError(Exception):
    """A spread that is not one block of the whole on this rank; the text says why."""


@functools.lru_cache(maxsize=65_536)
def block_of(spread: Spread) -> Block:
    """Return the block that the rank holds.

    A shard takes its part of what the dimensions of the mesh before it have left over; a strided one, that of those
    after it. So is what FSDP makes of a tensor that tensor parallelism has split already.

    Raises:
        LayoutError: the rank holds no single block.
    """
    at = _coordinate(spread)
    cuts = [_cut(word) for word in spread.placements]
    if len(cuts) != len(spread.mesh.shape):
        raise LayoutError(f"has {len(cuts)} placements on a mesh of {len(spread.mesh.shape)} dimensions")
    block = []
    for dimension, extent in enumerate(spread.shape):
        begin, end = 0, extent
        on_it = [number for number, cut in enumerate(cuts) if cut is not None and cut[0] == dimension]
        for number in _order(on_it, cuts, spread.mesh.shape):
            begin, end = _part(begin, end, at[number], spread.mesh.shape[number])
        block.append((begin, end))
    return tuple(block)


@functools.lru_cache(maxsize=65_536)
def replicas_of(spread: Spread) -> tuple[int, ...]:
    """Return the ranks that hold the same block because a dimension of the mesh replicates it, in order."""
    at = _coordinate(spread)
    strides = _contiguous(spread.mesh.shape)
    found = [0]
    for word, extent, own, stride in zip(spread.placements, spread.mesh.shape, at, strides, strict=True):
        steps = range(extent) if word == "R" else (own,)
        found = [index + step * stride for index in found for step in steps]
    return tuple(sorted(spread.mesh.ranks[index] for index in found))


def _coordinate(spread: Spread) -> tuple[int, ...]:
    if spread.rank not in spread.mesh.ranks:
        raise LayoutError(f"is on a mesh of ranks {_few(spread.mesh.ranks)}, and rank {spread.rank} is not among them")
    index = spread.mesh.ranks.index(spread.rank)
    at = []
    for stride in _contiguous(spread.mesh.shape):
        at.append(index // stride)
        index %= stride
    return tuple(at)


def _cut(word: str) -> tuple[int, int] | None:
    """Return dimension and split factor of a shard; None for a replica."""
    match = _PLACEMENT.fullmatch(word)
    if match is None:
        raise LayoutError(f"has placement {word}, which this version can't keep")
    return None if word == "R" else (int(match[1]), int(match[2] or 1))


def _order(on_it: Sequence[int], cuts: Sequence[tuple[int, int] | None], mesh: Sequence[int]) -> list[int]:
    """Return in which order the dimensions of the mesh cut a dimension of the tensor."""
    if not on_it:
        return []
    first, later = on_it[0], on_it[1:]
    cut = cuts[first]
    assert cut is not None
    factor = cut[1]
    if factor == 1:
        return [first, *_order(later, cuts, mesh)]
    if factor != math.prod(mesh[number] for number in later):
        raise LayoutError(
            f"has a strided shard of split factor {factor} on dimension {first} of its mesh, and so several blocks on "
            "one rank; only what FSDP makes of a tensor-parallel parameter can be kept"
        )
    return [*_order(later, cuts, mesh), first]


def _part(begin: int, end: int, number: int, count: int) -> tuple[int, int]:
    """Return the part that ``torch.chunk`` gives; the last ones may be shorter, or empty."""
    size = -(-(end - begin) // count)
    return min(end, begin + number * size), min(end, begin + (number + 1) * size)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(max(1, extent) for extent in shape[number + 1 :]) for number in range(len(shape)))


def _few(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")  # noqa: PLR2004 - enough to know it by


# DTensor.

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def as_dtensor(tensor: torch.Tensor) -> DTensor | None:
    """Return the tensor if it is a DTensor; a trainer that has none does not pay for the import."""
    if type(tensor) in _PLAIN:  # nearly all are, and this is asked of each at each snapshot
        return None
    module: Any = sys.modules.get("torch.distributed.tensor")
    return tensor if module is not None and isinstance(tensor, module.DTensor) else None


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor, with no copy and no collective: a DTensor's shard, else the tensor."""
    dtensor = as_dtensor(tensor)
    return tensor if dtensor is None else dtensor._local_tensor  # noqa: SLF001 - to_local() is for autograd


def spread_of(tensor: DTensor, *, rank: int) -> Spread:
    """Return how a DTensor is spread.

    Raises:
        LayoutError: this rank's shard is not one block of the whole, or not what the placements say.
    """
    placements = tuple(_word(placement, tensor.ndim) for placement in tensor.placements)
    spread = Spread(mesh_of(tensor.device_mesh), rank, placements, tuple(tensor.shape))
    expected = tuple(end - begin for begin, end in block_of(spread))
    found = tuple(local_of(tensor).shape)
    if found != expected:
        raise LayoutError(f"has a local shard of shape {found}, where its placements say {expected}")
    return spread


@functools.lru_cache(maxsize=256)
def mesh_of(mesh: DeviceMesh) -> Mesh:
    """Return what a mesh consists of."""
    return Mesh(tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist()))


def _word(placement: object, dimensions: int) -> str:
    match type(placement).__name__:
        case "Replicate":
            return "R"
        case "Shard":
            return f"S{placement.dim % dimensions}"  # type: ignore[attr-defined]
        case "_StridedShard":
            factor = placement.split_factor  # type: ignore[attr-defined]
            return f"S{placement.dim % dimensions}" + ("" if factor == 1 else f"/{factor}")  # type: ignore[attr-defined]
        case other:
            return other


def join(local: torch.Tensor, mesh: DeviceMesh, spread: Spread, stride: Sequence[int] | None = None) -> DTensor:
    """Return the DTensor of which this rank holds ``local``; no other rank is asked."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - slow to load; where there is a mesh, it is loaded

    return DTensor.from_local(
        local,
        mesh,
        [_placement(word) for word in spread.placements],
        run_check=False,
        shape=torch.Size(spread.shape),
        stride=_contiguous(spread.shape) if stride is None else tuple(stride),
    )


def _placement(word: str) -> Any:  # noqa: ANN401 - a Placement; its strided kind is private
    from torch.distributed.tensor import placement_types  # noqa: PLC0415 - see join

    cut = _cut(word)
    if cut is None:
        return placement_types.Replicate()
    dimension, factor = cut
    if factor == 1:
        return placement_types.Shard(dimension)
    return vars(placement_types)["_StridedShard"](dimension, split_factor=factor)


def refused(name: str, error: LayoutError) -> UnsupportedLeafError:
    """Return the refusal of a leaf for its layout."""
    return UnsupportedLeafError.at(name, f"a DTensor that {error}")


def spread_from(value: dict[str, Any], meshes: Sequence[dict[str, Any]], *, rank: int) -> Spread:
    """Return the spread that a document describes.

    Raises:
        StateMismatchError: it is none.
    """
    try:
        mesh = meshes[value["mesh"]]
        spread = Spread(
            Mesh(tuple(mesh["shape"]), tuple(mesh["ranks"])), rank, tuple(value["placements"]), tuple(value["shape"])
        )
        block_of(spread)
    except (KeyError, IndexError, TypeError, LayoutError) as error:
        raise StateMismatchError(f"the checkpoint describes a spread tensor that can't be read: {error}") from error
    return spread
