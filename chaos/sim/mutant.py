"""A safeguard that can be switched off."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from toprope.chaos.patching import Patches
from toprope.chaos.sim import stand_ins as s
from toprope.chaos.sim.options import Options, draw

YES = True
NO_OWN_CHECK = {("toprope.store.log.chain", "violation"): s.always(None)}
"""The writer's own check of its record, which would stop the program before the oracle can see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A safeguard switched off. ``patches``: module and dotted name to what takes its place, given what was there.

    ``narrow``: what the options drawn from the seed are replaced by.
    """

    name: str
    safeguard: str
    invariant: str
    seed: int
    patches: Patches
    narrow: Mapping[str, Any] = field(default_factory=dict)

    def options(self, seed: int) -> Options:
        """Return the options of a seed, narrowed to the trouble in which the safeguard matters."""
        return draw(random.Random(seed), **self.narrow)
