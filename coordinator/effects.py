"""What the coordinator's core wants done. Values; ``performer.py`` does them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from toprope.coordinator.intents import CommitStep, OpenAttempt, ReadIndexes
from toprope.coordinator.wire import Desired, OpenAnswer, Provisional, ReadBackTask


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Let everyone know how the job is wanted to be."""

    desired: Desired


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Ask a node for its inventory."""

    node: str
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Ask these nodes (name and url) for their inventories, and look up these READY checkpoints, newest first.

    None of them while the log is known to be away: nothing is looked up then.
    """

    nodes: tuple[tuple[str, str], ...]
    ready_seqs: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    """Open an attempt in the log."""

    intent: OpenAttempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Enter:
    """Append an attempt that was decided without the log, if it can take it; answer EnterEnded."""

    attempt: Provisional


@dataclass(frozen=True, slots=True, kw_only=True)
class Learn:
    """Ask a node which attempts it has adopted; answer Learned."""

    node: str
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAhead:
    """Read indexes before their step is committed: those of thousands of ranks take longer than all else.

    Of other steps than ``wanted`` nothing is of use any more.
    """

    indexes: ReadIndexes
    wanted: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Check the indexes, write the manifest and make it READY."""

    intent: CommitStep


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBackHere:
    """Read back an object, since no other node is there to do it."""

    task: ReadBackTask


@dataclass(frozen=True, slots=True, kw_only=True)
class Tidy:
    """Retire what the job's policy does not keep, delete what the log has condemned, keep a fold of a long log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Answer a request for an attempt."""

    request_id: int
    answer: OpenAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class Say:
    """Tell people."""

    level: Literal["info", "warning", "error"]
    text: str


Effect: TypeAlias = (
    Publish | Probe | Prepare | Append | Enter | Learn | ReadAhead | Commit | ReadBackHere | Tidy | Answer | Say
)
