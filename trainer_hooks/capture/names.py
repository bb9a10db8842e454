"""What all ranks of a trainer have together, by name: in a pipeline each has other things."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from toprope.trainer_hooks.capture.modules import model_state
from toprope.trainer_hooks.capture.state import Parts
from toprope.trainer_hooks.launch import World


def names_of(parts: Parts) -> dict[str, list[str]]:
    """Return the names of parameters, buffers and extra states, and the sections of the document, of this rank."""
    model = model_state(parts.models(), world=1)
    sections = {*parts.optimizers(), *parts.stateful(), *(["extra"] if parts.extra is not None else [])}
    return {
        "params": sorted(model.params),
        "buffers": sorted(model.buffers),
        "extra_state": sorted(model.extras),
        "sections": sorted(sections),
    }


def of_all(world: World, mine: Any) -> list[Any]:  # noqa: ANN401 - JSON
    """Return what the ranks have, once where it is the same on all of them; all ranks ask at once."""
    digests = world.gather(hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest())
    return [mine] if len(set(digests)) == 1 else world.gather(mine)


def union(several: Sequence[Mapping[str, Sequence[str]]]) -> dict[str, frozenset[str]]:
    """Return all names under each key."""
    return {key: frozenset(name for one in several for name in one[key]) for key in several[0]}


def joined(specs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the spec of all ranks out of those of each; what several have under one name is that of the first.

    The parameters of an optimizer's group stand in the order of their names: which rank has which does not matter.
    """
    spec: dict[str, Any] = {}
    for one in specs:
        _join(spec, one)
    for section, value in spec.items():
        if section != "model":
            value["groups"] = [sorted(set(group)) for group in value["groups"]]
    return spec


def _join(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        present = into.get(key)
        if isinstance(value, Mapping):
            _join(into.setdefault(key, {}), value)
        elif key == "groups" and present is not None:
            both = max(len(present), len(value))
            groups = [*present, *([[]] * (both - len(present)))]
            into[key] = [[*group, *(value[at] if at < len(value) else [])] for at, group in enumerate(groups)]
        else:
            into.setdefault(key, value)
