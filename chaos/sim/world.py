"""The world of one history: nodes, store, network, broker, and who starts what has died."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from pathlib import PurePosixPath
from typing import TypeVar

from toprope.chaos.sim.broker import Broker
from toprope.chaos.sim.coordinator import Host
from toprope.chaos.sim.disk import SimDisk
from toprope.chaos.sim.loop import PROCESS, Process, SimLoop
from toprope.chaos.sim.memory import SimMemory
from toprope.chaos.sim.net import Net, NetError
from toprope.chaos.sim.options import Options
from toprope.chaos.sim.oracle import Oracle
from toprope.chaos.sim.people import Reader
from toprope.chaos.sim.sidecar import SimSidecar
from toprope.chaos.sim.store import SimStore, image_in
from toprope.chaos.sim.threads import nap
from toprope.chaos.sim.trace import Trace
from toprope.chaos.sim.trainer import Launch
from toprope.coordinator.wire import Copy, Health
from toprope.store.checkpoint.manifest import Index, decode
from toprope.store.digest import digest
from toprope.store.names import Key
from toprope.store.objects.protocol import ObjectStore
from toprope.store.objects.retry import BackOff, RetryStore

T = TypeVar("T")
JOB = "job"


class Node:
    """A machine: its memory and disk outlive its sidecar, its disk outlives a power cut."""

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self.no_room = False
        self.sidecar: SimSidecar | None = None
        self.memory = SimMemory(world.loop.rng.randbytes(16).hex())
        self._world = world
        self.disk = self._new_disk()
        self.away_until_s = 0.0
        self._lives = itertools.count(1)

    def _new_disk(self) -> SimDisk:
        disk = SimDisk(self._world.loop.rng)
        disk.on_death = lambda: self._world.cut_power(self)
        return disk

    def lose_power(self, *, replaced: bool | None = None) -> None:
        """Lose memory, and what the disk had not made durable; or the disk too, as when the machine is ``replaced``."""
        rng = self._world.loop.rng
        self._world.oracle.unlogged.gone.add(self.memory.boot_id)
        self.memory = SimMemory(rng.randbytes(16).hex())
        self.disk.cut_power()
        drawn = rng.random() < 0.4  # noqa: PLR2004 - now and then
        if drawn if replaced is None else replaced:
            self._world.trace.sometimes("a machine was replaced")
            self.disk = self._new_disk()

    def start(self) -> None:
        """Start its sidecar."""
        self.sidecar = SimSidecar(self._world, self, next(self._lives))
        self.sidecar.start()

    @property
    def up(self) -> bool:
        """Say whether its sidecar runs."""
        return self.sidecar is not None and self.sidecar.process.alive

    def bytes_at(self, path: str, size: int) -> bytes | None:
        """Return the bytes of a file in memory or on the disk."""
        if path.startswith("/local/"):
            return self.local_bytes(path)
        file = self.memory.at(path)
        return bytes(file.data[:size]) if file is not None else None

    def opened(self, path: str) -> Callable[[], bytes] | None:
        """Open a file in memory or on the disk; return what reads it, which the removal of its name does not end."""
        if path.startswith("/local/"):
            body = self.local_bytes(path)
            return None if body is None else lambda: body
        file = self.memory.at(path)
        return None if file is None else lambda: bytes(file.data)

    def local_bytes(self, path: str) -> bytes | None:
        """Return the bytes of a file of the local tier."""
        name = PurePosixPath(path).name
        return self.disk.read(name) if name in self.disk.names else None

    def copy_bytes(self, copy: Copy) -> tuple[bytes | None, bool]:
        """Return what lies where an inventory says that a copy is, and whether it was spoiled on purpose."""
        match copy.tier:
            case "object":
                return self._object_bytes(copy)
            case "local":
                return self.local_bytes(copy.key), PurePosixPath(copy.key).name in self.disk.flipped
            case "memory" | "peer":
                files = self.memory.slots if copy.tier == "memory" else self.memory.spares
                place = (copy.attempt_uid, copy.step, copy.rank, copy.digest)
                for file in files.values():
                    page = file.page
                    if (page.attempt_uid, page.step, page.rank, page.digest) == place:
                        return bytes(file.data[: page.bytes]), file.flipped
        return None, False

    def _object_bytes(self, copy: Copy) -> tuple[bytes | None, bool]:
        """Return the image that an index names, those objects included that garbage collection has taken since."""
        store, key, read = self._world.store, Key(copy.index_key), self._world.images
        if key in store.corrupt or key not in store.ever:
            return None, key in store.corrupt
        if (key, copy.index_sha256) not in read:
            index = decode(store.ever[key], Index, key=key, expected_sha256=copy.index_sha256)
            spoiled = any(file.key in store.corrupt for file in index.files)
            read[key, copy.index_sha256] = image_in(store.ever, index), spoiled
        return read[key, copy.index_sha256]


class World:
    """All of it."""

    def __init__(self, loop: SimLoop, options: Options) -> None:
        self.job = JOB
        self.loop = loop
        self.options = options
        self.trace = Trace(loop.time)
        self.net = Net(loop, options, self.trace)
        self.store = SimStore(
            loop, self.trace, fault=0.0, cut=lambda who: self.net.is_cut(who, "store") or self.net.is_cut("store", who)
        )
        self.oracle = Oracle(JOB, self.store, self.trace, stop=loop.stop, copies=options.copies)
        self.broker = Broker(loop, self.net)
        self.nodes = [Node(self, f"n{number}") for number in range(options.nodes)]
        self.hosts: list[Host] = []
        self.all_hosts: list[Host] = []
        self.readers: list[Reader] = []
        self.rounds = 0
        self.images: dict[tuple[Key, str], tuple[bytes, bool]] = {}
        self.ambush = ""
        self.store.at = self.at
        self.launch: Launch | None = None
        self._numbers = itertools.count(1)
        self._host_numbers = itertools.count(1)
        self._launches = itertools.count(1)

    @property
    def objects(self) -> ObjectStore:
        """The store as programs open it: a bucket is asked again when it gives no answer, a directory is not."""
        if not self.options.bucket:
            return self.store
        return RetryStore(self.store, BackOff(sleep=nap, chance=self.loop.rng.random))

    @property
    def places(self) -> int:
        """Return how many nodes a launch takes."""
        return self.options.nodes - self.options.spares

    def standing_by(self) -> int:
        """Return how many coordinators run that do not lead."""
        return sum(host.process.alive and host.process.held is None and not host.leads for host in self.hosts)

    def next_number(self) -> int:
        """Return a number that was never given."""
        return next(self._numbers)

    # Who starts what has died

    async def supervise(self) -> None:
        """Keep a sidecar on each node, a coordinator, and a launch, as an orchestrator would."""
        rng = self.loop.rng
        async with asyncio.TaskGroup() as tasks:
            for node in self.nodes:
                tasks.create_task(self._keep_node(node))
            tasks.create_task(self._keep_coordinator())
            tasks.create_task(self._keep_launch())
            await asyncio.sleep(rng.uniform(0.0, 0.1))

    async def _keep_node(self, node: Node) -> None:
        while True:
            if not node.up and self.loop.time() >= node.away_until_s:
                await asyncio.sleep(self.loop.rng.uniform(0.1, 4.0) if node.sidecar is not None else 0.0)
                node.start()
                self.trace.note(node.name, "starts")
            await asyncio.sleep(0.2)

    async def _keep_coordinator(self) -> None:
        while True:
            self.hosts = [host for host in self.hosts if host.process.alive]
            if sum(host.process.held is None for host in self.hosts) < self.options.coordinators:
                await asyncio.sleep(self.loop.rng.uniform(0.5, 4.0) if self.hosts else 0.2)
                self.add_coordinator()
            await asyncio.sleep(0.5)

    def add_coordinator(self, *, deaf: bool = False) -> None:
        """Start another coordinator, which follows or leads; a ``deaf`` one hears of no leader before it has led."""
        host = Host(self, next(self._host_numbers), deaf=deaf)
        self.hosts.append(host)
        self.all_hosts.append(host)
        self.trace.note(host.name, "starts")
        host.start()

    async def _keep_launch(self) -> None:
        while True:
            there = [node for node in self.nodes if node.up]
            if len(there) < self.places:
                await asyncio.sleep(0.3)
                continue
            self.launch = launch = Launch(self, next(self._launches), there[: self.places])
            self.trace.note(f"l{launch.number}", "is launched")
            launch.start()
            await launch.over.wait()
            await asyncio.sleep(self.loop.rng.uniform(0.05, 1.0))
            launch.end()
            await asyncio.sleep(self.loop.rng.uniform(0.1, 1.5))

    # How processes reach each other

    async def ask_sidecar(
        self, source: str, url: str, work: Callable[[SimSidecar], Awaitable[T]], *, timeout_s: float
    ) -> T:
        """Return what the sidecar at ``url`` answers.

        Raises:
            NetError: it does not.
        """
        name = url.removeprefix("http://").partition(":")[0]
        node = next((one for one in self.nodes if one.name == name), None)
        car = node.sidecar if node is not None else None
        if car is None or car.url != url:
            raise NetError(f"{url}: connection refused")
        return await self.net.call(
            source, name, process=lambda: car.process, work=lambda: work(car), timeout_s=timeout_s
        )

    async def ask_coordinator(
        self, source: str, url: str, work: Callable[[Host], Awaitable[T]], *, timeout_s: float
    ) -> T:
        """Return what the coordinator at ``url`` answers, or any that is there.

        Raises:
            NetError: none does.
        """
        hosts = [host for host in self.hosts if host.process.alive]
        named = [host for host in hosts if host.url == url]
        others = [host for host in hosts if host.url != url]
        self.loop.rng.shuffle(others)
        failure = NetError("no coordinator is there")
        for host in (*named, *others):
            try:
                return await self.net.call(
                    source, host.name, process=_process_of(host), work=_work_on(host, work), timeout_s=timeout_s
                )
            except NetError as error:
                failure = error
        raise failure

    async def ask_health(self, source: str, url: str, *, standby: str, timeout_s: float) -> Health:
        """Return what the coordinator at ``url`` says of itself.

        Raises:
            NetError: it does not answer.
        """
        host = next((one for one in self.hosts if one.url == url), None)
        if host is None:
            raise NetError(f"{url}: connection refused")
        return await self.net.call(
            source,
            host.name,
            process=_process_of(host),
            work=_work_on(host, lambda one: one.health(standby)),
            timeout_s=timeout_s,
        )

    def can_be_restored(self) -> bool:
        """Say whether all shards of a step of the lineage still lie somewhere as they were sealed.

        Objects count when they are READY: of others a node that lost its memory knows nothing any more. One that came
        wrong from the store is struck off.
        """
        state = self.oracle.state
        struck = state.struck if self.store.spoiled else frozenset()
        if self.store.spoiled and state.attempt is not None:  # what it began from is struck off with the next attempt
            struck |= {source for source in (state.source_of(state.attempt),) if source is not None}
        if any((ready.attempt_uid, ready.step) not in struck for _, ready in state.restorable()):
            return True
        there: set[str] = set()
        for node in self.nodes:
            there |= {digest(bytes(file.data[: file.page.bytes])) for file in node.memory.files()}
            there |= {digest(node.disk.read(n)) for n in node.disk.names if f"{n}.receipt" in node.disk.names}
        whole: dict[tuple[str, int], int] = {}
        for (uid, step, _), sealed in self.oracle.golden.items():
            whole[uid, step] = whole.get((uid, step), 0) + (sealed in there)
        world = self.places * self.options.ranks_per_node
        numbers = {one.uid: one.attempt for one in state.attempts}
        return any(
            count == world
            and (uid, step) not in struck
            and state.is_on_lineage(attempt_uid=uid, step=step)
            and not state.is_tainted(attempt=numbers[uid], step=step)
            for (uid, step), count in whole.items()
        )

    # What befalls machines

    def at(self, point: str) -> None:
        """Stop who has come to this point, if that is what is to befall the next who does: for a while, or for good."""
        process = PROCESS.get()
        if point != self.ambush or process is None or not process.alive:
            return
        self.ambush = ""
        self.trace.sometimes(f"stopped at {point}")
        self.trace.note("nemesis", f"stops {process.name} at {point}")
        self.stop(process, self.loop.rng.choice((0.0, self.loop.rng.uniform(1.0, 12.0))))

    def stop(self, process: Process, for_s: float) -> None:
        """Stop a process for a while; 0: kill it. A trainer does not survive for long, since its launch goes on."""
        if not for_s:
            process.kill()
        elif process.held is None and process.alive:
            process.pause()
            self.loop.outside(for_s, lambda: process.resume() if process.held is not None else None)
        ranks = [rank.process for rank in self.launch.ranks] if self.launch is not None else []
        if process in ranks:
            for other in [one for one in ranks if one is not process][:1]:
                self.loop.outside(0.0, other.kill)
            self.loop.outside(for_s + self.loop.rng.uniform(0.05, 3.0), process.kill)

    def cut_power(self, node: Node, *, replaced: bool | None = None) -> None:
        """Kill all on a node, and lose what it can't keep; whether the machine is ``replaced`` is drawn if not said."""
        self.trace.note(node.name, "loses power")
        self.trace.sometimes("a node lost power")
        self.oracle.on_node_lost()
        if node.sidecar is not None:
            node.sidecar.process.kill()
        if self.launch is not None:
            for rank in self.launch.ranks:
                if rank.node is node:
                    rank.process.kill()
        node.lose_power(replaced=replaced)


def _process_of(host: Host) -> Callable[[], Process]:
    return lambda: host.process


def _work_on(host: Host, work: Callable[[Host], Awaitable[T]]) -> Callable[[], Awaitable[T]]:
    return lambda: work(host)
