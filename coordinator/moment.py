"""What the coordinator knows at one moment, as values that change no more, however long somebody looks at them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from toprope.coordinator.core import Core, Settings
from toprope.coordinator.log_view import LogView
from toprope.coordinator.phases import Progress
from toprope.coordinator.placement import Plan
from toprope.coordinator.protection import Safety
from toprope.coordinator.roll import Node
from toprope.coordinator.wire import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A job as it is known at ``now_s``. ``broker`` is ``connected``, ``away`` or ``none``.

    ``nodes`` are all that were ever heard, by name. ``stored``: the ranks whose objects are known of, by step, beside
    those that nodes list. ``outage``: what to say of a log that can't be reached. ``advice``: the cadence that copies
    could keep up with, empty if they do.
    """

    now_s: float
    settings: Settings
    term: int
    broker: str
    standbys: tuple[str, ...]
    log_view: LogView
    provisional: bool
    progress: Progress
    safety: Safety | None
    protected_at_s: float
    plan: Plan
    placement: tuple[Placement, ...]
    nodes: tuple[Node, ...]
    stored: Mapping[int, tuple[int, ...]]
    log_away_s: float
    outage: tuple[str, ...]
    advice: str

    @property
    def protected_age_s(self) -> float:
        """Return for how long the newest protected step has been protected, or none has been since the attempt."""
        return self.now_s - self.protected_at_s if self.log_view.state.attempt is not None else 0.0

    @property
    def protected_step(self) -> int:
        """Return the newest protected step; 0: none."""
        return self.safety.protected_step if self.safety is not None else 0


def moment(core: Core, *, broker: str, standbys: tuple[str, ...] = (), now_s: float) -> Moment:
    """Return what is known now. It costs little, however many ranks there are."""
    return Moment(
        now_s=now_s,
        settings=core.settings,
        term=core.term,
        broker=broker,
        standbys=standbys,
        log_view=core.log_view,
        provisional=core.provisional,
        progress=core.progress,
        safety=core.safety(),
        protected_at_s=core.protected_at_s,
        plan=core.placing.plan,
        placement=() if core.desired is None else core.desired.placement,
        nodes=core.roll.all(),
        stored=core.commits.stored(),
        log_away_s=core.outage.away_s(now_s),
        outage=_outage(core, now_s),
        advice=core.aim.advice(core.settings.cadence.every) if core.aim.steps_missed else "",
    )


def _outage(core: Core, now_s: float) -> tuple[str, ...]:
    """Return what to say of a log that can't be reached, and of attempts that are not in it."""
    alarms = []
    outage, attempt = core.outage, core.log_view.state.attempt
    if away_s := outage.away_s(now_s):
        goes_on = "restores from memory go on" if outage.proceeds else "restores wait for it (--on-log-outage wait)"
        alarms.append(f"the job log has been away for {away_s:.0f} s: nothing becomes READY, {goes_on}: {outage.why}")
    if core.provisional and attempt is not None:
        alarms.append(f"attempt {attempt.attempt} was opened without the log, and is not in it yet")
    if (one := outage.next_to_open(core.log_view)) is not None and away_s:
        nodes = ", ".join(outage.missing(one, core.log_view))
        alarms.append(f"attempt {one.number} waits for these nodes to adopt it: {nodes}")
    alarms += outage.untold(core.logged, core.roll.nodes).values()
    alarms += [outage.fate(uid) for uid in outage.fenced]
    return tuple(alarms)
