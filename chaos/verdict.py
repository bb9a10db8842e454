"""What came of a scenario: the one value that judging yields and that every report is made from."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

Outcome: TypeAlias = Literal["held", "broken", "not judged"]
Kind: TypeAlias = Literal["training", "snapshot", "fault", "down", "restore"]
NO_RANK = -1
"""The row of the timeline for what belongs to no rank: services, nodes, network, store."""


class Promise(msgspec.Struct, frozen=True, kw_only=True):
    """One promise, and whether it held. ``says`` is a sentence; ``evidence`` are lines that a person can check.

    ``attacked``: the scenario was made to break this one.
    """

    name: str
    says: str
    outcome: Outcome
    evidence: tuple[str, ...] = ()
    attacked: bool = False


class Injection(msgspec.Struct, frozen=True, kw_only=True):
    """One fault that was planned, and whether it happened.

    ``trigger`` says when it was to come, ``witness`` what proves that it did (a wait status, an errno, bytes before and
    after), or why it did not. Times are seconds since the run began; ``until_s`` is when it was mended.
    """

    fault: str
    target: str
    trigger: str
    fired: bool
    witness: str
    at_s: float = 0.0
    until_s: float = 0.0


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of the timeline of one rank, or of ``NO_RANK``; seconds since the run began."""

    rank: int
    begin_s: float
    end_s: float
    kind: Kind
    what: str = ""


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of all ranks together that were no new training, by cause."""

    cause: str
    rank_seconds: float


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """The share of a stretch of time, which ends at ``at_s``, in which ranks did steps that lasted."""

    at_s: float
    share: float


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a scenario. ``figures`` have their unit in their name, as in ``detected_after_s``.

    ``stopped`` is empty, or says why the run could not be carried through: then nothing is judged, and it is not good.
    """

    scenario: str
    about: str
    seed: int
    steps: int
    world: int
    seconds: float
    promises: tuple[Promise, ...]
    injections: tuple[Injection, ...]
    timeline: tuple[Span, ...] = ()
    figures: dict[str, float] = msgspec.field(default_factory=dict)
    losses: tuple[Loss, ...] = ()
    goodput: tuple[Goodput, ...] = ()
    log: tuple[str, ...] = ()
    stopped: str = ""

    @property
    def broken(self) -> tuple[str, ...]:
        """The names of the promises that were not kept."""
        return tuple(promise.name for promise in self.promises if promise.outcome == "broken")

    @property
    def unfired(self) -> tuple[Injection, ...]:
        """The planned faults that did not happen."""
        return tuple(injection for injection in self.injections if not injection.fired)

    @property
    def good(self) -> bool:
        """Say whether every planned fault happened, each attacked promise was judged, and none was broken."""
        judged = all(promise.outcome != "not judged" for promise in self.promises if promise.attacked)
        return not self.stopped and not self.broken and not self.unfired and judged and bool(self.promises)

    @property
    def exit_status(self) -> int:
        """0 when good, else 1."""
        return 0 if self.good else 1
