"""From the shards of a source to a state that is checked and ready to be applied, with no more fetched than it takes.

In the same layout a rank needs its own shard, and those tensors of other ranks' that its document names: what is
replicated is stored once. In another layout it needs the headers and documents of all shards, and then the tensors of
which parts are to be this rank's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from toprope.trainer_hooks.apply import Loaded, check, check_assembled, misfit, needed
from toprope.trainer_hooks.errors import StateMismatchError, UsageError, WorldMismatchError
from toprope.trainer_hooks.image import Image
from toprope.trainer_hooks.modules import model_state
from toprope.trainer_hooks.state import Parts


class Source(Protocol):
    """The shards that an attempt begins from, as they can be had from the sidecar."""

    @property
    def world(self) -> int:
        """Return how many ranks saved it."""
        ...

    def whole(self, rank: int) -> Image:
        """Return the shard of a rank."""
        ...

    def heads(self, ranks: Iterable[int]) -> Mapping[int, Image]:
        """Return the shards of these ranks, of which only header and document can be read."""
        ...

    def with_tensors(self, names: Mapping[int, set[str]]) -> Mapping[int, Image]:
        """Return the shards of these ranks, of which header, document and these tensors can be read."""
        ...


@dataclass(frozen=True, slots=True)
class Fit:
    """A state that fits, and what is to be said of how it was made to."""

    loaded: Loaded
    notes: tuple[str, ...] = ()


def fit(parts: Parts, source: Source, names: Mapping[str, frozenset[str]], *, rank: int, world: int) -> Fit:
    """Return the state of this rank, checked.

    ``names``: what all ranks of the trainer have together.

    Raises:
        UsageError: the checkpoint does not fit the trainer; the message says why, and what can be done.
    """
    if source.world == world:
        try:
            return Fit(_same_layout(parts, source, rank=rank, world=world))
        except StateMismatchError as error:
            return _other_layout(parts, source, names, rank=rank, world=world, in_the_same=error)
    return _other_layout(parts, source, names, rank=rank, world=world, in_the_same=None)


def _same_layout(parts: Parts, source: Source, *, rank: int, world: int) -> Loaded:
    own = source.whole(rank)
    others = {number: found for number, found in needed(own.document()).items() if number != rank}
    images = {rank: own, **(source.with_tensors(others) if others else {})}
    return check(parts, images, rank=rank, world=world)


def _other_layout(
    parts: Parts,
    source: Source,
    names: Mapping[str, frozenset[str]],
    *,
    rank: int,
    world: int,
    in_the_same: StateMismatchError | None,
) -> Fit:
    from toprope.trainer_hooks.merging import Merger  # noqa: PLC0415 - they load torch's planner, which is slow
    from toprope.trainer_hooks.resharding import layout_of, reshard  # noqa: PLC0415

    shards = dict(source.heads(range(source.world)))
    model = model_state(parts.models(), world=world)
    documents = {number: shard.document() for number, shard in shards.items()}
    try:
        plan = reshard(parts, model, Merger(shards, documents), names, rank=rank, world=world)
        if plan.needs:
            shards.update(source.with_tensors(plan.needs))
        problems = plan.differing()
        if problems:
            raise misfit(problems)
        loaded = check_assembled(parts, model, plan.document, plan.shard, rank=rank, left=plan.left)
    except StateMismatchError as error:
        raise _refusal(error, in_the_same, saved=layout_of(documents), here=f"rank {rank} of {world}") from error
    return Fit(loaded, tuple(plan.notes))


def _refusal(error: StateMismatchError, in_the_same: StateMismatchError | None, *, saved: str, here: str) -> UsageError:
    text = (
        f"{error}. The checkpoint was saved by {saved}; this is {here}. What has no place in this layout can be had "
        "offline: 'ckpt export' writes its tensors whole, without the hook"
    )
    if in_the_same is None:
        return WorldMismatchError(text)
    return StateMismatchError(f"{text}. As the layout that was saved: {in_the_same}")
