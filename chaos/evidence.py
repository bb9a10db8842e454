"""All that a run is judged from, gathered from outside: journals, the job log, the store, the processes."""

from __future__ import annotations

import msgspec

from toprope.chaos.journal import Event, Final
from toprope.chaos.scenario import Scenario
from toprope.chaos.verdict import Injection


class Restart(msgspec.Struct, frozen=True, kw_only=True):
    """The world was ended and started again. Times are monotonic; ``ended`` says how ranks ended of themselves.

    ``newest_step`` is the newest that any rank had ended, ``protected_step`` what was protected as far as anybody said
    before; ``pids`` are those of the new ranks.
    """

    at_s: float
    newest_step: int
    protected_step: int
    ended: dict[int, int]
    pids: tuple[int, ...]


class Protection(msgspec.Struct, frozen=True, kw_only=True):
    """From ``at_s`` (monotonic) on a coordinator said this to be the newest step that is protected."""

    at_s: float
    step: int


class ReadyFact(msgspec.Struct, frozen=True, kw_only=True):
    """A READY record as it lies in the log."""

    number: int
    attempt: int
    step: int


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """Words that were to be found in the log of a process, and the line they were found in; empty: nowhere."""

    process: str
    words: str
    line: str


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """What the process of a service that lived longest used when it was warm and when it was seen last, later."""

    process: str
    seconds: float = 0.0
    open_files: tuple[int, int]
    resident_bytes: tuple[int, int]


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """See above. ``told_ready``: steps that a coordinator has said to be READY, and in which attempt first.

    ``ready_after_s``: from the last step's end until the last due one was READY; negative: it was not.
    """

    scenario: Scenario
    seed: int
    began_s: float
    seconds: float
    events: tuple[Event, ...] = ()
    finals: tuple[Final, ...] = ()
    reference: tuple[Final, ...] = ()
    injections: tuple[Injection, ...] = ()
    restarts: tuple[Restart, ...] = ()
    readies: tuple[ReadyFact, ...] = ()
    told_ready: dict[int, int] = {}
    protections: tuple[Protection, ...] = ()
    log: tuple[str, ...] = ()
    log_trouble: str = ""
    verified: int = 0
    damages: tuple[str, ...] = ()
    ready_due: int = 0
    ready_after_s: float = -1.0
    told: tuple[Told, ...] = ()
    uses: tuple[Use, ...] = ()
    leftovers: tuple[str, ...] = ()
    looked: bool = True
    """Whether the end of all processes was seen, so that leftovers could be looked for."""
