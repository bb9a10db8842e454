"""What one history is like, drawn from its seed: how large, which faults, how often."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields

FAULTS = (
    "kill rank",
    "zombie",
    "kill sidecar",
    "pause sidecar",
    "power cut",
    "kill coordinator",
    "pause coordinator",
    "two coordinators",
    "cut link",
    "broker restart",
    "store brownout",
    "disk trouble",
    "flip",
    "reader",
    "change",
    "ambush",
)

RESTARTS = ("kill rank", "zombie", "power cut")
"""Each history has one of these, since all that matters shows in a restore."""

_GC: dict[bool, tuple[str, ...]] = {False: (), True: ("reader",)}
"""Where something is deleted there are readers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One history. ``faults`` is the subset that this one has: not all at once, or each hides the others."""

    nodes: int
    ranks_per_node: int
    broker: bool
    every: int
    local_every: int
    object_every: int
    chaos_s: float
    between_s: float
    step_s: float
    drop: float
    duplicate: float
    slow: float
    store_fault: float
    retain: str
    faults: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self))


def draw(rng: random.Random) -> Options:
    """Return what a history is like."""
    every = rng.choice((1, 1, 2))
    local_every = every * rng.choice((1, 2))
    messy = rng.random() < 0.5  # noqa: PLR2004 - every other one
    return Options(
        nodes=rng.choice((1, 2, 2, 2, 2, 3)),
        ranks_per_node=rng.choice((1, 1, 1, 1, 2)),
        broker=rng.random() < 0.5,  # noqa: PLR2004 - every other one
        every=every,
        local_every=local_every,
        object_every=local_every * rng.choice((1, 2)),
        chaos_s=rng.uniform(6.0, 16.0),
        between_s=rng.uniform(0.7, 3.5),
        step_s=rng.uniform(0.5, 1.5),
        drop=rng.uniform(0.0, 0.08) if messy else 0.0,
        duplicate=rng.uniform(0.0, 0.2) if messy else 0.0,
        slow=rng.choice((1.0, 1.0, 10.0)),
        store_fault=rng.choice((0.0, 0.02, 0.1)),
        retain=(retain := rng.choice(("", "last=1", "last=1", "last=2,every=4"))),
        faults=tuple(sorted({rng.choice(RESTARTS), *_GC[bool(retain)], *rng.sample(FAULTS, rng.randint(0, 5))})),
    )
