"""What a coordinator is told at its start, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from toprope.coordinator.election import PATIENCE_S
from toprope.coordinator.settings import Address, check_listen, check_reach
from toprope.coordinator.wire import Cadence
from toprope.store.errors import UsageError
from toprope.store.keep.retention import parse_policy
from toprope.store.names import checked_id
from toprope.store.places import parse_base

VERDICT_DEADLINE_S = 300.0
"""How long all ranks have for a phase of a restore, at most: a rank itself waits for 330 s."""
COPIES_MAX = 3
"""More would only cost memory: whoever fears that so many nodes are lost at once has the object store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A coordinator's configuration. ``broker`` None: the documents go by HTTP alone.

    ``embedded_broker``: the address at which to run a broker of its own. ``copies``: so many other nodes hold each
    snapshot. ``retain``: the policy of retention to put into the job log; None: leave there what there is. ``base``:
    the checkpoint of another job, as JOB@STEP or ROOT/JOB@STEP, that a new job starts from (empty: none), and what it
    takes of that.
    """

    job: str
    store: str
    listen: Address
    broker: Address | None
    embedded_broker: Address | None
    cadence: Cadence
    token: str
    ready_file: Path | None
    copies: int = 1
    verdict_deadline_s: float = VERDICT_DEADLINE_S
    retain: str | None = None
    base: str = ""
    base_take: Literal["all", "weights"] = "all"
    on_log_outage: Literal["wait", "proceed"] = "proceed"
    """Whether attempts are opened while the log can't be reached."""
    heartbeat_s: float = 2.0
    patience_s: float = PATIENCE_S
    tick_s: float = 0.5
    probe_timeout_s: float = 2.0

    def __post_init__(self) -> None:
        """Check what can be checked without touching anything.

        Raises:
            UsageError: a name, an address or the cadence is not usable.
        """
        checked_id(self.job, what="job")
        check_cadence(self.cadence)
        parse_policy(self.retain or "")
        if self.base:
            parse_base(self.base)
        if self.broker is not None and self.embedded_broker is not None:
            raise UsageError("give --broker or --embedded-broker, not both")
        if not self.patience_s < self.verdict_deadline_s <= VERDICT_DEADLINE_S:
            raise UsageError(
                f"--verdict-deadline {self.verdict_deadline_s:g} is not usable: give more than {self.patience_s:g} "
                f"seconds, so that another coordinator can take this one's place meanwhile, and at most "
                f"{VERDICT_DEADLINE_S:.0f}, or ranks give up before they can be told who was missing"
            )
        check_listen(self.listen, what="--listen", token=self.token)
        if self.embedded_broker is not None:
            check_reach(self.embedded_broker, what="--broker-listen", token=self.token)


def check_cadence(cadence: Cadence) -> None:
    """Check that the tiers' intervals nest.

    Raises:
        UsageError: one is below 1, or not a power of two times the one before it.
    """
    before = cadence.every
    if before < 1:
        raise UsageError(f"--every {before} is not usable: give a number of steps of at least 1")
    for name, every in (("--local-every", cadence.local_every), ("--object-every", cadence.object_every)):
        times, rest = divmod(every, before)
        if rest or times < 1 or times & (times - 1):
            raise UsageError(
                f"{name} {every} is not {before} times a power of two (1, 2, 4, ...), as it must be to nest"
            )
        before = every
