"""Sidecars: the real core, ``Documents``, ``LocalTier``, ``ObjectTier`` and ``read_back``; a simulated performer.

The real performer is tied to a Unix socket, an HTTP server, threads and mapped files. This one does the same effects
in the same order against the simulated node: copying and hashing take two halves, with time between them. What only
the real one does is not covered here.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, assert_never

import msgspec

from toprope.chaos.sim.broker import BrokerClient
from toprope.chaos.sim.disk import DiedError
from toprope.chaos.sim.loop import Process
from toprope.chaos.sim.memory import File, slot_path, spare_path, stage_path
from toprope.chaos.sim.net import NetError
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
from toprope.sidecar.shouts import Shouts
from toprope.sidecar.siblings import Siblings
from toprope.sidecar.values import Identity, Shard, Way, shard_of_page
from toprope.store.checkpoint.files import write_image
from toprope.store.checkpoint.ready import read_index_at
from toprope.store.checkpoint.shard import identity_of, parse_header
from toprope.store.digest import digest
from toprope.store.errors import CkptError, CorruptObjectError, UnavailableError
from toprope.store.names import Key
from toprope.trainer_hooks.link import wire
from toprope.trainer_hooks.link.slot import Page, SlotState

if TYPE_CHECKING:
    from toprope.chaos.sim.coordinator import Host
    from toprope.chaos.sim.trainer import Connection
    from toprope.chaos.sim.world import Node, World

T = TypeVar("T")
TICK_S = 1.0
USE_DEADLINE_S = 5.0
_RETRY_S = 0.5
_POLL_S = 5.0
_ASK_S = 3.0
_OPEN_S = 65.0
_SERVE_S = 4.0


class _WrongError(Exception):
    """Bytes are not what they should be, or can't be had."""


class _WrongDigestError(_WrongError):
    """What came has another digest: the owner is told which."""

    def __init__(self, found: str) -> None:
        super().__init__(f"what came has digest {found}")
        self.found = found


@dataclass(slots=True, kw_only=True)
class _Serve:
    """Bytes of a copy on their way to a reader."""

    read: Callable[[], bytes | None]
    size: int
    ended: bool = False


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
        self._memory = node.memory
        self._local = LocalTier(node.disk.root, node.disk)
        self._adoptions = AdoptionFiles(node.disk.root, node.disk)
        siblings = Siblings(shared_bytes=1, wait=_wait)
        self._objects = ObjectTier(world.store, world.job, codec="none", siblings=siblings)
        self._objects._mutex = Turnstile()  # type: ignore[assignment]  # noqa: SLF001 - threads of a history wait by it
        self._connections: dict[int, Connection] = {}
        self._shouts = _Shouts(world, node.name)
        self._link = _Link(self._broker)
        self._coordinators = _Coordinators(self)
        self._documents = Documents(
            self.core, coordinator=self._coordinators, broker=self._link, post=self.post, shouts=self._shouts
        )
        self._turns: defaultdict[tuple[int, int], asyncio.Lock] = defaultdict(asyncio.Lock)
        self._followers: dict[str, tuple[str, asyncio.Task[object]]] = {}
        self._serves: dict[int, _Serve] = {}
        self._numbers = itertools.count(1)

    # Life

    def start(self) -> None:
        """Begin."""
        self.process.start(self._main())

    async def _main(self) -> None:
        self._memory.staged.clear()
        for kept in self._local.sweep():
            self._shouts.shout("local-failed", kept)
        adoptions = self._adoptions.read()
        for adopted in adoptions.found:
            self.world.oracle.on_adopted(self.node.name, self.node.disk, adopted)
        self.post(adoptions)
        for rank in self._memory.ranks():
            await self._look(rank)
        for (rank, number), file in sorted(self._memory.spares.items()):
            with contextlib.suppress(_WrongError):
                if file.page.state is not SlotState.HASHED or self._digest(file) != file.page.digest:
                    raise _WrongError("no whole copy")
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
        await self._pause(0.05)
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

    async def _pause(self, at_most_s: float) -> None:
        rng = self.world.loop.rng
        slow = 20.0 if not self.world.net.calm and rng.random() < 0.03 else 1.0  # noqa: PLR2004 - now and then
        await asyncio.sleep(rng.uniform(0.0, at_most_s) * slow)

    # Events and effects

    def post(self, event: Event) -> None:
        """Tell the core, and begin what it wants done."""
        for effect in self.core.handle(event):
            self._begin(effect)
        if isinstance(event, on.DesiredArrived) and self.core.desired is not None:
            self.world.oracle.on_heard(self.label, self.core.desired)

    def _begin(self, effect: Effect) -> None:
        match effect:
            case do.Send():
                self._send(effect.connection, effect.frame)
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
                await self._make_slots(effect)
            case do.RemoveSlots():
                for number in effect.slots:
                    self._memory.slots.pop((effect.rank, number), None)
            case do.RemoveSpares():
                for number in effect.spares:
                    self._memory.spares.pop((effect.rank, number), None)
            case do.LookAtSlots():
                await self._look(effect.rank)
            case do.GrantSlot():
                async with self._turns[effect.page.rank, effect.slot]:
                    await self._grant(effect)
            case do.EmptySlot():
                async with self._turns[effect.page.rank, effect.slot]:
                    await self._pause(0.005)
                    if (file := self._memory.slots.get((effect.page.rank, effect.slot))) is not None:
                        file.page = effect.page
            case do.HashSlot():
                await self._hash(effect)
            case do.DropStage():
                for uid, rank in [key for key in self._memory.staged if key[0] != effect.keep]:
                    del self._memory.staged[uid, rank]
            case do.StoreLocal():
                await self._store_local(effect)
            case do.StoreObject():
                await self._store_object(effect)
            case do.DropLocal():
                await self._drop_local(Path(effect.path).name)
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
                await self._documents.fetch()
            case _:
                assert_never(effect)

    async def _bulk(self, work: Callable[[], T]) -> T:
        return await self.world.loop.run_in_executor(None, work)

    # Slots

    async def _make_slots(self, effect: do.MakeSlots) -> None:
        await self._pause(0.05)
        if self.node.no_room:
            self.post(on.SlotsRefused(rank=effect.rank, reason="simulated: no room", room=0))
            return
        for number in effect.slots:
            self._memory.slots[effect.rank, number] = File(bytearray(effect.bytes), page=Page(rank=effect.rank))
        await self._look(effect.rank, made=True)

    async def _look(self, rank: int, *, made: bool = False) -> None:
        await self._pause(0.002)
        self.post(on.SlotsSeen(rank=rank, sights=self._memory.look(rank), made=made))

    async def _grant(self, effect: do.GrantSlot) -> None:
        await self._pause(0.005)
        page = effect.page
        file = self._memory.slots.get((page.rank, effect.slot))
        if file is None:
            return
        if effect.check_lock and file.holder() is not None:
            self.world.trace.sometimes("a slot was found locked")
            self.post(on.SlotHeld(rank=page.rank, slot=effect.slot, seq=page.seq, launch_id=file.page.launch_id))
            return
        file.page, file.flipped = page, False
        path = slot_path(page.rank, effect.slot)
        frame = wire.Slot(
            slot=effect.slot, seq=page.seq, path=path, page_path=path, lock_path=path, bytes=effect.capacity
        )
        self._send(effect.connection, frame)

    async def _hash(self, effect: do.HashSlot) -> None:
        try:
            shard = await self._hashed(effect)
        except _WrongError as error:
            self.world.trace.sometimes("a slot was dropped")
            self.post(on.SlotDropped(rank=effect.rank, slot=effect.slot, seq=effect.seq, reason=str(error)))
            return
        self.post(on.SlotHashed(slot=effect.slot, seq=effect.seq, shard=shard))

    async def _hashed(self, effect: do.HashSlot) -> Shard:
        file = self._memory.slots.get((effect.rank, effect.slot))
        if file is None:
            raise _WrongError("it is gone")
        page, wanted = file.page, SlotState.HASHED if effect.digest else SlotState.SEALED
        if (page.seq, page.state) != (effect.seq, wanted):
            raise _WrongError(f"its page says {page.state} of seq {page.seq}")
        half = page.bytes // 2
        with self.world.trace.phase("hashing", (page.attempt_uid, page.step, page.rank)):
            first = bytes(file.data[:half])
            self.world.at("hash")
            await self._pause(0.05)
            image = first + bytes(file.data[half : page.bytes])
            _check_header(image, shard_of_page(page))
            found = digest(image)
            if effect.digest and found != effect.digest:
                raise _WrongError(f"its digest is {found}; it was {effect.digest}")
            if file.page != page:
                raise _WrongError("it was written to while it was hashed")
            if not effect.digest:
                file.page = replace(page, state=SlotState.HASHED, digest=found)
            return shard_of_page(replace(page, digest=found))

    def _digest(self, file: File) -> str:
        image = bytes(file.data[: file.page.bytes])
        _check_header(image, shard_of_page(file.page))
        return digest(image)

    # Tiers

    def _image(self, rank: int, slot: int, size: int) -> memoryview:
        file = self._memory.slots.get((rank, slot))
        return memoryview(bytes(file.data[:size]) if file is not None else b"")

    async def _store_local(self, effect: do.StoreLocal) -> None:
        shard, rng = effect.shard, self.world.loop.rng
        nonces = (rng.randbytes(8).hex(), rng.randbytes(8).hex())
        await self._pause(0.05)
        try:
            with self.world.trace.phase("local write", _place(shard)):
                await asyncio.sleep(self.node.disk.slow_s)
                path = await self._bulk(
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
        if kept := await self._bulk(lambda: self._local.drop(self.node.disk.root / name)):
            self._shouts.shout("local-failed", kept)

    async def _store_object(self, effect: do.StoreObject) -> None:
        shard = effect.shard
        nonce = self.world.loop.rng.randbytes(16).hex()
        await self._pause(0.2)
        try:
            with self.world.trace.phase("object upload", _place(shard)):
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
            result = await self._bulk(lambda: read_back(self.world.store, effect.task))
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
                inventory = await self.world.ask_sidecar(self.node.name, url, _held(after), timeout_s=_POLL_S + 2.0)
            except NetError:
                await asyncio.sleep(_RETRY_S)
                continue
            after = inventory.version
            if inventory.node == node:
                self.post(on.OwnerSeen(inventory=inventory))

    async def _pull(self, effect: do.Pull) -> None:
        shard = effect.shard
        file = self._memory.spares.get((shard.rank, effect.spare))
        if file is None or len(file.data) < shard.bytes:
            file = self._memory.spares[shard.rank, effect.spare] = File(bytearray(shard.bytes))
        try:
            with self.world.trace.phase("peer replication", _place(shard)):
                await self._receive(effect.url, shard, file)
                _check_digest(digest(bytes(file.data[: shard.bytes])), shard)
                _check_header(bytes(file.data[: shard.bytes]), shard)
        except _WrongDigestError as error:
            self.world.trace.sometimes("a pull brought wrong bytes")
            self.post(on.PullFailed(shard=shard, spare=effect.spare, reason=str(error)))
            await self._acknowledge(effect, error.found)
            return
        except (NetError, _WrongError) as error:
            self.post(on.PullFailed(shard=shard, spare=effect.spare, reason=str(error)))
            return
        file.page = shard.page()
        file.flipped = False
        self.post(on.Pulled(shard=shard, spare=effect.spare))
        await self._acknowledge(effect, shard.digest)

    async def _receive(self, url: str, shard: Shard, file: File, *, tier: str = "memory") -> None:
        """Receive a copy in two halves, straight into a file."""
        place, half = (shard.attempt_uid, shard.step, shard.rank), shard.bytes // 2
        me = self.node.name

        async def part(begin: int, end: int, serve: int) -> int:
            number, body = await self.world.ask_sidecar(
                me, url, lambda car: car.serve(place, tier, begin=begin, end=end, serve=serve), timeout_s=_ASK_S
            )
            if len(body) != end - begin:
                raise NetError(f"{url}: {len(body)} bytes came; expected {end - begin}")
            file.data[begin:end] = body
            return number

        serve = await part(0, half, 0)
        self.world.at("receive")
        await self._pause(0.05)
        await part(half, shard.bytes, serve)

    async def _acknowledge(self, effect: do.Pull, found: str) -> None:
        shard = effect.shard
        place = (shard.attempt_uid, shard.step, shard.rank)
        spare = self._memory.spares.get((shard.rank, effect.spare))
        if found == shard.digest and spare is not None:
            self.world.oracle.on_claim(
                f"{self.node.name}'s acknowledgement",
                place,
                said=found,
                found=bytes(spare.data[: shard.bytes]),
                spoiled=spare.flipped,
            )
        with contextlib.suppress(NetError):
            await self.world.ask_sidecar(
                self.node.name, effect.url, lambda car: car.acked(self.node.name, place, found), timeout_s=_ASK_S
            )

    async def _adopt(self, effect: do.Adopt) -> None:
        nonce = self.world.loop.rng.randbytes(8).hex()
        await self._pause(0.05)
        try:
            await self._bulk(lambda: self._adoptions.write(effect.proposed, nonce=nonce))
            for number in effect.forget:
                await self._bulk(partial(self._adoptions.forget, number))
        except OSError as error:
            self.post(on.AdoptFailed(reason=str(error)))
        except DiedError:
            return
        else:
            self.world.oracle.on_adopted(self.node.name, self.node.disk, effect.proposed)
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
        await self._documents.inventory_after(after, _POLL_S)
        return await self.inventory_now()

    async def serve(
        self, place: tuple[str, int, int], tier: str, *, begin: int, end: int, serve: int
    ) -> tuple[int, bytes]:
        """Return part of a copy; the slot is in use from the first part to the last, or until the deadline."""
        if not serve:
            serve = self._begin_serve(place, tier)
        flowing = self._serves.get(serve)
        if flowing is None or flowing.ended:
            raise NetError("the connection was destroyed")
        body = flowing.read()
        if body is None:
            self._end_serve(serve)
            raise NetError("404: the copy is gone")
        if end >= flowing.size:
            self._end_serve(serve)
        return serve, body[begin:end]

    def _begin_serve(self, place: tuple[str, int, int], tier: str) -> int:
        found = [(way, size) for way, size in self.core.locate(*place) if tier == way.tier]
        if not found:
            raise NetError("404: no verified copy here")
        way, size = found[0]
        serve = next(self._numbers)
        file = self._memory.at(way.path)

        def read() -> bytes | None:
            if file is not None:
                return bytes(file.data[:size])
            return self.node.local_bytes(way.path)

        self._serves[serve] = _Serve(read=read, size=size)
        self.post(on.ServeBegan(serve=serve, attempt_uid=place[0], step=place[1], rank=place[2]))
        self.world.loop.call_later(_SERVE_S, self._end_serve, serve)
        return serve

    def _end_serve(self, serve: int) -> None:
        flowing = self._serves.pop(serve, None)
        if flowing is not None and not flowing.ended:
            flowing.ended = True
            self.post(on.ServeEnded(serve=serve))

    async def acked(self, holder: str, place: tuple[str, int, int], found: str) -> bool:
        """Take in which digest a holder has."""
        uid, step, rank = place
        self.post(on.Acked(holder=holder, attempt_uid=uid, step=step, rank=rank, digest=found))
        return True

    # Restore

    async def _stage(self, effect: do.Stage) -> None:
        shard, tried, again = effect.shard, [], not effect.ways
        for way in effect.ways:
            place = (effect.attempt_uid, effect.step, shard.rank)
            try:
                with self.world.trace.phase(f"staging from {way.kind} {way.tier}", place):
                    path = await self._taken(effect, way)
            except (_WrongError, NetError, CkptError, OSError) as error:
                tried.append(f"{way.tier} of {way.node}: {error}")
                again |= isinstance(error, NetError | UnavailableError)
                continue
            self.world.trace.sometimes(f"staged from {way.kind} {way.tier}")
            staged = wire.StagedShard(
                rank=shard.rank, path=path, bytes=shard.bytes, digest=shard.digest, tier=way.tier, node=way.node
            )
            self.post(on.ShardStaged(attempt_uid=effect.attempt_uid, shard=staged))
            return
        reason = "; ".join(tried) or "nobody has it"
        self.post(on.StageFailed(attempt_uid=effect.attempt_uid, rank=shard.rank, reason=reason, again=again))

    async def _taken(self, effect: do.Stage, way: Way) -> str:
        shard = effect.shard
        if way.kind == "here":
            await self._pause(0.05)
            if way.tier == "local":
                self.node.disk.check_readable(way.path)
            body = self.node.bytes_at(way.path, shard.bytes)
            if body is None:
                raise NetError("it is here no more")
            if not _is_right(digest(body), shard.digest):
                event = on.CopyDoubted(
                    attempt_uid=effect.source_attempt_uid, step=effect.step, rank=shard.rank, tier=way.tier
                )
                self.world.loop.call_soon(self.post, event)
                raise _WrongError("it is not what it should be")
            return way.path
        file = self._memory.staged[effect.attempt_uid, shard.rank] = File(bytearray(shard.bytes))
        if way.kind == "node":
            wanted = Shard(
                attempt=0,
                step=effect.step,
                attempt_uid=effect.source_attempt_uid,
                rank=shard.rank,
                world=0,
                bytes=shard.bytes,
                digest=shard.digest,
            )
            await self._receive(way.url, wanted, file, tier=way.tier)
        else:
            index = await self._bulk(partial(read_index_at, self.world.store, Key(way.key)))
            if index.bytes != shard.bytes:
                raise _WrongError("it is not as long as it should be")
            with memoryview(file.data) as view:
                await self.world.loop.stepwise(
                    partial(write_image, self.world.store, index, partial(_write_into, view))
                )
        if not _is_right(digest(bytes(file.data)), shard.digest):
            raise _WrongError("it is not what it should be")
        return stage_path(effect.attempt_uid, shard.rank)

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

    def _send(self, connection: int, frame: wire.FromSidecar) -> None:
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


@dataclass(frozen=True, slots=True)
class _Link:
    """The broker as a sidecar has it: a ``BrokerPort``."""

    client: BrokerClient

    async def publish_inventory(self, inventory: Inventory) -> bool:
        """Publish the document."""
        return await self.client.publish(f"inventory/{inventory.node}", inventory)

    def connected(self) -> bool:
        """Say whether there is a session."""
        return self.client.session


@dataclass(frozen=True, slots=True)
class _Coordinators:
    """The coordinators as a sidecar reaches them, the one of its document first: a ``CoordinatorPort``."""

    car: SimSidecar

    async def put_inventory(self, inventory: Inventory) -> Desired:
        """Tell it what this node holds."""
        return await self._ask(lambda host: host.put_inventory(inventory), timeout_s=_ASK_S)

    async def get_desired(self, *, newer_than: Desired | None) -> Desired:
        """Return its document."""
        at = (newer_than.term, newer_than.version) if newer_than is not None else None
        node = self.car.node.name
        return await self._ask(lambda host: host.get_desired(at, node=node), timeout_s=_POLL_S + 2.0)

    async def open_attempt(self, request: OpenRequest) -> OpenAnswer:
        """Ask for an attempt."""
        return await self._ask(lambda host: host.open(request), timeout_s=_OPEN_S)

    async def _ask(self, work: Callable[[Host], Awaitable[T]], *, timeout_s: float) -> T:
        car = self.car
        try:
            return await car.world.ask_coordinator(car.node.name, car.core.coordinator_url(), work, timeout_s=timeout_s)
        except NetError as error:
            raise CoordinatorError(str(error)) from error


class _Shouts(Shouts):
    """What costs protection, said in the trace: the real one goes by a clock."""

    def __init__(self, world: World, who: str) -> None:
        super().__init__()
        self._world = world
        self._who = who

    def shout(self, kind: str, text: str) -> None:
        """Note it."""
        self._world.trace.note(self._who, f"{kind}: {text}")
        self._world.trace.sometimes(f"shout: {kind}")


def _held(after: int) -> Callable[[SimSidecar], Coroutine[object, object, Inventory]]:
    return lambda car: car.inventory_after(after)


def _place(shard: Shard) -> tuple[str, int, int]:
    return shard.attempt_uid, shard.step, shard.rank


def _write_into(view: memoryview, at: int, body: memoryview) -> None:
    view[at : at + len(body)] = body


def _is_right(found: str, expected: str) -> bool:
    """Say whether bytes are what they should be: the rule that the mutants "pull" and "stage" switch off."""
    return found == expected


def _check_digest(found: str, shard: Shard) -> None:
    if not _is_right(found, shard.digest):
        raise _WrongDigestError(found)


def _check_header(image: bytes, shard: Shard) -> None:
    try:
        said = identity_of(parse_header(image, size=len(image), name="image"), name="image")
    except CorruptObjectError as error:
        raise _WrongError(str(error)) from error
    if (said.attempt_uid, said.step, said.rank) != (shard.attempt_uid, shard.step, shard.rank):
        raise _WrongError("its header is that of another snapshot")
