"""Diff: which tensors of two checkpoints differ. Their digests tell; bytes are read only to say by how much."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from toprope.store.checkpoint.assemble import tensor_bytes
from toprope.store.checkpoint.manifest import Index
from toprope.store.checkpoint.whole import DOCUMENT, Whole, gather, untiled
from toprope.store.errors import StoreError
from toprope.store.look.values import Apart, Comparison
from toprope.store.objects.protocol import ObjectStore

Kind: TypeAlias = Literal["changed", "added", "removed", "reshaped", "recut"]

_BAND_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A checkpoint to compare: where it is, and what its ranks stored."""

    store: ObjectStore
    job: str
    indexes: tuple[Index, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A tensor that is not the same in both. ``before`` and ``after`` are dtype and shape, None where it is not.

    ``reshaped`` is said of another dtype or shape; ``recut`` where ranks stored other pieces of it, so that their
    digests tell nothing. ``apart`` is there when values were compared.
    """

    name: str
    kind: Kind
    before: str | None
    after: str | None
    apart: Apart | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """What differs, by name, and how many tensors are the same."""

    same: int
    changes: tuple[Change, ...]


def diff(before: Side, after: Side, *, compare: Comparison | None = None) -> Diff:
    """Return how ``after`` differs from ``before``; with ``compare`` also by how much, for which bytes are read.

    Raises:
        StoreError: values are asked for, and a tensor is damaged or can't be put together.
    """
    apart = frozenset(
        whole.name for side in (before, after) for whole in gather(side.indexes) if whole.rank is not None
    )
    old, new = ({whole.label: whole for whole in gather(side.indexes, apart=apart)} for side in (before, after))
    changes = []
    for label in sorted(old.keys() | new.keys()):
        change = _change(label, old.get(label), new.get(label))
        if change is not None and compare is not None and change.kind in {"changed", "recut"}:
            change = _valued(change, (before, old[label]), (after, new[label]), compare)
        if change is not None:
            changes.append(change)
    return Diff(same=len(old.keys() | new.keys()) - len(changes), changes=tuple(changes))


def _change(label: str, old: Whole | None, new: Whole | None) -> Change | None:
    before, after = (None if one is None else f"{one.dtype} {list(one.shape)}" for one in (old, new))
    kind: Kind
    if old is None or new is None:
        kind = "added" if old is None else "removed"
    elif before != after:
        kind = "changed" if old.name == DOCUMENT else "reshaped"
    elif {part.box for part in old.parts} != {part.box for part in new.parts}:
        kind = "recut"
    elif {part.content for part in old.parts} != {part.content for part in new.parts}:
        kind = "changed"
    else:
        return None
    return Change(name=label, kind=kind, before=before, after=after)


def _valued(
    change: Change, before: tuple[Side, Whole], after: tuple[Side, Whole], compare: Comparison
) -> Change | None:
    """Return a change with how far the values are apart; None if they are the same after all."""
    if before[1].name == DOCUMENT:
        return change
    for _, whole in (before, after):
        if why := untiled(whole):
            raise StoreError(f"{whole.label}: can't be put together: {why}")
    old, new = (tensor_bytes(side.store, whole, job=side.job, limit=_BAND_BYTES) for side, whole in (before, after))
    apart = Apart()
    for one, other in zip(old, new, strict=True):
        apart += compare(before[1].dtype, one, other)
    return replace(change, apart=apart) if apart.different or change.kind == "changed" else None
