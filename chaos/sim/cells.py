"""One fault in one phase of a shard's way, and what comes of it: the cells of the fault matrix.

The programs are the real ones in a quiet simulated world of two nodes; up to the phase each run is the same. A cell is
judged twice: the oracle of the simulator sees whether a promise broke, as in every history, and ``outcomes`` says from
the marks that processes leave at both ends of a phase which of the matrix's outcomes came about.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from toprope.chaos.matrix import Code, Phase
from toprope.chaos.sim.history import Outcome, run
from toprope.chaos.sim.loop import PROCESS
from toprope.chaos.sim.options import QUIET
from toprope.chaos.sim.store_marks import Deletions, mark_commits
from toprope.chaos.sim.trace import Mark
from toprope.chaos.sim.world import Node, World
from toprope.store.names import Key

SEED = 7
_MIDDLE: dict[Phase, str] = {
    "shm copy": "copy",
    "hashing": "hash",
    "peer replication": "receive",
    "object upload": "shards",
    "manifest commit": "manifests",
    "restore": "receive",
    "garbage collection": "deleted",
}
"""The point that a process passes in the middle of a phase. A local write has none: it is one call of the disk."""
_WARM_READIES = 2
_SELDOM = {"every": 4, "local_every": 4, "object_every": 4}
"""A step that is struck is to end before the next one is due, else that overtakes it."""
_LOOKS, _LOOK_EVERY_S = 900, 0.1
_WATCHED_S = 14.0
"""So long a cell is watched after its fault has ended and before all is healed: what comes of it is not the healing."""
_REFUSED: dict[Phase, str] = {
    "shm copy": "a slot was dropped",
    "hashing": "a slot was dropped",
    "local write": "a scan refused a local file",
    "object upload": "a read-back found damage",
}
"""What says that the work of a phase was found to be spoilt later on."""
_CAN_SKIP: tuple[Phase, ...] = ("shm copy", "hashing")
_SKIPPED = "a due step was skipped"


@dataclass(slots=True, kw_only=True)
class Scene:
    """Where a fault strikes: the phase that a process has just entered or is in the middle of, or has just left.

    ``for_s``: how long the fault lasts, until all of ``undo``. ``loud`` is the typed error that somebody met.
    ``later`` takes the witness of a blow that comes only after its strike; while it is empty, none has come.
    """

    world: World
    phase: Phase
    mark: Mark
    at_s: float
    keys: frozenset[Key] = frozenset()
    for_s: float = 0.0
    undo: list[Callable[[], None]] = field(default_factory=list)
    loud: str = ""
    later: list[str] | None = None

    @property
    def rank(self) -> int:
        """The rank whose shard it is; 0 in what coordinators do."""
        return max(0, self.mark.about[2])

    @property
    def owner(self) -> Node:
        """The node on which that rank sits."""
        return self.world.nodes[self.rank // self.world.options.ranks_per_node]

    @property
    def node(self) -> Node:
        """The node on which the phase is; in what trainers and coordinators do, the rank's."""
        return next((node for node in self.world.nodes if node.name == self.mark.who), self.owner)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault. ``strike`` makes it happen and returns a witness: what can be seen of it there and then.

    ``moment``: ``begins``, ``middle`` or ``ends`` of the phase. ``before`` leads the world to where the phase comes by;
    ``way`` is the way of staging that is meant, when it is a restore. ``right`` are the outcomes that are right for it,
    where the words of the cell are about something else that may be hit, and ``nodes`` how many nodes it takes.
    """

    name: str
    strike: Callable[[Scene], str]
    moment: Literal["begins", "middle", "ends"] = "middle"
    before: Callable[[World], None] | None = None
    way: str = "node"
    right: frozenset[Code] = frozenset()
    nodes: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What came of one fault. ``struck_s`` lies between ``entered_s`` and ``left_s``, when the process left or died."""

    phase: Phase
    fault: str
    fired: bool
    witness: str
    entered_s: float
    struck_s: float
    left_s: float
    codes: frozenset[Code]
    outcome: Outcome


def complaint(seen: Seen, right: Collection[Code]) -> str:
    """Return what is wrong with what came of a fault; nothing when it came as it should."""
    if not seen.fired:
        return f"it did not fire: {seen.witness}"
    if seen.outcome.invariant:
        return f"{seen.outcome.invariant}: {seen.outcome.text}"
    if not seen.entered_s <= seen.struck_s <= seen.left_s:
        return f"it fired at {seen.struck_s:.2f} s, and the phase was from {seen.entered_s:.2f} to {seen.left_s:.2f} s"
    if not seen.codes & set(right):
        return f"{', '.join(sorted(seen.codes))} came of it, not {' or '.join(sorted(right))}"
    return ""


def strike(phase: Phase, fault: Fault) -> Seen:
    """Run the history of one fault in one phase."""
    watches: list[_Watch] = []

    async def trouble(world: World) -> None:
        watch = _Watch(world, phase, fault)
        watches.append(watch)
        await _until(lambda: len(world.oracle.state.readies) >= _WARM_READIES)
        watch.armed = True
        if fault.before is not None:
            fault.before(world)
        await _until(lambda: watch.scene is not None)
        if watch.scene is not None:
            await asyncio.sleep(watch.scene.for_s)
            for undo in watch.scene.undo:
                undo()
            await asyncio.sleep(_WATCHED_S)

    collects = phase == "garbage collection"
    options = msgspec.structs.replace(
        QUIET, nodes=fault.nodes, **_SELDOM, broker=True, retain="last=1" if collects else ""
    )
    outcome = run(SEED, options, trouble=trouble)
    return watches[0].seen(outcome)


async def _until(true: Callable[[], bool]) -> None:
    for _ in range(_LOOKS):
        if true():
            return
        await asyncio.sleep(_LOOK_EVERY_S)


class _Watch:
    """Hears all marks of a history, makes those of commits and deletions itself, and strikes once."""

    def __init__(self, world: World, phase: Phase, fault: Fault) -> None:
        self.armed = False
        self.scene: Scene | None = None
        self._world = world
        self._phase = phase
        self._fault = fault
        self._marks: list[Mark] = []
        self._struck_at = 0
        self._before = Counter[str]()
        self._witness = ""
        world.trace.on_mark = self._on_mark
        self._hear_points()
        self._deletions = Deletions(world, on_deleted=lambda: self._on_point("deleted"))
        mark_commits(world)

    # What is heard

    def _hear_points(self) -> None:
        world, before_at, before_store = self._world, self._world.at, self._world.store.at

        def at(point: str) -> None:
            before_at(point)
            self._on_point(point)

        def at_store(kind: str) -> None:
            before_store(kind)
            self._on_point(kind)

        world.at, world.store.at = at, at_store  # type: ignore[method-assign]  # the world of one history

    def _on_mark(self, mark: Mark) -> None:
        if self._world.oracle.over:
            return
        self._marks.append(mark)
        if self._is_meant(mark) and mark.edge == self._fault.moment:
            self._strike(mark)

    def _on_point(self, point: str) -> None:
        process = PROCESS.get()
        if self._fault.moment != "middle" or point != _MIDDLE.get(self._phase) or process is None:
            return
        for mark in reversed(self._marks):
            if (
                mark.who == process.name
                and mark.edge == "begins"
                and self._is_meant(mark)
                and self._newest(mark) is mark
            ):
                self._strike(mark)
                return

    def _newest(self, mark: Mark) -> Mark:
        """Return the newest mark of the same process in the same phase of the same shard."""
        return next(other for other in reversed(self._marks) if _same(other, mark))

    def _is_meant(self, mark: Mark) -> bool:
        if self._phase == "restore":
            return mark.phase.startswith(f"staging from {self._fault.way}")
        return mark.phase == self._phase

    def _strike(self, mark: Mark) -> None:
        if not self.armed or self.scene is not None:
            return
        world, counts = self._world, self._world.trace.counts
        self.scene = Scene(world=world, phase=self._phase, mark=mark, at_s=world.loop.time(), keys=self._deletions.keys)
        self._struck_at, self._before = len(self._marks), counts.copy()
        world.trace.note("nemesis", f"{self._fault.name} in {self._phase} of {mark.who}")
        self._witness = self._fault.strike(self.scene)

    # What came of it

    def seen(self, outcome: Outcome) -> Seen:
        """Return what came of it."""
        scene = self.scene
        if scene is None:
            return Seen(
                phase=self._phase,
                fault=self._fault.name,
                fired=False,
                witness="the phase was never entered",
                entered_s=0.0,
                struck_s=0.0,
                left_s=0.0,
                codes=frozenset(),
                outcome=outcome,
            )
        after = self._marks[self._struck_at :]
        left = next((mark.at_s for mark in after if _same(mark, scene.mark) and mark.edge != "begins"), scene.at_s)
        entered = next(
            mark
            for mark in reversed(self._marks[: self._struck_at])
            if _same(mark, scene.mark) and mark.edge == "begins"
        )
        return Seen(
            phase=self._phase,
            fault=self._fault.name,
            fired=scene.later is None or bool(scene.later),
            witness=self._witness if scene.later is None else "; ".join((self._witness, *scene.later)),
            entered_s=entered.at_s,
            struck_s=scene.at_s,
            left_s=max(left, scene.at_s),
            codes=frozenset(self._codes(scene, after)),
            outcome=outcome,
        )

    def _codes(self, scene: Scene, after: list[Mark]) -> set[Code]:
        counts = self._world.trace.counts
        codes = _restored(scene, after) if scene.phase == "restore" else outcomes(scene, after)
        if scene.phase == "garbage collection" and "D" in codes:
            codes = {"R"} if not scene.keys & self._world.store.objects.keys() else {"D"}
        if (refused := _REFUSED.get(scene.phase)) and counts[refused] > self._before[refused]:
            codes = {"D"}
        if scene.phase in _CAN_SKIP and counts[_SKIPPED] > self._before[_SKIPPED]:
            codes.add("S")
        if scene.loud:
            codes.add("L")
        return codes


def _same(mark: Mark, other: Mark) -> bool:
    return (mark.who, mark.phase, mark.about) == (other.who, other.phase, other.about)


def outcomes(scene: Scene, after: list[Mark]) -> set[Code]:
    """Say what came of a phase that was struck, from the marks since.

    ``N``: the process went on and ended it, once. ``R``: it failed or died there, and it was done again to the end.
    ``T``: the shard came to another tier instead, or before it, or of what peers pull to another node. Else ``D``, or
    ``S`` when it is the copy itself.
    """
    if scene.mark.edge == "ends":
        after = [scene.mark, *after]
    own = [mark for mark in after if (mark.phase, mark.about) == (scene.mark.phase, scene.mark.about)]
    if scene.phase == "peer replication":
        own = [mark for mark in after if _is_of_the_same_pulls(mark, scene.mark)]
    ended = [mark for mark in own if mark.edge == "ends"]
    here = next((mark for mark in own if mark.who == scene.mark.who), None)
    if here is not None and here.edge == "ends" and [mark for mark in own if mark.about == here.about] == [here]:
        late = scene.phase == "local write" and any(_is_elsewhere(m, scene.mark) for m in after if m.at_s < here.at_s)
        return {"N", "T"} if late else {"N"}
    codes: set[Code] = {"R"} if ended else set()
    if any(_is_elsewhere(mark, scene.mark) and mark.edge == "ends" for mark in after):
        codes.add("T")
    if codes:
        return codes
    return {"S"} if scene.phase == "shm copy" else {"D"}


def _is_of_the_same_pulls(mark: Mark, struck: Mark) -> bool:
    """Say whether a mark is of the pull that was struck, or of one by which its node has caught up since."""
    same = (mark.who, mark.phase, mark.about[0], mark.about[2]) == (
        struck.who,
        struck.phase,
        struck.about[0],
        struck.about[2],
    )
    return same and mark.about[1] >= struck.about[1]


def _is_elsewhere(mark: Mark, struck: Mark) -> bool:
    """Say whether a mark is of what makes up for a local write or a pull: another tier, or a pull by another node."""
    if struck.phase == "local write":
        return mark.about == struck.about and mark.phase in {"peer replication", "object upload"}
    pulled = (mark.phase, mark.about[0], mark.about[2]) == ("peer replication", struck.about[0], struck.about[2])
    return struck.phase == "peer replication" and pulled and mark.about[1] >= struck.about[1] and mark.who != struck.who


def _restored(scene: Scene, after: list[Mark]) -> set[Code]:
    """Say what came of a restore, from the marks since its node was struck while it staged a shard.

    ``N``: that was staged, once, and the attempt began. ``R``: it was staged anew, in this attempt or in a later one;
    ``T``: from elsewhere.
    """
    struck = scene.mark
    done = [mark.about[0] for mark in after if mark.phase == "restore" and mark.edge == "ends"]
    own = [mark for mark in after if mark.who == struck.who and mark.about[1:] == struck.about[1:]]
    staged = [mark for mark in own if mark.phase.startswith("staging")]
    if not done:
        return {"D"}
    if staged and _same(staged[0], struck) and staged[0].edge == "ends" and struck.about[0] in done:
        return {"N"}
    codes: set[Code] = {"R"}
    if any(mark.edge == "ends" and mark.phase != struck.phase for mark in staged):
        codes.add("T")
    return codes
