"""What the coordinator's core is told. Times are seconds of a monotonic clock; ids are drawn by the shell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from toprope.coordinator.log_view import LogView
from toprope.coordinator.restore_choice import Offer
from toprope.coordinator.wire import Desired, Inventory, OpenRequest, Presence, Provisional, ReadBack


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """An inventory came. ``live``: by HTTP, so its sender was there just now; else it may be a retained one."""

    inventory: Inventory
    live: bool
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Hinted:
    """A presence came."""

    presence: Presence
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """A node was asked for its inventory; None: it gave none in time."""

    node: str
    inventory: Inventory | None
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A launch asks for an attempt; the answer goes to ``request_id``."""

    request_id: int
    request: OpenRequest
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """All nodes were asked and the READY checkpoints looked up, for the request that is being decided.

    ``answers`` are the inventories by node, None for a node that gave none; ``uid`` is fresh, for the new attempt.
    ``offers`` None: the store did not answer, ``why`` says how, or was not asked. ``unsure``: a record of ours may be
    on its way that an attempt can't follow which is decided without it.
    """

    answers: Mapping[str, Inventory | None]
    offers: tuple[Offer, ...] | None
    uid: str
    now_s: float
    why: str = ""
    unsure: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LogMoved:
    """The log is longer than it was."""

    log_view: LogView
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LogReached:
    """The log was read to its end just now, or could not be: ``why``, else empty."""

    why: str
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """A node says which attempts it has adopted; None: it gave no answer."""

    node: str
    adopted: tuple[Provisional, ...] | None
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EnterEnded:
    """What was to be appended of what was opened without the log is there, or is not."""

    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """An operator says that a node, as it is known now, is dead."""

    node: str
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenFailed:
    """The attempt ``uid`` could not be appended: ``text`` says why. ``again``: the log has moved on, decide anew."""

    uid: str
    text: str
    again: bool
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFailed:
    """A step did not become READY. ``final``: it never will; else it may be tried again."""

    attempt_uid: str
    step: int
    text: str
    final: bool
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadHere:
    """The coordinator has read back an object itself; None: the store did not answer."""

    key: str
    result: ReadBack | None
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenDesired:
    """A retained Desired was found at the broker."""

    desired: Desired
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """The broker was reached (again): it may have lost everything."""

    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked:
    """Time has passed."""

    now_s: float


Event: TypeAlias = (
    Heard
    | Hinted
    | Probed
    | Asked
    | Prepared
    | LogMoved
    | LogReached
    | Learned
    | EnterEnded
    | Declared
    | OpenFailed
    | CommitFailed
    | ReadHere
    | SeenDesired
    | Connected
    | Ticked
)
