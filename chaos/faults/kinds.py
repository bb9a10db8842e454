"""All kinds of faults by the word that a scenario calls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from toprope.chaos.faults.injector import Injector
from toprope.chaos.faults.machines import Fill, Power
from toprope.chaos.faults.network import Network
from toprope.chaos.faults.operators import Ckpt, Roll, Split, Twice
from toprope.chaos.faults.points import Clock, Fail, FlippedWeight, NotANumber, Spike
from toprope.chaos.faults.processes import OutOfMemory, Pause, Quota, Signal, Slow
from toprope.chaos.faults.storage import Damage
from toprope.chaos.phases import hold
from toprope.chaos.scenario import Fault, Scenario
from toprope.chaos.site import Site
from toprope.store.errors import UsageError

KINDS: Mapping[str, Callable[[Site, Fault], Injector]] = MappingProxyType(
    {
        "kill": Signal,
        "segfault": Signal,
        "terminate": Signal,
        "pause": Pause,
        "slow": Slow,
        "quota": Quota,
        "oom": OutOfMemory,
        "flip": Damage,
        "tear": Damage,
        "fail": Fail,
        "clock": Clock,
        "nan": NotANumber,
        "spike": Spike,
        "weight": FlippedWeight,
        "network": Network,
        "fill": Fill,
        "power": Power,
        "roll": Roll,
        "split": Split,
        "twice": Twice,
        "ckpt": Ckpt,
    }
)


def injector(site: Site, fault: Fault) -> Injector:
    """Return what does this fault."""
    return KINDS[fault.do](site, fault)


def check(scenario: Scenario) -> None:
    """Check that each fault of a scenario is of a kind that there is.

    Raises:
        UsageError: one is not, or comes in a phase that there is not.
    """
    for fault in scenario.fault:
        if fault.during:
            hold(fault.during, fault.of, step=None, serial=0)
        for words in fault.words():
            if (word := words.partition(" ")[0]) not in KINDS:
                raise UsageError(f"{scenario.name}: no fault is called {word!r}; there are: {', '.join(KINDS)}")
