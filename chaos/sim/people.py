"""People and their commands: readers that hold a READY while they read it, and changes of the job.

Readers run the real ``holding_choice`` and read as an export does, one call of the store after another. A change goes
to a coordinator that answers; else its command is elected for the moment, by the real ``append_in_passing``.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from toprope.chaos.sim.loop import Process
from toprope.chaos.sim.net import NetError
from toprope.chaos.sim.threads import nap
from toprope.store.checkpoint.files import image_chunks, write_image
from toprope.store.checkpoint.manifest import Index
from toprope.store.checkpoint.ready import read_index, read_manifest
from toprope.store.digest import digest
from toprope.store.errors import CkptError, MissingObjectError, UsageError
from toprope.store.keep.changes import Change, ChangeAnswer, ChangeRequest, append_in_passing, checked
from toprope.store.keep.holds import holding_choice
from toprope.store.keep.rollback import opened_for_nobody, plan_rollback
from toprope.store.log.chain import read_on
from toprope.store.log.fold import JobState
from toprope.store.log.records import Metric, Pin, Retire, Taint, Unpin
from toprope.store.log.snap import newest_snap
from toprope.store.objects.probing import forget_probe, leave_probe
from toprope.store.objects.protocol import ObjectStore

if TYPE_CHECKING:
    from toprope.chaos.sim.coordinator import Host
    from toprope.chaos.sim.world import Node, World

_BEAT_S = 1.5
_DAWDLES_S = 4.0
_ASK_S = 3.0
_BACK = "a person goes back"


class Reader:
    """One process that reads a checkpoint, slowly."""

    def __init__(self, world: World, number: int) -> None:
        self.process = Process(world.loop, f"reader{number}")
        self._world = world

    def start(self) -> None:
        """Begin."""
        self.process.start(self._life())

    async def _life(self) -> None:
        try:
            await self._world.loop.stepwise(self._read)
        except CkptError as error:
            self._world.trace.note(self.process.name, f"ends: {error}")
        self.process.kill()

    def _read(self) -> None:
        world, rng = self._world, self._world.loop.rng
        store, oracle, name = world.objects, world.oracle, self.process.name
        oldest = rng.random() < 0.7  # noqa: PLR2004 - what is likely to be retired soon
        chosen = 0
        without: set[int] = set()

        def choose(state: JobState) -> int:
            nonlocal chosen
            there = [seq for seq, _ in state.restorable()]
            if not there:
                raise UsageError("there is nothing to read")
            chosen = there[-1] if oldest else there[0]
            return chosen

        log = read_on(store, newest_snap(store, world.job))
        nap(rng.uniform(0.0, _DAWDLES_S))
        with holding_choice(store, log, choose, say=lambda _: without.add(chosen), beating=self._beating) as held:
            seq, holds = choose(held), chosen not in without
            world.trace.note(name, f"reads READY {seq}, {'with' if holds else 'without'} a hold")
            try:
                manifest, _ = read_manifest(store, held, seq)
                for shard in manifest.shards:
                    nap(rng.uniform(0.0, _DAWDLES_S))
                    index = read_index(store, manifest, shard)
                    image = _image(store, index, streamed=oldest)
                    if digest(image) != index.digest:
                        oracle.on_refused(name, held.readies[seq], shard.rank)
                        return
                    oracle.on_read(name, held.readies[seq], shard.rank, image)
            except MissingObjectError as error:
                oracle.on_missing(name, seq, str(error), held=holds)
                return
        world.trace.sometimes("a reader read a checkpoint")

    @contextlib.contextmanager
    def _beating(self, beat: Callable[[], None]) -> Iterator[None]:
        loop, ends = self._world.loop, False

        async def beat_on() -> None:
            while True:
                await asyncio.sleep(_BEAT_S)
                if ends:
                    return
                await loop.stepwise(beat)

        task = self.process.begun(beat_on())
        try:
            yield
        finally:
            ends = True
            while not task.done():
                nap(_BEAT_S / 4)


def _image(store: ObjectStore, index: Index, *, streamed: bool) -> bytes:
    """Return a rank's image, read as an export does, or as the staging of a restore."""
    if not streamed:
        return b"".join(image_chunks(store, index))
    image = bytearray(index.bytes)

    def write(at: int, body: memoryview) -> None:
        image[at : at + len(body)] = body

    write_image(store, index, write)
    return bytes(image)


class Command:
    """One command that changes the job; each of ``makes`` draws a change from the log as it finds it."""

    def __init__(self, world: World, number: int, *makes: Callable[[JobState], Change | None]) -> None:
        self.process = Process(world.loop, f"command{number}")
        self._world = world
        self._makes = makes

    def start(self) -> None:
        """Begin."""
        self.process.start(self._life())

    async def _life(self) -> None:
        try:
            await self._changes()
        except (CkptError, NetError) as error:
            self._world.trace.note(self.process.name, f"ends: {error}")
        self.process.kill()

    async def _changes(self) -> None:
        for make in self._makes:
            await self._change(make)

    def _read(self) -> JobState:
        store = self._world.objects
        return read_on(store, newest_snap(store, self._world.job))

    async def _change(self, make: Callable[[JobState], Change | None]) -> None:
        world, loop = self._world, self._world.loop
        state = await loop.stepwise(self._read)
        change = make(state)
        if change is not None and not await self._asked(state, change):
            work = partial(append_in_passing, world.objects, world.job, partial(_made_now, make), purpose="change")
            _, seq = await loop.stepwise(work)
            if seq is not None:
                world.trace.sometimes("a command was elected for the moment")

    async def _asked(self, state: JobState, change: Change) -> bool:
        """Ask a coordinator, if one answers; say whether it does."""
        world = self._world
        if world.loop.rng.random() < 0.4:  # noqa: PLR2004 - as when it can't be reached from here
            return False
        probe = await world.loop.stepwise(partial(leave_probe, world.objects))
        request = ChangeRequest(job_uid=state.job_uid, probe=probe, change=change)

        async def ask(host: Host) -> ChangeAnswer:
            return await host.change(request)

        try:
            answer = await world.ask_coordinator(self.process.name, state.url, ask, timeout_s=_ASK_S)
        finally:
            await world.loop.stepwise(partial(forget_probe, world.objects, probe))
        if answer.seq is not None:
            world.trace.sometimes("a coordinator changed the job")
        return True


class Rollback(Command):
    """One command that goes back to the newest READY but ``but``, or the oldest that there is, as ``ckpt rollback``."""

    def __init__(self, world: World, number: int, *, but: int) -> None:
        super().__init__(world, number)
        self._but = but

    async def _changes(self) -> None:
        world = self._world
        state = await world.loop.stepwise(self._read)
        there = state.restorable()
        if state.attempt is None or not there:
            return
        plan = plan_rollback(state, to_step=there[: self._but + 1][-1][1].step, reason=_BACK)
        for taint in plan.taints:
            await self._change(partial(_whatever, taint))
        uid = secrets.token_hex(16)

        def opened(state: JobState) -> Change | None:
            facts = state.attempt.facts_sha256 if state.attempt is not None else ""
            return opened_for_nobody(state, plan, uid=uid, facts_sha256=facts, reason=_BACK)

        await self._change(opened)


class Operator:
    """Somebody who sees that a node is off, and tells the coordinator that leads."""

    def __init__(self, world: World, number: int, node: Node) -> None:
        self.process = Process(world.loop, f"operator{number}")
        self._world = world
        self._node = node

    def start(self) -> None:
        """Begin."""
        self.process.start(self._life())

    async def _life(self) -> None:
        world, node = self._world, self._node
        if not node.up:
            with contextlib.suppress(NetError):
                await world.ask_coordinator(
                    self.process.name, "", lambda host: host.declare_dead(node.name), timeout_s=_ASK_S
                )
                world.trace.sometimes("a node was declared dead")
                world.trace.note(self.process.name, f"declares {node.name} dead")
        self.process.kill()


def _made_now(make: Callable[[JobState], Change | None], state: JobState) -> Change | None:
    change = make(state)
    return None if change is None else checked(state, change)


def _whatever(change: Change, _state: JobState) -> Change:
    return change


def pin(state: JobState) -> Change | None:
    """Pin the oldest READY, or let go the one that is pinned."""
    if state.pins:
        return Unpin(seq=min(state.pins))
    return Pin(seq=state.live[0]) if state.live else None


def measure(state: JobState) -> Change | None:
    """Say what the newest READY is worth."""
    return Metric(seq=state.live[-1], name="val_loss", value=float(state.n)) if state.live else None


def retire(state: JobState) -> Change | None:
    """Retire by hand the READY that is oldest and not the newest; it may be needed, and then this is refused."""
    return Retire(seqs=(state.live[0],)) if len(state.live) > 1 else None


def taint(state: JobState) -> Change | None:
    """Taint the newest READY, unless nothing is left then."""
    restorable = state.restorable()
    if len(restorable) < 2:  # noqa: PLR2004 - one to taint and one to go back to
        return None
    ready = restorable[0][1]
    return Taint(attempt=ready.attempt, from_step=ready.step, to_step=ready.step, reason="a person does not like it")
