"""One history from its seed: chaos, healing, judgement."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from toprope.chaos.sim import nemesis
from toprope.chaos.sim.entropy import seeded
from toprope.chaos.sim.loop import SimLoop, StalledError
from toprope.chaos.sim.options import Options, draw
from toprope.chaos.sim.trace import Trace
from toprope.chaos.sim.world import World

Trouble: TypeAlias = Callable[[World], Awaitable[None]]

HEALED_WITHIN_S = 150.0
_LOOK_EVERY_S = 0.25
_STEPS_MORE = 3
_ROUNDS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one history. ``invariant`` is empty when no promise was broken."""

    seed: int
    options: Options
    invariant: str
    text: str
    story: tuple[str, ...]
    counts: Counter[str]
    digest: str
    virtual_s: float

    def __str__(self) -> str:
        head = f"seed {self.seed}: {self.invariant or 'all invariants hold'}{': ' if self.text else ''}{self.text}"
        return "\n".join((head, f"options: {self.options}", *self.story))


def run(seed: int, options: Options | None = None, *, trouble: Trouble = nemesis.rage) -> Outcome:
    """Run the history of a seed; ``options`` other than those drawn from it are for shrinking.

    ``trouble`` is what happens until the healing.
    """
    rng = random.Random(seed)
    drawn = draw(rng)
    options = options if options is not None else drawn
    loop = SimLoop(rng)
    try:
        with seeded(rng), _current(loop):
            world = World(loop, options)
            with _heard(world.trace):
                return _judged(seed, world, _lived(loop, world, trouble))
    finally:
        loop.close()


def _lived(loop: SimLoop, world: World, trouble: Trouble) -> str:
    """Let it happen; return what went wrong with the simulated programs themselves, if anything."""
    main = loop.create_task(_main(world, trouble))
    main.add_done_callback(lambda _: loop.stop())
    stalled = ""
    try:
        loop.run_forever()
    except StalledError as error:
        stalled = str(error)
    failed = main.exception() if main.done() and not main.cancelled() else None
    errors = [*loop.crashes, *([failed] if failed is not None else [])]
    if world.oracle.violation is None:
        world.oracle.check_readies()
    world.oracle.over = True
    for host in world.all_hosts:
        host.retire()
    loop.drain()
    return stalled or "; ".join(repr(error)[:500] for error in errors[:3])


def _judged(seed: int, world: World, crash: str) -> Outcome:
    found = world.oracle.violation
    invariant = found.invariant if found is not None else "crash" if crash else ""
    text = found.text if found is not None else crash
    return Outcome(
        seed=seed,
        options=world.options,
        invariant=invariant,
        text=text,
        story=tuple(world.trace.story(found.step if found is not None else 0)) if invariant else (),
        counts=world.trace.counts,
        digest=world.trace.digest(),
        virtual_s=world.loop.time(),
    )


async def _main(world: World, trouble: Trouble) -> None:
    supervisor = world.loop.create_task(world.supervise())
    supervisor.add_done_callback(world.loop.note_end)
    await trouble(world)
    nemesis.heal(world)
    healed_s = world.loop.time()
    newest = max((ready.step for ready in world.oracle.state.readies.values()), default=0)
    while not _is_well(world, newest):
        await asyncio.sleep(_LOOK_EVERY_S)
        if world.loop.crashes:
            return
        if world.loop.time() - healed_s > HEALED_WITHIN_S:
            if world.can_be_restored():
                world.oracle.fail("I15", f"{HEALED_WITHIN_S:.0f} s after all faults ended no later step is READY")
            world.trace.sometimes("every copy was lost, and the job said so")
            return
    await _tidied(world)


async def _tidied(world: World) -> None:
    """Wait until all that is condemned now is gone: after two rounds of garbage collection at the latest."""
    if not world.options.retain:
        return
    began_s, rounds, condemned = world.loop.time(), world.rounds, world.oracle.condemned()
    while left := sorted(condemned & world.oracle.condemned()):
        if world.loop.crashes:
            return
        if world.rounds >= rounds + _ROUNDS:
            world.oracle.fail("I15", f"{len(left)} condemned objects are left after two collections: {left[0]}")
            return
        if world.loop.time() - began_s > HEALED_WITHIN_S:
            world.oracle.fail("I15", f"no garbage was collected within {HEALED_WITHIN_S:.0f} s after all faults ended")
            return
        await asyncio.sleep(_LOOK_EVERY_S)


def _is_well(world: World, newest: int) -> bool:
    """Say whether the job trains in the current attempt and a later step has become READY in it."""
    state, launch = world.oracle.state, world.launch
    if state.attempt is None or state.head is None or launch is None or launch.id != state.attempt.launch_id:
        return False
    head = state.readies[state.head]
    later = head.attempt_uid == state.attempt.uid and head.step > min(newest, state.attempt.from_step)
    return later and launch.step() > state.attempt.from_step + _STEPS_MORE


@contextmanager
def _current(loop: SimLoop) -> Iterator[None]:
    """Let what is built before the loop runs find it."""
    asyncio.set_event_loop(loop)
    try:
        yield
    finally:
        asyncio.set_event_loop(None)


@contextmanager
def _heard(trace: Trace) -> Iterator[None]:
    """Take what the programs log into the trace, and keep it from the terminal."""

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            trace.note("log", f"{record.levelname} {record.getMessage()}")

    log, notes = logging.getLogger("toprope"), Notes()
    before = log.propagate, log.level
    log.addHandler(notes)
    log.propagate = False
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(notes)
        log.propagate = before[0]
        log.setLevel(before[1])
