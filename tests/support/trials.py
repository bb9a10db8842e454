"""What tests that play scenarios share: the permit, and what they show of a verdict."""

from __future__ import annotations

from typing import Protocol

from toprope.chaos.permit import Permit
from toprope.chaos.scenario import Loaded
from toprope.chaos.verdict import Verdict

PERMIT = Permit(flag=True, environment="chaos", label="chaos")


class Try(Protocol):
    """Plays a scenario and returns the verdict; ``defect`` is a safeguard to leave out."""

    def __call__(self, loaded: Loaded, *, seed: int = 1, defect: str = "") -> Verdict: ...


def told(verdict: Verdict) -> str:
    promises = [f"{one.name}: {one.outcome}: {one.evidence}" for one in verdict.promises if one.outcome != "held"]
    return "\n".join([verdict.stopped, *promises, *map(str, verdict.injections), *verdict.log])
