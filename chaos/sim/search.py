"""Many histories, one after another or in several processes, and what came of them all."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from toprope.chaos.sim import shrink
from toprope.chaos.sim.history import Outcome
from toprope.chaos.sim.mutants import MUTANTS

SOMETIMES = (
    "a command was elected for the moment",
    "a coordinator changed the job",
    "a coordinator took over",
    "a coordinator was fenced",
    "a due step was skipped",
    "a launch was answered busy",
    "a launch was answered unavailable",
    "a machine was replaced",
    "a node was declared dead",
    "a node lost power",
    "a pull brought wrong bytes",
    "a rank restored",
    "a reader asked for the rest of a range that broke off",
    "a reader held what is retired",
    "a reader read a checkpoint",
    "a scan refused a local file",
    "a second attempt in a row was opened without the log",
    "a shard named another rank's file of its step",
    "a sidecar asked for the rest of a range that broke off",
    "a slot was dropped",
    "a step became READY",
    "a step was protected",
    "a trainer lost its sidecar",
    "an attempt followed a protected step",
    "an attempt opened without the log came into it",
    "an attempt was opened without the log",
    "an object was deleted",
    "message doubled",
    "message lost",
    "restored from a READY",
    "restored from what is not READY",
    "staged from here local",
    "staged from here memory",
    "staged from here peer",
    "staged from node memory",
    "staged from object object",
    "stopped at copy",
    "stopped at facts",
    "stopped at hash",
    "stopped at log",
    "stopped at manifests",
    "stopped at shards",
    "store: 503",
    "store: broke off",
    "store: ended early",
    "store: late create landed",
    "store: reply lost",
    "store: request lost",
    "store: wrong byte",
)
"""What a search of a thousand histories must reach, or its silence says nothing."""
SELDOM = (
    "METRIC came before an attempt opened without the log",
    "PIN came before an attempt opened without the log",
    "a coordinator learned what was opened without the log",
    "a hold was left behind",
    "a read-back found damage",
    "a reader refused wrong bytes",
    "a slow node adopted an attempt while two coordinators stood by",
    "a source was struck off",
    "an attempt opened without the log was fenced off",
    "an attempt opened without the log was rolled back",
    "the store went away while a record was appended",
    "wrong bytes of the store were asked for once more",
)
"""What one in some hundreds reaches: a search of a thousand may miss it."""


@dataclass(slots=True)
class Found:
    """What came of a search."""

    histories: int = 0
    virtual_s: float = 0.0
    wall_s: float = 0.0
    broken: list[Outcome] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def never(self) -> list[str]:
        """Return what was to happen sometimes and never did."""
        return [what for what in (*SOMETIMES, *SELDOM) if not self.counts[what]]

    def summary(self) -> str:
        """Return it for people."""
        rate = self.histories / self.wall_s if self.wall_s else 0.0
        lines = [f"{count:9} {what}" for what, count in sorted(self.counts.items())]
        lines.append(f"{self.histories} histories, {self.virtual_s / 3600:.1f} virtual hours, {rate:.1f} a second")
        lines += [f"never happened: {what}" for what in self.never()]
        broken = Counter(outcome.invariant for outcome in self.broken)
        lines.append(f"broken: {dict(broken)}" if broken else "no promise was broken")
        return "\n".join(lines)


def names() -> list[str]:
    """Return the names of the mutants."""
    return [mutant.name for mutant in MUTANTS]


def run(seeds: range, *, mutant: str = "", jobs: int = 1, tell: Callable[[str], object] = lambda _: None) -> Found:
    """Run the histories of these seeds; ``tell`` hears of each that broke a promise, made as small as can be."""
    found, began_s = Found(), time.monotonic()
    for outcome in _outcomes(seeds, mutant=mutant, jobs=jobs):
        found.histories += 1
        found.virtual_s += outcome.virtual_s
        found.counts += outcome.counts
        if outcome.invariant:
            found.broken.append(outcome)
            again = partial(shrink.tell, outcome.seed, mutant=mutant)
            tell(shrink.told(shrink.shrunk(outcome, again), mutant=mutant))
    found.wall_s = time.monotonic() - began_s
    return found


def _outcomes(seeds: range, *, mutant: str, jobs: int) -> Iterator[Outcome]:
    work = partial(one, mutant=mutant)
    if jobs == 1 or len(seeds) == 1:
        yield from map(work, seeds)
        return
    with ProcessPoolExecutor(jobs, initializer=_settle_memory) as pool:
        yield from pool.map(work, seeds, chunksize=4)


def _settle_memory() -> None:
    """Let Python's collector not go through all that was imported again and again."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def one(seed: int, *, mutant: str = "") -> Outcome:
    """Run one history, without a mutant's safeguard if one is named."""
    return shrink.tell(seed, None, mutant=mutant)
