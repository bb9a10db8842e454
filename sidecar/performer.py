"""Does what the core wants done, and tells it what came of it. One loop, one core, calls to it never overlap."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections import defaultdict
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

from toprope.coordinator.serving import told
from toprope.coordinator.wire import OpenAnswer, Provisional
from toprope.sidecar import effects as do
from toprope.sidecar import events as on
from toprope.sidecar import metrics
from toprope.sidecar.adapters.http import Copies
from toprope.sidecar.adapters.trainer_socket import TrainerSocket
from toprope.sidecar.adoptions import AdoptionFiles
from toprope.sidecar.config import SidecarConfig
from toprope.sidecar.core import Core
from toprope.sidecar.documents import Documents
from toprope.sidecar.draining import left_to_do
from toprope.sidecar.effects import Effect
from toprope.sidecar.events import Event
from toprope.sidecar.local_tier import LocalError, LocalTier
from toprope.sidecar.memory import DroppedError, Memory, NoRoomError
from toprope.sidecar.object_tier import DamagedError, ObjectTier, read_back
from toprope.sidecar.ports import CoordinatorError, PeerError, Ports
from toprope.sidecar.pulling import Puller, WrongBytesError
from toprope.sidecar.scrub import Scrub
from toprope.sidecar.shouts import Shouts
from toprope.sidecar.staging import Stager, StagingError
from toprope.sidecar.threads import Threads
from toprope.sidecar.values import Lying, Way
from toprope.store.errors import CkptError
from toprope.trainer_hooks.link import wire

TICK_S = 0.25
CANCEL_AGAIN_S = 0.5
WATCH_RETRY_S = 0.5
ROOM_EVERY_S = 10.0

log = logging.getLogger("toprope.sidecar")


@dataclass(slots=True, kw_only=True)
class Parts:
    """What a running sidecar consists of."""

    core: Core
    memory: Memory
    local: LocalTier
    adoptions: AdoptionFiles
    ports: Ports


class Sidecar:
    """The runtime of one sidecar."""

    def __init__(self, config: SidecarConfig, parts: Parts, tasks: asyncio.TaskGroup) -> None:
        self.config = config
        self.socket = TrainerSocket(config.socket, on_frame=self._on_frame, on_closed=self._on_closed)
        self.stop = asyncio.Event()
        self.refusal: str | None = None
        self._parts = parts
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._shouts = Shouts()
        self._threads = Threads(nice=config.nice, cpus=config.cpus)
        self._threads.serve_loop()
        self._followers: dict[str, tuple[str, asyncio.Task[None]]] = {}
        self._scan: asyncio.Task[None] | None = None
        self._page_turns: defaultdict[tuple[int, int], asyncio.Lock] = defaultdict(asyncio.Lock)
        self._freeing = asyncio.Lock()
        self._ending = False
        self._drain_until_s: float | None = None
        ports = parts.ports
        self._objects = ObjectTier(ports.objects, config.job, codec=config.codec)
        self._puller = Puller(parts.memory, ports)
        self._stager = Stager(memory=parts.memory, peers=ports.peers, objects=ports.objects, doubt=self._doubt)
        self.documents = Documents(
            parts.core, coordinator=ports.coordinator, broker=ports.broker, post=self.post, shouts=self._shouts
        )

    # Events in, effects out

    def post(self, event: Event) -> None:
        """Tell the core, and begin what it wants done. A core that fails ends the process, whoever told it."""
        for effect in told(self._parts.core.handle, event, tasks=self._tasks):
            if not self._ending:
                self._begin(effect)

    def _begin(self, effect: Effect) -> None:
        """Do at once what takes no time; start a task for the rest."""
        match effect:
            case do.Send():
                self.socket.send(effect.connection, effect.frame)
            case do.Hangup():
                self.socket.hang_up(effect.connection)
            case do.Shout():
                self._shouts.shout(effect.what, effect.text)
            case do.Publish():
                self.documents.on_publish(effect.inventory)
            case do.Follow():
                self._follow(dict(effect.owners))
            case do.Exit():
                self.refusal = effect.reason
                self.stop.set()
            case _:
                task = self._start(self._perform(effect))
                assert not task.done()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._tasks.create_task(work)

    async def _perform(self, effect: do.Lasting) -> None:
        memory = self._parts.memory
        match effect:
            case do.MakeSlots():
                async with self._freeing:
                    pass  # what is given up makes room for these: all of it that was wanted before is gone now
                await self._make_slots(effect)
            case do.RemoveSlots():
                async with self._freeing:
                    await self._threads.run("slots", memory.remove_slots, effect.rank, effect.slots)
            case do.RemoveSpares():
                async with self._freeing:
                    await self._threads.run("slots", memory.remove_spares, effect.rank, effect.spares)
            case do.LookAtSlots():
                await self._look(effect.rank, known=effect.known)
            case do.GrantSlot():
                async with self._page_turns[effect.page.rank, effect.slot]:
                    await self._grant(effect)
            case do.EmptySlot():
                async with self._page_turns[effect.page.rank, effect.slot]:
                    await self._threads.run("slots", memory.empty, effect.slot, effect.page)
            case do.HashSlot():
                await self._hash(effect)
            case do.DropStage():
                async with self._freeing:
                    await self._threads.run("slots", memory.drop_staged, keep=effect.keep)
            case _:
                await self._perform_far(effect)

    async def _perform_far(self, effect: do.Far) -> None:  # noqa: C901 - one case per kind of effect
        """Do what goes beyond this node's memory."""
        match effect:
            case do.StoreLocal():
                await self._store_local(effect)
            case do.StoreObject():
                await self._store_object(effect)
            case do.DropLocal():
                if kept := await self._threads.run("disk", self._parts.local.drop, Path(effect.path)):
                    self._shouts.shout("local-failed", kept)
            case do.Pull():
                await self._pull(effect)
            case do.Stage():
                await self._stage(effect)
            case do.ReadObjectBack():
                await self._read_back(effect)
            case do.OpenAttempt():
                await self._open(effect)
            case do.Adopt():
                await self._adopt(effect)
            case do.FetchDesired():
                await self.documents.fetch()
            case _:
                assert_never(effect)

    # Slots

    async def _make_slots(self, effect: do.MakeSlots) -> None:
        try:
            await self._threads.run("slots", self._parts.memory.make_slots, effect.rank, effect.slots, effect.bytes)
        except (NoRoomError, OSError) as error:
            room = await self._threads.run("slots", self._parts.memory.room)
            self.post(on.SlotsRefused(rank=effect.rank, reason=str(error), room=room))
            return
        log.info("rank %d: %d slots of %d bytes made", effect.rank, len(effect.slots), effect.bytes)
        await self._look(effect.rank, made=True)

    async def _look(self, rank: int, *, known: tuple[int, ...] = (), made: bool = False) -> None:
        sights = await self._threads.run("slots", self._parts.memory.look, rank, known=known)
        self.post(on.SlotsSeen(rank=rank, sights=sights, made=made))

    async def _grant(self, effect: do.GrantSlot) -> None:
        page = effect.page
        lend = functools.partial(self._parts.memory.lend, effect.slot, page, check_lock=effect.check_lock)
        try:
            holder = await self._threads.run("slots", lend)
        except FileNotFoundError:
            self.post(on.SlotGone(rank=page.rank, slot=effect.slot, seq=page.seq))
            return
        if holder is not None:
            self.post(on.SlotHeld(rank=page.rank, slot=effect.slot, seq=page.seq, launch_id=holder))
            return
        paths = self._parts.memory.slot(page.rank, effect.slot)
        frame = wire.Slot(
            slot=effect.slot,
            seq=page.seq,
            path=str(paths.data),
            page_path=str(paths.page),
            lock_path=str(paths.lock),
            bytes=effect.capacity,
        )
        self.socket.send(effect.connection, frame)

    async def _hash(self, effect: do.HashSlot) -> None:
        memory = self._parts.memory
        work = functools.partial(memory.hash_slot, effect.rank, effect.slot, seq=effect.seq)
        if effect.digest:
            work = functools.partial(memory.check_slot, effect.rank, effect.slot, seq=effect.seq, digest=effect.digest)
        try:
            shard = await self._threads.run("hash", work)
        except (DroppedError, OSError) as error:
            dropped = on.SlotDropped(rank=effect.rank, slot=effect.slot, seq=effect.seq, reason=str(error))
            self.post(dropped)
            return
        metrics.SNAPSHOTS.labels(rank=str(effect.rank)).inc()
        self.post(on.SlotHashed(slot=effect.slot, seq=effect.seq, shard=shard))

    # Tiers

    def _image(self, rank: int, slot: int, size: int) -> memoryview:
        return self._parts.memory.view(self._parts.memory.slot(rank, slot).data)[:size]

    async def _store_local(self, effect: do.StoreLocal) -> None:
        shard = effect.shard
        image = self._image(shard.rank, effect.slot, shard.bytes)
        nonces = (os.urandom(8).hex(), os.urandom(8).hex())
        with metrics.STORE_SECONDS.labels(tier="local").time():
            try:
                path = await self._threads.run("disk", self._parts.local.store, shard, image, nonces=nonces)
            except LocalError as error:
                self.post(
                    on.StoreFailed(
                        tier="local",
                        shard=shard,
                        slot=effect.slot,
                        reason=str(error),
                        damaged=error.damaged,
                        quarantine=error.quarantine,
                        no_room=error.no_room,
                    )
                )
                return
        metrics.STORED_BYTES.labels(tier="local").inc(shard.bytes)
        self.post(on.LocalStored(shard=shard, path=str(path), slot=effect.slot))

    async def _store_object(self, effect: do.StoreObject) -> None:
        shard = effect.shard
        image = self._image(shard.rank, effect.slot, shard.bytes)
        store = functools.partial(self._objects.put, shard, image, nonce=os.urandom(16).hex())
        with metrics.STORE_SECONDS.labels(tier="object").time():
            try:
                receipt = await self._threads.run("store", store)
            except (CkptError, DamagedError) as error:
                self.post(
                    on.StoreFailed(
                        tier="object",
                        shard=shard,
                        slot=effect.slot,
                        reason=str(error),
                        damaged=isinstance(error, DamagedError),
                    )
                )
                return
        metrics.STORED_BYTES.labels(tier="object").inc(receipt.stored_bytes)
        self.post(on.ObjectStored(slot=effect.slot, receipt=receipt))

    async def _read_back(self, effect: do.ReadObjectBack) -> None:
        try:
            result = await self._threads.run("store", read_back, self._parts.ports.objects, effect.task)
        except CkptError as error:
            self._shouts.shout("read-back-failed", f"{effect.task.key}: {error}")
            await asyncio.sleep(WATCH_RETRY_S)
            self.post(on.ReadBackFailed(key=effect.task.key))
            return
        self.post(on.ReadBackDone(result=result))

    # Peers

    def _follow(self, owners: dict[str, str]) -> None:
        for node, (url, task) in list(self._followers.items()):
            if owners.get(node) != url:
                task.cancel()
                del self._followers[node]
        for node, url in sorted(owners.items()):
            if node not in self._followers:
                self._followers[node] = (url, self._start(self._watch(node, url)))

    async def _watch(self, node: str, url: str) -> None:
        """Report the inventory of an owner whenever it has changed, for as long as it is followed."""
        after = 0
        while True:
            try:
                inventory = await self._parts.ports.peers.watch(url, after=after)
            except PeerError as error:
                self._shouts.shout("owner-away", f"{node} can't be asked what to copy: {error}")
                await asyncio.sleep(WATCH_RETRY_S)
                continue
            after = inventory.version
            if inventory.node == node and inventory.job == self.config.job:
                self.post(on.OwnerSeen(inventory=inventory))

    async def _pull(self, effect: do.Pull) -> None:
        with metrics.STORE_SECONDS.labels(tier="peer").time():
            try:
                received = await self._threads.run("peers", self._puller.pull, effect)
            except WrongBytesError as error:
                self.post(on.PullFailed(shard=effect.shard, spare=effect.spare, reason=str(error)))
                await self._acknowledge(effect, error.found)
                return
            except (PeerError, NoRoomError, OSError) as error:
                no_room = isinstance(error, NoRoomError)
                failed = on.PullFailed(shard=effect.shard, spare=effect.spare, reason=str(error), no_room=no_room)
                self.post(failed)
                return
        metrics.RECEIVED_BYTES.inc(received)
        metrics.STORED_BYTES.labels(tier="peer").inc(effect.shard.bytes)
        self.post(on.Pulled(shard=effect.shard, spare=effect.spare))
        await self._acknowledge(effect, effect.shard.digest)

    async def _acknowledge(self, effect: do.Pull, digest: str) -> None:
        shard = effect.shard
        url = f"{effect.url}/v1/copies/{shard.attempt_uid}/{shard.step}/{shard.rank}/ack"
        try:
            await self._parts.ports.peers.acknowledge(url, digest=digest)
        except PeerError as error:
            self._shouts.shout("ack-failed", str(error))

    # Restore

    async def _stage(self, effect: do.Stage) -> None:
        try:
            staged = await self._threads.run("slots", self._stager.stage, effect)
        except (StagingError, OSError) as error:
            again = isinstance(error, StagingError) and error.again
            failed = on.StageFailed(
                attempt_uid=effect.attempt_uid, rank=effect.shard.rank, reason=str(error), again=again
            )
            self.post(failed)
            return
        self.post(staged)

    async def _open(self, effect: do.OpenAttempt) -> None:
        try:
            answer = await self._parts.ports.coordinator.open_attempt(effect.request)
        except CoordinatorError as error:
            answer = OpenAnswer(code="unavailable", text=str(error))
        self.post(on.OpenAnswered(connection=effect.connection, answer=answer))

    async def _adopt(self, effect: do.Adopt) -> None:
        files = self._parts.adoptions
        try:
            await self._threads.run("disk", files.write, effect.proposed, nonce=os.urandom(8).hex())
            for number in effect.forget:
                await self._threads.run("disk", files.forget, number)
        except OSError as error:
            self.post(on.AdoptFailed(reason=f"{self.config.job_local}: {error.strerror}"))
            return
        proposed = effect.proposed
        log.warning("adopted attempt %d (%s) while the job log can't be reached", proposed.number, proposed.uid[:8])
        self.post(on.Adopted(adopted=proposed, forgotten=effect.forget))

    def endless(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """Return the work that goes on until the end."""
        scrub = Scrub(
            listed=self._parts.core.lying,
            view=self._parts.memory.view,
            doubt=self._on_damaged,
            threads=self._threads,
            bytes_per_s=self.config.scrub_bytes_per_s,
        )
        return self.tick(), scrub.run(), self.watch_room(), *self.documents.loops()

    def drain(self) -> None:
        """End as soon as all is safe elsewhere, or the grace is over; told twice, end now."""
        if self._drain_until_s is not None or self.config.grace_s == 0.0:
            self.stop.set()
            return
        self._drain_until_s = self._loop.time() + self.config.grace_s
        self.documents.hurry()
        log.info("told to end: it serves for %g s at most, until what is here is safe elsewhere", self.config.grace_s)

    def _look_at_grace(self, until_s: float) -> None:
        core = self._parts.core
        left = left_to_do(
            self.config.node, core.desired, slots=core.slots, tiers=core.tiers, conversation=core.conversation
        )
        if not left and self.documents.is_untold():
            left = "what it holds was not told to the coordinator yet"
        if not left:
            log.info("ends: nothing is left to save")
            self.stop.set()
        elif self._loop.time() >= until_s:
            log.warning("ends, for its grace of %g s is over: %s", self.config.grace_s, left)
            self.stop.set()

    async def watch_room(self) -> None:
        """Tell the core now and then how much room memory and disk have."""
        while True:
            self.post(on.MemorySeen(free=await self._threads.run("slots", self._parts.memory.free)))
            try:
                free = await self._threads.run("disk", self._parts.local.free_bytes)
            except OSError as error:
                self._shouts.shout("local-failed", f"{self.config.job_local}: {error.strerror}")
            else:
                self.post(on.DiskSeen(free=free))
            await asyncio.sleep(ROOM_EVERY_S)

    async def tick(self) -> None:
        """Let time pass in the core."""
        while True:
            self.post(on.Tick(now_s=self._loop.time()))
            if self._drain_until_s is not None:
                self._look_at_grace(self._drain_until_s)
            await asyncio.sleep(TICK_S)

    # Trainers and readers

    def _on_frame(self, connection: int, frame: wire.FromHook) -> None:
        self.post(on.FrameArrived(connection=connection, frame=frame))
        metrics.TRAINERS.set(len(self._parts.core.conversation.trainers))

    def _on_closed(self, connection: int) -> None:
        if not self.stop.is_set():
            self.post(on.ConnectionClosed(connection=connection))
            metrics.TRAINERS.set(len(self._parts.core.conversation.trainers))

    def adopted(self) -> tuple[Provisional, ...]:
        """Return the attempts that are adopted here and that are not in the log yet, as far as is known."""
        core = self._parts.core
        return () if core.desired is None else core.adoptions.standing(core.desired)

    def copies(self) -> Copies:
        """Return what the HTTP server may ask and tell."""
        return Copies(
            locate=self._parts.core.locate,
            view=lambda path: self._threads.run("slots", self._parts.memory.view, path),
            began=lambda serve, uid, step, rank: self.post(
                on.ServeBegan(serve=serve, attempt_uid=uid, step=step, rank=rank)
            ),
            ended=lambda serve: self.post(on.ServeEnded(serve=serve)),
            acked=lambda holder, uid, step, rank, digest: self.post(
                on.Acked(holder=holder, attempt_uid=uid, step=step, rank=rank, digest=digest)
            ),
        )

    # Start

    async def adopt(self) -> None:
        """Take in what an earlier life has left: slots and peer copies at once, the local tier as it is read."""
        memory = self._parts.memory
        await self._threads.run("slots", functools.partial(memory.drop_staged, keep=""))
        for kept in await self._threads.run("disk", self._parts.local.sweep):
            self._shouts.shout("local-failed", kept)
        self.post(await self._threads.run("disk", self._parts.adoptions.read))
        for rank in memory.slot_ranks():
            await self._look(rank)
        for rank, number in memory.spares():
            try:
                shard = await self._threads.run("slots", memory.check_spare, rank, number)
            except (DroppedError, OSError) as error:
                log.info("peer copy of rank %d, spare %d: %s", rank, number, error)
            else:
                self.post(on.SpareSeen(rank=rank, spare=number, shard=shard))
        self._scan = self._start(self._scan_local())

    async def _scan_local(self) -> None:
        found = self._parts.local.scan()
        while (item := await self._threads.run("disk", lambda: next(found, None))) is not None:
            if isinstance(item, str):
                self._shouts.shout("local-damaged", item)
            else:
                shard, path, job_uid = item
                self.post(on.LocalStored(shard=shard, path=str(path), slot=None, job_uid=job_uid))
        self.post(on.LeftoversRead())

    def _on_damaged(self, lying: Lying) -> None:
        """Take in that the scrub found a copy damaged."""
        shard = lying.shard
        doubted = on.CopyDoubted(attempt_uid=shard.attempt_uid, step=shard.step, rank=shard.rank, tier=lying.way.tier)
        self.post(doubted)

    def _doubt(self, request: do.Stage, way: Way) -> None:
        """Learn, from a thread, that a copy of this node was found to be wrong."""
        event = on.CopyDoubted(
            attempt_uid=request.source_attempt_uid, step=request.step, rank=request.shard.rank, tier=way.tier
        )
        self._loop.call_soon_threadsafe(self.post, event)

    async def end(self, running: list[asyncio.Task[None]]) -> None:
        """End what would go on for ever; what is being stored is finished, and nothing more is begun.

        Cancelled again until it has ended: in Python 3.11 ``wait_for``, which the MQTT client uses, loses a
        cancellation that comes at the moment of its result.
        """
        self._ending = True
        pending = {*running, *(task for _, task in self._followers.values())}
        while pending:
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)

    def close(self) -> None:
        """End the threads; what they are at ends first."""
        self._threads.close()
