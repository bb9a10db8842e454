"""The documents of a checkpoint in which FSDP1 flattened parameters, as if it had shown the original ones. Pure.

Each rank stored a run of the flattened tensor, and of each original one whatever of it lies in that run. So a layout in
which parameters have their own names finds them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from toprope.trainer_hooks.image.tree import Json
from toprope.trainer_hooks.restore.merging import Shard


def unflattened(
    documents: Mapping[int, dict[str, Json]], shards: Mapping[int, Shard], here: Collection[str]
) -> dict[int, dict[str, Json]]:
    """Return the documents with the original parameters in place of flattened ones, but for those that are ``here``."""
    found = {}
    for rank, document in documents.items():
        flattened: dict[str, Any] = document["model"].get("flattened", {})
        parts = {name: parts for name, parts in flattened.items() if name not in here}
        found[rank] = _Unflattened(document, shards, parts).made() if parts else document
    return found


class _Unflattened:
    def __init__(self, document: dict[str, Json], shards: Mapping[int, Shard], parts: Mapping[str, Any]) -> None:
        self._document = document
        self._shards = shards
        self._parts = parts
        """By the name of a flattened parameter: name, shape and begin of each original one."""
        ends = [[begin + math.prod(shape) for _, shape, begin in originals] for originals in parts.values()]
        self._whole = {(max(several),) for several in ends}
        """The shapes of flattened parameters of which one rank has all."""

    def made(self) -> dict[str, Json]:
        model = self._document["model"]
        made = {**self._document, "model": {**model, "params": self._split(model["params"])}}
        for section, value in self._document.items():
            if isinstance(value, dict) and {"groups", "state"} <= set(value):
                groups = [{**group, "params": self._names(group["params"])} for group in value["groups"]]
                made[section] = {**value, "groups": groups, "state": self._split(value["state"])}
        return made

    def _names(self, params: list[str]) -> list[str]:
        return [name for one in params for name in ([part[0] for part in self._parts.get(one, [[one]])])]

    def _split(self, values: Mapping[str, Json]) -> dict[str, Json]:
        """Return each flattened parameter's value once for each original one, with that one's part of its tensors."""
        found: dict[str, Json] = {}
        for name, value in values.items():
            if name not in self._parts:
                found[name] = value
            for part, shape, begin in self._parts.get(name, ()):
                found[part] = _replaced(value, partial(self._part, shape=shape, begin=begin))
        return found

    def _part(self, entry: dict[str, Json], shape: list[int], begin: int) -> dict[str, Json]:
        stored = self._shards[entry["rank"]].extents.get(entry["name"])
        if stored is None or ("flat" not in entry and stored.shape not in self._whole):
            return entry  # a counter, or what the checks will miss
        offset, count = entry.get("flat", (0,))[0], math.prod(shape)
        first, last = max(offset, begin), min(offset + stored.shape[0], begin + count)
        run = [first - offset, last - first] if first < last else [0, 0]
        at = first - begin if first < last else 0
        return {**entry, "flat": [at, count], "shape": shape, "run": run}


def _replaced(value: Json, replace: Callable[[dict[str, Json]], dict[str, Json]]) -> Json:
    if isinstance(value, list):
        return [_replaced(item, replace) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("$") == "tensor":
        return replace(value)
    return {key: _replaced(item, replace) for key, item in value.items()}
