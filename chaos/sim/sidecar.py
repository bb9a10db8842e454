"""Sidecars: the real core, ``Documents``, ``LocalTier``, ``ObjectTier`` and ``read_back``; a simulated performer.

The real performer is tied to a Unix socket, an HTTP server, threads and mapped files. This one does the same effects
in the same order against the simulated node: copying and hashing take two halves, with time between them. What only
the real one does is not covered here.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, assert_never

import msgspec

from toprope.chaos.sim.broker import BrokerClient
from toprope.chaos.sim.copies import WrongError, place_of
from toprope.chaos.sim.disk import DiedError
from toprope.chaos.sim.fetching import Fetching
from toprope.chaos.sim.loop import Process
from toprope.chaos.sim.memory import slot_path, spare_path
from toprope.chaos.sim.net import NetError
from toprope.chaos.sim.serving import Serving
from toprope.chaos.sim.sidecar_ports import POLL_S, Coordinators, Link, SimShouts
from toprope.chaos.sim.slots import Slots
from toprope.chaos.sim.threads import Turnstile, nap
from toprope.coordinator.wire import Desired, Inventory, OpenAnswer, OpenRequest, Presence, Provisional
from toprope.sidecar import effects as do
from toprope.sidecar import events as on
from toprope.sidecar.adoptions import AdoptionFiles
from toprope.sidecar.core import Core
from toprope.sidecar.documents import Documents
from toprope.sidecar.effects import Effect
from toprope.sidecar.events import Event
from toprope.sidecar.local_tier import LocalError, LocalTier
from toprope.sidecar.object_tier import DamagedError, ObjectTier, read_back
from toprope.sidecar.ports import CoordinatorError
from toprope.sidecar.siblings import Siblings
from toprope.sidecar.values import Identity, shard_of_page
from toprope.store.errors import CkptError, CorruptObjectError
from toprope.trainer_hooks.link import wire
from toprope.trainer_hooks.link.slot import SlotState

if TYPE_CHECKING:
    from toprope.chaos.sim.trainer import Connection
    from toprope.chaos.sim.world import Node, World

T = TypeVar("T")
TICK_S = 1.0
USE_DEADLINE_S = 5.0
_RETRY_S = 0.5


def _wait(event: threading.Event) -> None:
    """Wait for another thread of the history."""
    while not event.is_set():
        nap(0.05)


class SimSidecar:
    """One sidecar process on a node."""

    def __init__(self, world: World, node: Node, life: int) -> None:
        self.world = world
        self.node = node
        self.url = f"http://{node.name}:{life}"
        self.process = Process(world.loop, node.name)
        self.label = f"{node.name}.{life}"
        incarnation = world.loop.rng.randbytes(16).hex()
        self.core = Core(
            me=Identity(
                job=world.job,
                node=node.name,
                boot_id=node.memory.boot_id,
                incarnation=incarnation,
                url=self.url,
                domain={"node": node.name},
                use_deadline_s=USE_DEADLINE_S,
                slot_path=slot_path,
                spare_path=spare_path,
            )
        )
        presence = Presence(node=node.name, boot_id=node.memory.boot_id, incarnation=incarnation, alive=False)
        self._broker = BrokerClient(
            broker=world.broker,
            process=self.process,
            where=node.name,
            wants=(Desired,),
            on_document=self._on_document,
            on_connected=self._on_connected,
            will=(f"presence/{node.name}", presence),
        )
        self.memory = node.memory
        self._local = LocalTier(node.disk.root, node.disk)
        self._adoptions = AdoptionFiles(node.disk.root, node.disk)
        siblings = Siblings(shared_bytes=1, wait=_wait)
        self._objects = ObjectTier(world.objects, world.job, codec="none", siblings=siblings)
        self._objects._mutex = Turnstile()  # type: ignore[assignment]  # noqa: SLF001 - threads of a history wait by it
        self._connections: dict[int, Connection] = {}
        self._shouts = SimShouts(world, node.name)
        self._link = Link(self._broker)
        self._coordinators = Coordinators(self)
        self._documents = Documents(
            self.core, coordinator=self._coordinators, broker=self._link, post=self.post, shouts=self._shouts
        )
        self._turns: defaultdict[tuple[int, int], asyncio.Lock] = defaultdict(asyncio.Lock)
        self._followers: dict[str, tuple[str, asyncio.Task[object]]] = {}
        self.slots, self.serving, self.fetching = Slots(self), Serving(self), Fetching(self)

    # Life

    def start(self) -> None:
        """Begin."""
        self.process.start(self._main())

    async def _main(self) -> None:
        self.memory.staged.clear()
        for kept in self._local.sweep():
            self._shouts.shout("local-failed", kept)
        adoptions = self._adoptions.read()
        for adopted in adoptions.found:
            self.world.oracle.on_adopted(self.node.name, self.node.disk, adopted)
        self.post(adoptions)
        for rank in self.memory.ranks():
            await self.slots.look(rank)
        for (rank, number), file in sorted(self.memory.spares.items()):
            with contextlib.suppress(WrongError):
                if file.page.state is not SlotState.HASHED or self.slots.digest(file) != file.page.digest:
                    raise WrongError("no whole copy")
                self.post(on.SpareSeen(rank=rank, spare=number, shard=shard_of_page(file.page)))
        self.process.start(self._scan())
        if self.world.options.broker:
            self.process.start(self._broker.run())
        for loop in self._documents.loops():
            self.process.start(loop)
        while True:
            self.post(on.Tick(now_s=self.world.loop.time()))
            await asyncio.sleep(TICK_S)

    async def _scan(self) -> None:
        await self.pause(0.05)
        damaged_before = frozenset(self.node.disk.flipped)
        for item in list(self._local.scan()):
            if isinstance(item, str):
                self.world.trace.sometimes("a scan refused a local file")
                continue
            shard, path, job_uid = item
            self.world.oracle.on_scanned(
                f"disk of {self.node.name}",
                (shard.attempt_uid, shard.step, shard.rank),
                found=self.node.local_bytes(path.name),
                spoiled=path.name in self.node.disk.flipped - damaged_before,
            )
            self.post(on.LocalStored(shard=shard, path=str(path), slot=None, job_uid=job_uid))
        self.post(on.LeftoversRead())

    async def pause(self, at_most_s: float) -> None:
        """Let some time go by, now and then much of it."""
        rng = self.world.loop.rng
        slow = 20.0 if not self.world.net.calm and rng.random() < 0.03 else 1.0  # noqa: PLR2004 - now and then
        await asyncio.sleep(rng.uniform(0.0, at_most_s) * slow)

    # Events and effects

    def post(self, event: Event) -> None:
        """Tell the core, and begin what it wants done."""
        for effect in self.core.handle(event):
            self._begin(effect)
        if isinstance(event, on.DesiredArrived) and self.core.desired is not None:
            self.world.oracle.on_heard(self.label, self.core.desired, said=event.desired)

    def _begin(self, effect: Effect) -> None:
        match effect:
            case do.Send():
                self.send(effect.connection, effect.frame)
            case do.Hangup():
                if (connection := self._connections.pop(effect.connection, None)) is not None:
                    connection.hang_up()
            case do.Shout():
                self._shouts.shout(effect.what, effect.text)
            case do.Publish():
                self._on_publish(effect.inventory)
            case do.Follow():
                self._follow(dict(effect.owners))
            case do.Exit():
                self.world.trace.note(self.node.name, f"is not wanted: {effect.reason}")
                self.process.kill()
            case _:
                self.process.start(self._perform(effect))

    async def _perform(self, effect: do.Lasting) -> None:  # noqa: C901, PLR0912, PLR0915 - one line per kind of effect
        match effect:
            case do.MakeSlots():
                await self.slots.make(effect)
            case do.RemoveSlots():
                for number in effect.slots:
                    self.memory.slots.pop((effect.rank, number), None)
            case do.RemoveSpares():
                for number in effect.spares:
                    self.memory.spares.pop((effect.rank, number), None)
            case do.LookAtSlots():
                await self.slots.look(effect.rank)
            case do.GrantSlot():
                async with self._turns[effect.page.rank, effect.slot]:
                    await self.slots.grant(effect)
            case do.EmptySlot():
                async with self._turns[effect.page.rank, effect.slot]:
                    await self.pause(0.005)
                    if (file := self.memory.slots.get((effect.page.rank, effect.slot))) is not None:
                        file.page = effect.page
            case do.HashSlot():
                await self.slots.hash(effect)
            case do.DropStage():
                for uid, rank in [key for key in self.memory.staged if key[0] != effect.keep]:
                    del self.memory.staged[uid, rank]
            case do.StoreLocal():
                await self._store_local(effect)
            case do.StoreObject():
                await self._store_object(effect)
            case do.DropLocal():
                await self._drop_local(Path(effect.path).name)
            case do.Pull():
                await self.fetching.pull(effect)
            case do.Stage():
                await self.fetching.stage(effect)
            case do.ReadObjectBack():
                await self._read_back(effect)
            case do.OpenAttempt():
                await self._open(effect)
            case do.Adopt():
                await self._adopt(effect)
            case do.FetchDesired():
                await self._documents.fetch()
            case _:
                assert_never(effect)

    async def bulk(self, work: Callable[[], T]) -> T:
        """Do what blocks."""
        return await self.world.loop.run_in_executor(None, work)

    # Tiers

    def _image(self, rank: int, slot: int, size: int) -> memoryview:
        file = self.memory.slots.get((rank, slot))
        return memoryview(bytes(file.data[:size]) if file is not None else b"")

    async def _store_local(self, effect: do.StoreLocal) -> None:
        shard, rng = effect.shard, self.world.loop.rng
        nonces = (rng.randbytes(8).hex(), rng.randbytes(8).hex())
        await self.pause(0.05)
        try:
            with self.world.trace.phase("local write", place_of(shard)):
                await asyncio.sleep(self.node.disk.slow_s)
                path = await self.bulk(
                    lambda: self._local.store(shard, self._image(shard.rank, effect.slot, shard.bytes), nonces=nonces)
                )
        except LocalError as error:
            failed = on.StoreFailed(
                tier="local",
                shard=shard,
                slot=effect.slot,
                reason=str(error),
                damaged=error.damaged,
                quarantine=error.quarantine,
                no_room=error.no_room,
            )
            self.post(failed)
        except DiedError:
            return
        else:
            self.post(on.LocalStored(shard=shard, path=str(path), slot=effect.slot))

    async def _drop_local(self, name: str) -> None:
        if kept := await self.bulk(lambda: self._local.drop(self.node.disk.root / name)):
            self._shouts.shout("local-failed", kept)

    async def _store_object(self, effect: do.StoreObject) -> None:
        shard = effect.shard
        nonce = self.world.loop.rng.randbytes(16).hex()
        await self.pause(0.2)
        try:
            with self.world.trace.phase("object upload", place_of(shard)):
                receipt = await self.world.loop.stepwise(
                    lambda: self._objects.put(shard, self._image(shard.rank, effect.slot, shard.bytes), nonce=nonce)
                )
        except (CkptError, DamagedError) as error:
            damaged = isinstance(error, DamagedError | CorruptObjectError)
            self.post(on.StoreFailed(tier="object", shard=shard, slot=effect.slot, reason=str(error), damaged=damaged))
            return
        if receipt.rests_on:
            self.world.trace.sometimes("a shard named another rank's file of its step")
        self.post(on.ObjectStored(slot=effect.slot, receipt=receipt))

    async def _read_back(self, effect: do.ReadObjectBack) -> None:
        try:
            result = await self.bulk(lambda: read_back(self.world.objects, effect.task))
        except CkptError:
            await asyncio.sleep(_RETRY_S)
            self.post(on.ReadBackFailed(key=effect.task.key))
            return
        if not result.ok:
            self.world.trace.sometimes("a read-back found damage")
        self.post(on.ReadBackDone(result=result))

    # Peers

    def _follow(self, owners: dict[str, str]) -> None:
        for node, (url, task) in list(self._followers.items()):
            if owners.get(node) != url:
                task.cancel()
                del self._followers[node]
        for node, url in sorted(owners.items()):
            if node not in self._followers:
                self._followers[node] = (url, self.process.begun(self._watch(node, url)))

    async def _watch(self, node: str, url: str) -> None:
        after = 0
        while True:
            try:
                inventory = await self.world.ask_sidecar(self.node.name, url, _held(after), timeout_s=POLL_S + 2.0)
            except NetError:
                await asyncio.sleep(_RETRY_S)
                continue
            after = inventory.version
            if inventory.node == node:
                self.post(on.OwnerSeen(inventory=inventory))

    async def _adopt(self, effect: do.Adopt) -> None:
        nonce = self.world.loop.rng.randbytes(8).hex()
        await self.pause(0.05 + self.node.disk.slow_s)
        try:
            await self.bulk(lambda: self._adoptions.write(effect.proposed, nonce=nonce))
            for number in effect.forget:
                await self.bulk(partial(self._adoptions.forget, number))
        except OSError as error:
            self.post(on.AdoptFailed(reason=str(error)))
        except DiedError:
            return
        else:
            self.world.oracle.on_adopted(self.node.name, self.node.disk, effect.proposed)
            if self.node.name in self.world.net.lags_s and self.world.standing_by() > 1:
                self.world.trace.sometimes("a slow node adopted an attempt while two coordinators stood by")
            self.post(on.Adopted(adopted=effect.proposed, forgotten=effect.forget))

    # What other processes ask by HTTP

    async def adopted(self) -> tuple[Provisional, ...]:
        """Return the attempts that are adopted here and that are not in the log yet."""
        return () if self.core.desired is None else self.core.adoptions.standing(self.core.desired)

    async def inventory_now(self) -> Inventory:
        """Return what is held now."""
        if self.core.published is None:
            raise NetError("503: not told yet which job this is")
        return self.core.published

    async def inventory_after(self, after: int) -> Inventory:
        """Return what is held once it is not version ``after``."""
        await self._documents.inventory_after(after, POLL_S)
        return await self.inventory_now()

    async def _open(self, effect: do.OpenAttempt) -> None:
        request: OpenRequest = effect.request
        try:
            answer = await self._coordinators.open_attempt(request)
        except CoordinatorError as error:
            answer = OpenAnswer(code="unavailable", text=str(error))
        self.post(on.OpenAnswered(connection=effect.connection, answer=answer))

    # Documents

    def _on_publish(self, inventory: Inventory) -> None:
        for copy in inventory.copies:
            found, spoiled = self.node.copy_bytes(copy)
            self.world.oracle.on_claim(
                f"{self.node.name}'s inventory, tier {copy.tier},",
                (copy.attempt_uid, copy.step, copy.rank),
                said=copy.digest,
                found=found,
                spoiled=spoiled,
            )
        self._documents.on_publish(inventory)

    def _on_document(self, document: msgspec.Struct) -> None:
        assert isinstance(document, Desired)
        self._documents.take_desired(document)

    def _on_connected(self) -> None:
        self.process.start(self._publish_anew())

    async def _publish_anew(self) -> None:
        if self.core.published is not None:
            await self._link.publish_inventory(self.core.published)

    # Trainers

    def send(self, connection: int, frame: wire.FromSidecar) -> None:
        """Send a frame to a trainer that is still there."""
        if (found := self._connections.get(connection)) is not None:
            found.to_trainer(frame)

    def accept(self, connection: Connection) -> None:
        """Take a trainer's connection."""
        self._connections[connection.number] = connection

    def frame(self, number: int, frame: wire.FromHook) -> None:
        """Take a frame."""
        if number in self._connections:
            self.post(on.FrameArrived(connection=number, frame=frame))

    def closed(self, number: int) -> None:
        """Take in that a connection is gone."""
        self._connections.pop(number, None)
        self.post(on.ConnectionClosed(connection=number))


def _held(after: int) -> Callable[[SimSidecar], Coroutine[object, object, Inventory]]:
    return lambda car: car.inventory_after(after)
