"""What one history is like, drawn from its seed: how large, which faults, how often."""

from __future__ import annotations

import random
from typing import Any, Literal

import msgspec

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

_SOME = 2
_OFTEN = {"every": 1, "local_every": 1, "object_every": 1}
SMALL: dict[str, Any] = {"nodes": 1, "ranks_per_node": 1, "broker": False, "coordinators": 1, "slow": 1.0, **_OFTEN}
PAIR: dict[str, Any] = {**SMALL, "nodes": 2}
READERS: dict[str, Any] = {
    **SMALL,
    "retain": "last=1",
    "faults": ("reader", "kill rank"),
    "store_fault": 0.0,
    "chaos_s": 16.0,
}
PEOPLE: dict[str, Any] = {
    **SMALL,
    "retain": "last=1",
    "faults": ("change", "kill rank"),
    "chaos_s": 16.0,
    "between_s": 1.0,
}
AMBUSH: dict[str, Any] = {
    **PAIR,
    "faults": ("ambush", "ambush", "kill rank"),
    "chaos_s": 16.0,
    "between_s": 1.0,
}
DAMAGE: dict[str, Any] = {
    **PAIR,
    "faults": ("disk trouble", "flip", "kill rank", "kill sidecar", "power cut"),
    "store_fault": 0.05,
    "between_s": 1.0,
}
OUTAGE: dict[str, Any] = {
    **PAIR,
    "copies": 1,
    "coordinators": 2,
    "on_log_outage": "proceed",
    "faults": ("store outage", "store outage", "kill rank"),
    "some_of": (
        "change",
        "disk trouble",
        "kill coordinator",
        "kill sidecar",
        "late outage",
        "lone outage",
        "pause coordinator",
        "power cut",
    ),
    "begins_s": 3.0,
    "chaos_s": 22.0,
    "between_s": 1.8,
}
REPLACED: dict[str, Any] = {
    **OUTAGE,
    "nodes": 3,
    "spares": 1,
    "faults": ("store outage", "store outage", "node away", "kill rank"),
    "store_fault": 0.0,
}
STANDBYS: dict[str, Any] = {
    **OUTAGE,
    "some_of": ("change", "disk trouble", "kill coordinator", "pause coordinator", "power cut"),
    "coordinators": 3,
    "faults": ("store outage", "marked outage", "go back", "slow node", "slow node", "kill rank"),
    "between_s": 1.4,
}
RANGES: dict[str, Any] = {
    **PAIR,
    "copies": 0,
    "bucket": True,
    "faults": ("replace machine", "reader", "reader", "kill rank"),
    "store_fault": 0.08,
    "begins_s": 4.0,
    "chaos_s": 24.0,
    "between_s": 1.8,
}
WORLDS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {},
    {},
    {},
    READERS,
    PEOPLE,
    AMBUSH,
    AMBUSH,
    DAMAGE,
    DAMAGE,
    OUTAGE,
    REPLACED,
    STANDBYS,
    RANGES,
)
"""What is said instead of drawn: nothing, or a narrow world in which one kind of trouble comes all the time."""


class Trouble(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that befalls the world: when, what, and the seed of what more is drawn for it."""

    at_s: float
    what: str
    seed: int


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One history. ``faults`` is the subset that this one has: not all at once, or each hides the others.

    ``bucket``: programs ask the store again when it gives no answer, as they do a bucket, and not a directory.

    ``script`` is what befalls it from ``begins_s`` until ``chaos_s``, in order. A launch takes all of ``nodes`` but so
    many ``spares``.
    """

    nodes: int
    ranks_per_node: int
    broker: bool
    coordinators: int
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
    copies: int = 1
    spares: int = 0
    begins_s: float = 0.0
    on_log_outage: Literal["wait", "proceed"] = "wait"
    bucket: bool = False
    script: tuple[Trouble, ...] = ()

    def __str__(self) -> str:
        names = (name for name in self.__struct_fields__ if name != "script")
        return " ".join(f"{name}={getattr(self, name)!r}" for name in names)


QUIET = Options(
    nodes=2,
    ranks_per_node=1,
    broker=False,
    coordinators=1,
    every=1,
    local_every=1,
    object_every=1,
    chaos_s=0.0,
    between_s=1.0,
    step_s=1.0,
    drop=0.0,
    duplicate=0.0,
    slow=1.0,
    store_fault=0.0,
    retain="",
    faults=(),
)
"""A world of two nodes in which nothing goes wrong by itself."""


def draw(rng: random.Random, **narrow: Any) -> Options:  # noqa: ANN401 - fields of Options
    """Return what a history is like; ``narrow`` is said instead of drawn, and two faults of its ``some_of`` added."""
    drawn, seed = _drawn(rng), rng.getrandbits(64)
    copies = random.Random(seed + 2).choice((0, 1, 1, 1, 2, 2))
    bucket = random.Random(seed + 4).random() < 0.5  # noqa: PLR2004 - every other one
    world = dict(narrow or {"copies": copies, "bucket": bucket, **random.Random(seed + 1).choice(WORLDS)})
    if some_of := world.pop("some_of", ()):
        world["faults"] += tuple(random.Random(seed + 3).sample(some_of, _SOME))
    options = msgspec.structs.replace(drawn, **world)
    return msgspec.structs.replace(options, script=_script(options, random.Random(seed)))


def _script(options: Options, rng: random.Random) -> tuple[Trouble, ...]:
    script: list[Trouble] = []
    at_s = options.begins_s + rng.expovariate(1.0 / options.between_s)
    while options.faults and at_s < options.chaos_s:
        script.append(Trouble(at_s=round(at_s, 3), what=rng.choice(options.faults), seed=rng.getrandbits(32)))
        at_s += rng.expovariate(1.0 / options.between_s)
    return tuple(script)


def _drawn(rng: random.Random) -> Options:
    every = rng.choice((1, 1, 2))
    local_every = every * rng.choice((1, 2))
    messy = rng.random() < 0.5  # noqa: PLR2004 - every other one
    return Options(
        nodes=rng.choice((1, 2, 2, 2, 2, 3)),
        ranks_per_node=rng.choice((1, 1, 1, 1, 2)),
        broker=rng.random() < 0.5,  # noqa: PLR2004 - every other one
        coordinators=rng.choice((1, 2)),
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
