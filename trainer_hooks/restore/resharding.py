"""A checkpoint for another layout: another number of ranks, another mesh, or another way to be parallel.

From the documents and headers of all shards it is planned what this rank's state is made of. The plan is a document as
this rank would have saved it, and a stand-in for its shard, whose tensors are put together out of pieces of the saved
ones when they are asked for. So what follows (checks, and the writing into the trainer) is that of the same layout.
Which rule holds for what is told in ``docs/guides/trainer.md``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from toprope.trainer_hooks.capture.modules import ModelState, optimizer_names
from toprope.trainer_hooks.capture.optimizers import owned
from toprope.trainer_hooks.capture.spread import Mesh, as_dtensor, block_of, spread_of
from toprope.trainer_hooks.capture.state import FORMAT, Parts, as_stateful
from toprope.trainer_hooks.errors import StateMismatchError
from toprope.trainer_hooks.image.shard import Extent
from toprope.trainer_hooks.image.tree import Encoder, Json, to_json
from toprope.trainer_hooks.restore.apply import misfit
from toprope.trainer_hooks.restore.blocks import Block, run_of
from toprope.trainer_hooks.restore.merging import Leaf, Logical, Merger, Shard, known, unlike_the_first
from toprope.trainer_hooks.restore.reader import ShardReader, Target

if TYPE_CHECKING:
    from toprope.trainer_hooks.capture.fsdp import FlatShard

DATA = ("dataloader", "dataloader_generator")
"""Sections that belong to a rank and to the number of ranks, unless the one who deals the samples is elastic."""


@dataclass(frozen=True, slots=True)
class Form:
    """How this rank holds a tensor: the global shape, the blocks, its local shape, and what the document says of it."""

    shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    local: tuple[int, ...]
    said: dict[str, Json]

    def target(self, dtype: torch.dtype) -> Target:
        """Return room for the values; what no block covers, as FSDP1's padding, is zero."""
        return Target(self.shape, self.blocks, torch.zeros(self.local, dtype=dtype))


def _plain(shape: tuple[int, ...]) -> Form:
    return Form(shape, (Block((0,) * len(shape), shape),), shape, {})


@dataclass(slots=True)
class Assembled:
    """Stands for the shard that this rank would have saved: its tensors are put together when they are asked for."""

    forms: dict[str, Form] = field(default_factory=dict)
    extents: dict[str, Extent] = field(default_factory=dict)
    own: dict[str, torch.Tensor] = field(default_factory=dict)
    reader: ShardReader | None = None

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor of this name."""
        if name in self.own:
            return self.own[name]
        assert self.reader is not None
        return self.reader.fill(name, self.forms[name].target(self.extents[name].dtype))


@dataclass(slots=True, kw_only=True)
class Resharded:
    """The state of this rank in the layout of the trainer.

    ``needs``: the tensors by rank that must be at hand before ``differing`` is asked and a tensor taken. ``left``: the
    sections that are left as they are. ``unexpected``: what no rank of the trainer has. ``notes`` says, for the log,
    what was done that is more than moving values.
    """

    document: dict[str, Json]
    shard: Assembled
    needs: dict[int, set[str]]
    left: frozenset[str]
    unexpected: list[str]
    notes: list[str]
    copies: dict[str, tuple[tuple[int, str], ...]]
    shards: Mapping[int, Shard]

    def differing(self, *, by_digest: bool) -> list[str]:
        """Return what is wrong with tensors that several ranks stored and that should be the same; note buffers.

        ``by_digest``: those of which no more than the digest is needed, else the others, which must be at hand.
        """
        problems = []
        for key, stored in sorted(self.copies.items()):
            if known(self.shards, stored) is not by_digest:
                continue
            ranks = unlike_the_first(self.shards, stored, by_digest=by_digest)
            if not ranks:
                continue
            if key.removeprefix("model.") in self.document["model"]["buffers"]:
                self.notes.append(f"{key} differs between ranks: that of rank {stored[0][0]} is taken, as DDP does")
            else:
                problems.append(
                    f"{key}: plain tensors on ranks {stored[0][0]} and {ranks[0]} of the checkpoint that differ; each "
                    "belongs to its rank, and nothing says how they make up a whole"
                )
        return problems


def reshard(  # noqa: PLR0913 - what is restored into what, and where
    parts: Parts,
    model: ModelState,
    saved: Merger,
    names: Mapping[str, frozenset[str]],
    *,
    rank: int,
    world: int,
    partial: bool = False,
) -> Resharded:
    """Plan what this rank's state is made of, from the headers and documents of all shards.

    ``names``: what the ranks of the trainer have, all of them together (see ``names.names_of``). ``partial`` allows
    that the checkpoint has more, and that a position in the data that does not hold here is left as it is.

    Raises:
        StateMismatchError: it can't be had; the message names all that stands against it.
    """
    for number, document in saved.documents.items():
        if document.get("format") != FORMAT or document["world"] != len(saved.shards):
            raise StateMismatchError(
                f"the shard of rank {number} has format {document.get('format')} and is of {document['world']} ranks; "
                f"this version reads format {FORMAT}, and {len(saved.shards)} shards were given"
            )
    plan = _Plan(parts, model, saved, names, rank, world, partial)
    result = plan.made()
    more = [] if partial else [f"{name}: in the checkpoint, unexpected here" for name in result.unexpected]
    if more:  # and so both lists are told; else the check tells what is missing
        more += [f"{name}: missing in the checkpoint" for name in plan.missing()]
    if saved.problems or more:
        raise misfit([*saved.problems, *more])
    return result


def layout_of(documents: Mapping[int, dict[str, Json]]) -> str:
    """Return for people how a checkpoint was laid out."""
    shapes = {tuple(mesh["shape"]) for document in documents.values() for mesh in document.get("meshes", [])}
    meshes = ", ".join("x".join(map(str, shape)) for shape in sorted(shapes))
    return f"{len(documents)} ranks" + (f", meshes of {meshes}" if meshes else ", no mesh")


@dataclass(slots=True)
class _Plan:
    parts: Parts
    model: ModelState
    merger: Merger
    names: Mapping[str, frozenset[str]]
    rank: int
    world: int
    partial: bool
    shard: Assembled = field(default_factory=Assembled)
    left: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    _meshes: dict[Mesh, int] = field(default_factory=dict)

    @property
    def _same_world(self) -> bool:
        return len(self.merger.documents) == self.world

    def made(self) -> Resharded:
        document: dict[str, Json] = {"format": FORMAT, "world": self.world, "model": self._model()}
        for section, optimizer in self.parts.optimizers().items():
            document[section] = self._optimizer(section, optimizer)
        for section in self.parts.stateful():
            self._stateful(section, document)
        if self.parts.extra is not None:
            document["extra"] = self._extra(self.parts.extra)
        if self._same_world and "rng" in self.merger.documents[self.rank]:  # it is not in what is of the models alone
            document["rng"] = self._own("rng", self.merger.documents[self.rank]["rng"])
        else:
            self.left.add("rng")
        document["meshes"] = [{"shape": list(mesh.shape), "ranks": list(mesh.ranks)} for mesh in self._meshes]
        needs = self._needs()
        return Resharded(
            document=document,
            shard=self.shard,
            needs=needs,
            left=frozenset(self.left),
            unexpected=list(self._unexpected()),
            notes=self.notes,
            copies=self.merger.copies,
            shards=self.merger.shards,
        )

    def _needs(self) -> dict[int, set[str]]:
        """Plan all reads with torch's planner, and return what is read."""
        needs: dict[int, set[str]] = {}
        self.shard.reader = reader = ShardReader(
            self.merger.wholes, lambda number, name: self.merger.shards[number].tensor(name)
        )
        for key, form in self.shard.forms.items():
            try:
                used = list(reader.used(reader.plan(key, _room(form))))
            except ValueError as error:
                self.merger.problems.append(f"{key}: {error}")
                continue
            copies = self.merger.copies.get(key, ())
            for number, name in used if known(self.merger.shards, copies) else (*used, *copies):
                needs.setdefault(number, set()).add(name)
        return needs

    # Model

    def _model(self) -> dict[str, Json]:
        params = {name: self.model.kept(name) for name in self.model.params}
        return {
            "params": self._tensors("params", params),
            "buffers": self._tensors("buffers", self.model.buffers),
            "tied": self._tied(),
            "extra_state": self._extra_states(),
        }

    def _tensors(self, part: str, live: Mapping[str, torch.Tensor]) -> dict[str, Json]:
        found = {}
        for name in live:
            entries = self._values("model", part, name)
            if entries:  # else it is missing, as the check will say
                form = self._live_form(live[name], self.model.flat.get(name) if part == "params" else None)
                found[name] = self.merger.tree(f"model.{name}", entries, None, self._leaf(form))
        return found

    def _tied(self) -> dict[str, str]:
        tied = {name: first for one in self.merger.documents.values() for name, first in one["model"]["tied"].items()}
        return {name: tied[name] for name in tied if name in self.model.tied or name in self.names["params"]}

    def _extra_states(self) -> dict[str, Json]:
        found = {}
        for name in self.model.extras:
            values = self._values("model", "extra_state", name)
            if values:
                found[name] = self._equal(f"model.{name}.extra_state", values)
        return found

    # Optimizers

    def _optimizer(self, section: str, optimizer: torch.optim.Optimizer) -> dict[str, Json]:
        names = optimizer_names(optimizer, self.model.params)
        mine = owned(optimizer, self.model.params)
        groups, state = [], {}
        for number, group in enumerate(optimizer.param_groups):
            params = [names[id(parameter)] for parameter in group["params"]]
            groups.append({"params": params, "settings": self._settings(section, number, params)})
            for name in params if mine is None else [name for name in params if name in mine]:
                values = self._values(section, "state", name)
                if values:
                    key = f"{section}.state.{name}"
                    state[name] = self.merger.tree(key, values, None, self._state_leaf(name))
        return {"groups": groups, "state": state, "owned": mine}

    def _settings(self, section: str, number: int, params: list[str]) -> Json:
        """Return the settings of the groups in which these parameters were: there may be several, all alike."""
        wanted, found = set(params), {}
        for rank, document in self.merger.documents.items():
            for at, group in enumerate(document.get(section, {}).get("groups", [])):
                if wanted & set(group["params"]) or (not wanted and at == number):
                    found[rank, at] = group["settings"]
        if not found:
            return {}
        key = f"{section}.groups.{number}"
        return self._equal(key, dict(enumerate(found.values())))

    def _state_leaf(self, param: str) -> Leaf:
        """Return what makes an entry of optimizer state follow its parameter, if it did so where it was saved."""
        live = self._live_form(self.model.kept(param), self.model.flat.get(param))
        entries = self._values("model", "params", param)
        followed = {"spread" if "spread" in one else "flat" if "flat" in one else "plain" for one in entries.values()}

        def leaf(found: Logical, _: Any) -> Json:  # noqa: ANN401 - nothing is in its place
            counter = found.key.endswith(".step")
            if not counter and found.kind in followed and found.whole.shape == live.shape:
                return self._entry(found, live)
            if found.kind == "plain":
                return self._entry(found, _plain(found.whole.shape))
            self.merger.problems.append(
                f"{found.key}: sharded, with shape {found.whole.shape} where its parameter has {live.shape}; nothing "
                "says how it is to be sharded here"
            )
            return None

        return leaf

    # Parts with a state of their own

    def _stateful(self, section: str, document: dict[str, Json]) -> None:
        values = self._values(section)
        if not values:
            return  # missing, as the check will say
        if self._same_world and self.rank in values:
            document[section] = self._own(section, values[self.rank])
        elif section in DATA:
            self._data(section, values, document)
        else:
            document[section] = self._equal(section, values)

    def _data(self, section: str, values: dict[int, Json], document: dict[str, Json]) -> None:
        """Take the data's position if it is one that holds for any number of ranks."""
        if getattr(self.parts.dataloader, "elastic", False):
            document[section] = self._equal(section, values)
            return
        saved = len(self.merger.documents)
        if not self.partial and section == "dataloader":
            self.merger.problems.append(
                f"{section}: its position among {saved} ranks is in the checkpoint, and here are {self.world}: nothing "
                "says which samples are left. ElasticSampler deals them on any number of ranks; restore(partial=True) "
                "leaves the position where it is, and samples may come twice or not at all"
            )
        self.left.add(section)
        self.notes.append(f"{section} is not restored: it is that of one of {saved} ranks, and here are {self.world}")

    def _extra(self, extra: Any) -> dict[str, Json]:  # noqa: ANN401 - a mapping or an object with state_dict()
        if not isinstance(extra, MutableMapping):
            whole = {rank: one["whole"] for rank, one in self._values("extra").items() if "whole" in one}
            return {"whole": self._shared("extra", whole, None)} if whole else {"plain": {}, "stateful": {}}
        plain, stateful = {}, {}
        for name in self._keys("extra", "plain"):
            plain[name] = self._shared(f"extra.{name}", self._values("extra", "plain", name), extra.get(name))
        for name in self._keys("extra", "stateful"):
            if isinstance(extra.get(name), torch.Generator) and not self._same_world:
                stateful[name] = self._unchanged(f"extra.{name}", extra[name])
            else:
                stateful[name] = self._shared(f"extra.{name}", self._values("extra", "stateful", name), None)
        return {"plain": plain, "stateful": stateful}

    def _unchanged(self, key: str, generator: torch.Generator) -> Json:
        self.notes.append(f"{key} is not restored: each rank has a random stream of its own")
        part = as_stateful(generator)
        assert part is not None

        def keep(name: str, tensor: torch.Tensor) -> str:
            self.shard.own[name] = tensor
            self.shard.extents[name] = Extent(name, tensor.dtype, tuple(tensor.shape), 0, 0)
            return to_json({"$": "tensor", "name": name, "rank": self.rank, "device": "cpu"})

        return json.loads(Encoder(keep).encode(key, part.state_dict()))

    def _shared(self, key: str, values: dict[int, Json], live: Any) -> Json:  # noqa: ANN401 - any value of the trainer
        if self._same_world and self.rank in values:
            values = {self.rank: values[self.rank]} if not _is_spread(values[self.rank]) else values
        return self._equal(key, values, live)

    # What all of them use

    def _values(self, *path: str) -> dict[int, Json]:
        """Return by rank what the documents have at this path, where they have it."""
        found = {}
        for rank, document in self.merger.documents.items():
            value: Json = document
            for key in path:
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None or (path[0] == "extra" and self._has(document, path)):
                found[rank] = value
        return found

    def _has(self, document: dict[str, Json], path: tuple[str, ...]) -> bool:
        value: Json = document
        for key in path:
            if not isinstance(value, dict) or key not in value:
                return False
            value = value[key]
        return True

    def _keys(self, *path: str) -> list[str]:
        return sorted({key for value in self._values(*path).values() for key in value})

    def _own(self, key: str, value: Json) -> Json:
        return self._equal(key, {self.rank: value})

    def _equal(self, key: str, values: Mapping[int, Json], live: Any = None) -> Json:  # noqa: ANN401 - any value of the trainer
        """Return the value that all of them have; a tensor in it that was spread is as the trainer's own there."""

        def leaf(found: Logical, there: Any) -> Json:  # noqa: ANN401 - any value of the trainer
            if found.kind == "plain":
                return self._entry(found, _plain(found.whole.shape))
            if isinstance(there, torch.Tensor):
                form = self._live_form(there, None)
                if form.shape == found.whole.shape:
                    return self._entry(found, form)
            self.merger.problems.append(
                f"{found.key}: sharded in the checkpoint, and no tensor of shape {found.whole.shape} is in its place "
                "here to say how it is to be held"
            )
            return None

        return self.merger.tree(key, values, live, leaf)

    def _leaf(self, form: Form) -> Leaf:
        def leaf(found: Logical, _: Any) -> Json:  # noqa: ANN401 - nothing is in its place
            if found.whole.shape != form.shape:
                self.merger.problems.append(
                    f"{found.key}: shape {found.whole.shape} in the checkpoint, {form.shape} here"
                )
                return None
            return self._entry(found, form)

        return leaf

    def _live_form(self, live: torch.Tensor, flat: FlatShard | None) -> Form:
        dtensor = as_dtensor(live)
        if dtensor is not None:
            spread = spread_of(dtensor, rank=self.rank)
            box = block_of(spread)
            sizes = tuple(end - begin for begin, end in box)
            number = self._meshes.setdefault(spread.mesh, len(self._meshes))
            said = {"mesh": number, "placements": list(spread.placements), "shape": list(spread.shape)}
            return Form(spread.shape, (Block(tuple(begin for begin, _ in box), sizes),), sizes, {"spread": said})
        if flat is not None:
            count = flat.values.numel()
            blocks = run_of(flat.shape, flat.offset, flat.offset + count)
            return Form(flat.shape, blocks, (count,), {"flat": [flat.offset, flat.whole], "shape": list(flat.shape)})
        return _plain(tuple(live.shape))

    def _entry(self, found: Logical, form: Form) -> dict[str, Json]:
        """Return the entry of a tensor in this rank's document, and note how it is put together."""
        self.shard.forms[found.key] = form
        self.shard.extents[found.key] = Extent(found.key, found.whole.dtype, form.local, 0, 0)
        return {"$": "tensor", "name": found.key, "rank": self.rank, "device": found.device, **form.said}

    def missing(self) -> Iterator[str]:
        """Name what a rank of the trainer has of the model and no rank of the checkpoint."""
        tied = {name for one in self.merger.documents.values() for name in one["model"]["tied"]}
        for part in ("params", "buffers", "extra_state"):
            yield from (f"model.{name}" for name in sorted(self.names[part] - tied - set(self._keys("model", part))))

    def _unexpected(self) -> Iterator[str]:
        """Name what the checkpoint has and no rank of the trainer; what this rank lacks, the check names."""
        for part in ("params", "buffers", "extra_state"):
            for name in self._keys("model", part):
                if name not in self.names[part]:
                    yield f"model.{name}"
        known = {"format", "world", "model", "rng", "meshes", *self.names["sections"]}
        yield from sorted({key for document in self.merger.documents.values() for key in document} - known)


def _room(form: Form) -> Target:
    """Return a target that is only planned for."""
    return Target(form.shape, form.blocks, torch.empty(0))


def _is_spread(value: Json) -> bool:
    return isinstance(value, dict) and ("spread" in value or "flat" in value)
