"""From the shards of a source to a state that is checked and ready to be applied, with no more fetched than it takes.

In the same layout a rank needs its own shard, and those tensors of other ranks' that its document names: what is
replicated is stored once. In another layout it needs the headers and documents of all shards, and then the tensors of
which parts are to be this rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from toprope.trainer_hooks.capture.modules import model_state
from toprope.trainer_hooks.capture.state import Parts
from toprope.trainer_hooks.errors import StateMismatchError, UsageError, WorldMismatchError
from toprope.trainer_hooks.image.shard import Image
from toprope.trainer_hooks.image.tree import Json
from toprope.trainer_hooks.restore.apply import Loaded, assembled, checked, misfit, needed, opened
from toprope.trainer_hooks.restore.relaxing import Allowed, Report, relaxed
from toprope.trainer_hooks.restore.weights import weights_of


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


_STRICT = Allowed()
_NOTHING_MORE = Report()


@dataclass(frozen=True, slots=True)
class Fit:
    """A state that fits, and what is to be said of how it was made to."""

    loaded: Loaded
    notes: tuple[str, ...] = ()
    report: Report = _NOTHING_MORE


def fit(
    parts: Parts,
    source: Source,
    names: Mapping[str, frozenset[str]],
    *,
    rank: int,
    world: int,
    allowed: Allowed = _STRICT,
) -> Fit:
    """Return the state of this rank, checked.

    ``names``: what all ranks of the trainer have together. What the checkpoint lacks or has beyond them counts over
    all ranks too, so it is never taken to be as in the same layout.

    Raises:
        UsageError: the checkpoint does not fit the trainer; the message says why, and what can be done.
    """
    fitter = _Fitter(parts, source, names, rank, world, allowed)
    if source.world == world:
        try:
            return fitter.same_layout()
        except StateMismatchError as error:
            return fitter.other_layout(error)
    return fitter.other_layout(None)


def fit_weights(parts: Parts, source: Source, names: Mapping[str, frozenset[str]], *, rank: int, world: int) -> Fit:
    """Return the models of this rank alone, checked, whoever saved them; all else stays as it is. Raises as ``fit``."""
    model = model_state(parts.models(), world=world)
    only = {**names, "sections": frozenset[str]()}
    fitter = _Fitter(parts.weights(), source, only, rank, world, _STRICT, lambda shard: weights_of(shard, model))
    return fitter.other_layout(None)


@dataclass(frozen=True, slots=True)
class _Fitter:
    parts: Parts
    source: Source
    names: Mapping[str, frozenset[str]]
    rank: int
    world: int
    allowed: Allowed
    document_of: Callable[[Image], dict[str, Json]] = Image.document

    def same_layout(self) -> Fit:
        own = self.source.whole(self.rank)
        others = {number: found for number, found in needed(own.document()).items() if number != self.rank}
        images = {self.rank: own, **(self.source.with_tensors(others) if others else {})}
        loaded = opened(self.parts, images, rank=self.rank, world=self.world)
        loaded, report = relaxed(loaded, replace(self.allowed, partial=False))
        return Fit(checked(loaded), report=report)

    def other_layout(self, in_the_same: StateMismatchError | None) -> Fit:
        from toprope.trainer_hooks.restore.flattened import unflattened  # noqa: PLC0415 - they load torch's planner, which is slow
        from toprope.trainer_hooks.restore.merging import Merger  # noqa: PLC0415
        from toprope.trainer_hooks.restore.resharding import layout_of, reshard  # noqa: PLC0415

        rank, world, partial = self.rank, self.world, self.allowed.partial
        shards = dict(self.source.heads(range(self.source.world)))
        model = model_state(self.parts.models(), world=world)
        documents = {number: self.document_of(shard) for number, shard in shards.items()}
        documents = unflattened(documents, shards, self.names["params"])
        try:
            merger = Merger(shards, documents)
            plan = reshard(self.parts, model, merger, self.names, rank=rank, world=world, partial=partial)
            if problems := plan.differing(by_digest=True):
                raise misfit(problems)
            if plan.needs:
                shards.update(self.source.with_tensors(plan.needs))
            if problems := plan.differing(by_digest=False):
                raise misfit(problems)
            loaded = assembled(self.parts, model, plan.document, plan.shard, rank=rank, left=plan.left)
            loaded, report = relaxed(loaded, self.allowed, unexpected=plan.unexpected)
            return Fit(checked(loaded), tuple(plan.notes), report)
        except StateMismatchError as error:
            saved, here = layout_of(documents), f"rank {rank} of {world}"
            raise _refusal(error, in_the_same, saved=saved, here=here) from error


def _refusal(error: StateMismatchError, in_the_same: StateMismatchError | None, *, saved: str, here: str) -> UsageError:
    text = (
        f"{error}. The checkpoint was saved by {saved}; this is {here}. What has no place in this layout can be had "
        "offline: 'ckpt export' writes its tensors whole, without the hook. If the trainer was changed on purpose: "
        "restore(partial=True) leaves alone what only one of both has, restore(cast=True) casts other dtypes"
    )
    if in_the_same is None:
        return WorldMismatchError(text)
    return StateMismatchError(f"{text}. As the layout that was saved: {in_the_same}")
