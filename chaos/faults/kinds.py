"""All kinds of faults by the word that a scenario calls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from toprope.chaos.faults.injector import Injector
from toprope.chaos.faults.network import Network
from toprope.chaos.faults.operators import Ckpt, Roll, Split, Twice
from toprope.chaos.faults.points import Clock, Fail, NotANumber
from toprope.chaos.faults.processes import OutOfMemory, Pause, Quota, Signal, Slow
from toprope.chaos.faults.storage import Damage
from toprope.chaos.phases import hold
from toprope.chaos.scenario import ANY, Fault, Scenario
from toprope.chaos.site import Site
from toprope.chaos.verdict import Injection
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
        "network": Network,
        "roll": Roll,
        "split": Split,
        "twice": Twice,
        "ckpt": Ckpt,
    }
)

_ENDS_TRAINERS = {"kill", "segfault", "terminate", "oom"}
_COST_NO_PROTECTION = {"flip", "tear", "ckpt", "twice"}
_PORTS_OF_PROTECTION = ("pages.", "peers.", "coordinator.", "broker.", "nodes.")


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
        words = str(fault.how.get("among", "")).split(";") if fault.do == ANY else [fault.do]
        for word in words:
            if word.strip().partition(" ")[0] not in KINDS:
                raise UsageError(f"{scenario.name}: no fault is called {word.strip()!r}; there are: {', '.join(KINDS)}")


def costs_slots(one: Injection) -> bool:
    """Say whether a fault may be why a rank has no free slot while it lasts, and shortly after it: one of a service."""
    return one.fired and one.fault not in _COST_NO_PROTECTION and one.target.partition(" ")[0] != "rank"


def costs_protection(one: Injection) -> bool:
    """Say whether a fault may keep steps from being protected while it lasts, and shortly after it.

    That is one of what makes and knows of copies in memory: sidecars, coordinator, broker. Neither disk nor object
    store, nor a slow rank, is a reason to lose a step that is in memory.
    """
    if not costs_slots(one):
        return False
    if one.fault == "fail":
        return one.witness.partition(":")[2].startswith(_PORTS_OF_PROTECTION)
    return one.target.partition(" ")[0] in {"sidecar", "coordinator", "broker", "services"}


def ends_trainers(fault: str, target: str) -> bool:
    """Say whether a fault ends ranks, so that the world is started again."""
    return fault in _ENDS_TRAINERS and target.partition(" ")[0] in {"rank", "node"}
