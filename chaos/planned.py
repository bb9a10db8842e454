"""When faults come: each planned one waits for its trigger, strikes, lasts, is mended, and says whether it happened."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from toprope.chaos import permit
from toprope.chaos.faults.injector import Injector, NotFiredError
from toprope.chaos.faults.kinds import injector
from toprope.chaos.killpoints import Armed, arm_all, armed_points, fired
from toprope.chaos.live.processes import LiveError
from toprope.chaos.phases import NAMES_STEP, hold
from toprope.chaos.scenario import Fault
from toprope.chaos.site import Site
from toprope.chaos.verdict import Injection

HELD_S_MAX = 3.0
"""How long after a fault was struck a process is held in its phase at most, until the fault is seen to happen."""


@dataclass(slots=True)
class Planned:
    """One fault on its way: waiting, striking, lasting, over."""

    site: Site
    fault: Fault
    tell: Callable[[str], None]
    at_s: float = 0.0
    until_s: float = 0.0
    over: bool = False
    why: str = ""
    _injector: Injector | None = None
    _held: Armed | None = None
    _armed_s: float = 0.0
    _is_within: bool = False
    """Whether it was seen to happen while the process was still in the phase that it was to come in."""

    @property
    def lasts(self) -> bool:
        """Whether it was struck and is not mended yet."""
        return self._injector is not None and not self.over

    def turn(self) -> None:
        """Do what is to be done now."""
        if self.over:
            return
        if self._injector is None:
            if self._is_due():
                self._strike()
            return
        self._injector.tend()
        self._look()
        if self.site.now_s() >= self.at_s + self.fault.for_s:
            self.mend()

    def mend(self) -> None:
        """End it, if it lasts; one that was never struck never will be."""
        if self.lasts:
            assert self._injector is not None
            self._injector.mend()
            self.until_s = self.site.now_s()
            self.tell(f"mended: {self.name}")
        self._let_go()
        self.over = True

    def result(self) -> Injection:
        """Return what came of it; one that was to come in a phase must have been seen to happen there."""
        witness = self._injector.witness() if self._injector is not None and not self.why else ""
        why = self.why or ("nothing shows that it happened" if self._injector is not None else "its moment never came")
        if witness and self.fault.during:
            phase = f"while {self.fault.of} was in {self.fault.during}"
            why, witness = f"{witness}, but not {phase}", f"{witness}, {phase}" if self._is_within else ""
        return Injection(
            fault=self.fault.do,
            target=self.fault.target,
            trigger=self.fault.trigger,
            fired=bool(witness),
            witness=witness or why,
            at_s=round(self.at_s, 3),
            until_s=round(self.until_s, 3),
        )

    @property
    def name(self) -> str:
        """What it is called when it is told."""
        return f"{self.fault.do} {self.fault.target}".strip()

    def _is_due(self) -> bool:
        fault = self.fault
        if fault.during:
            return self._is_in_phase()
        if fault.mtbf_s is not None:
            return True  # whoever draws its time has made it now
        if isinstance(fault.at_step, int):
            return self.site.newest_step() >= fault.at_step
        begun_s = self.site.begun_s()
        at_s = 0.0 if fault.at_s is None or isinstance(fault.at_s, tuple) else fault.at_s  # a span was drawn from
        return begun_s is not None and self.site.now_s() - begun_s >= at_s

    def _is_in_phase(self) -> bool:
        """Hold the process in the phase as soon as training has come near, and say whether it is there."""
        fault = self.fault
        if self._held is None:
            step = fault.at_step if isinstance(fault.at_step, int) else None
            topology = self.site.scenario.topology
            ahead = topology.object_every if fault.during in NAMES_STEP else topology.every
            if step is not None and self.site.newest_step() < step - ahead:
                return False
            self._held = hold(fault.during, fault.of, step=step, serial=time.monotonic_ns())
            self._armed_s = time.monotonic()
            file = self.site.armed(fault.of)
            arm_all(file, [*armed_points(file), self._held])
        seen = fired(self.site.passed(fault.of))
        return any(one.at_s >= self._armed_s and one.point == self._held.point and one.action == "hold" for one in seen)

    def _look(self) -> None:
        """Let the process that is held in the phase go on once the fault is seen to happen, or after some seconds."""
        if self._held is None or self._injector is None:
            return
        self._is_within = bool(self._injector.witness())
        if self._is_within or self.site.now_s() >= self.at_s + HELD_S_MAX:
            self._let_go()

    def _let_go(self) -> None:
        """Let the process that is held in a phase go on, if it lives."""
        if self._held is not None:
            file = self.site.armed(self.fault.of)
            arm_all(file, [one for one in armed_points(file) if one != self._held])
            self._held = None

    def _strike(self) -> None:
        site, fault = self.site, self.fault
        permit.note(
            "strike", job=site.job, scenario=site.scenario.name, seed=site.seed, fault=msgspec.to_builtins(fault)
        )
        self.tell(f"{fault.trigger}: {self.name}")
        self.at_s = site.now_s()
        self._injector = injector(site, fault)
        try:
            self._injector.strike()
        except (NotFiredError, LiveError) as error:
            self.why, self.over = str(error).splitlines()[0], True
            self.tell(f"did not happen: {self.name}: {self.why}")
            self._let_go()
        self._look()


@dataclass(slots=True)
class Recurring:
    """Faults that come again and again, at times drawn from the seed: one lasts at a time."""

    site: Site
    fault: Fault
    tell: Callable[[str], None]
    chance: random.Random
    come: list[Planned] = field(default_factory=list)
    _next_s: float = 0.0

    def turn(self) -> None:
        """Do what is to be done now."""
        if self.site.newest_step() == 0:
            return
        now_s = self.site.now_s()
        if not self._next_s:
            self._next_s = now_s + self._gap_s()
        if self.come and not self.come[-1].over:
            self.come[-1].turn()
        elif now_s >= self._next_s and not self._is_near_the_end():
            self.come.append(Planned(self.site, self.fault.drawn(self.chance), self.tell))
            self.come[-1].turn()
            self._next_s = now_s + self._gap_s()

    def _gap_s(self) -> float:
        return self.chance.expovariate(1.0 / (self.fault.mtbf_s or 1.0))

    def _is_near_the_end(self) -> bool:
        scenario = self.site.scenario
        return self.site.newest_step() > scenario.workload.steps - 4 * scenario.topology.object_every
