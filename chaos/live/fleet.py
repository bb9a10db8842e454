"""Many nodes at once, as a coordinator sees them: what their sidecars say and hear, without trainers and without bytes.

A node of the fleet says what a sidecar would say, when it would say it, over the real broker and the real HTTP: that
ranks have sealed, that a holder has pulled, that a shard is stored, that it was read back. Its shards do not exist, but
for the indexes, which the coordinator reads. A connection to the broker stands for many nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import aiohttp
import msgspec
from aiohttp import web

from toprope.chaos.live.fleet_mqtt import FleetMqtt
from toprope.chaos.live.fleet_node import LAUNCH, Node
from toprope.coordinator.adapters.http import served
from toprope.coordinator.settings import Address
from toprope.coordinator.wire import (
    MAX_DESIRED_BYTES,
    Copy,
    Desired,
    Member,
    OpenAnswer,
    OpenRequest,
    Presence,
    RankVerdict,
    ReadBack,
    decode,
    encode,
)
from toprope.sidecar.documents import HTTP_CHECK_ROUNDS, RETRY_S
from toprope.sidecar.inventory import until_turn_s

NODES_A_RACK = 16
READ = "read back"
HASHED, PULLED, LOCAL, STORED, READ_BACK = 0.15, 0.2, 0.3, 0.4, 0.2
"""At most such a part of the time between snapshots after the one before it each of these is done, at random."""


@dataclass(slots=True)
class Step:
    """How far a step has come: what is still to be told, when the last of it was, and when each node first knew.

    ``held_s``: when the last copy came to be, or the last read-back ended, of which a node tells in its turn.
    """

    missing: set[tuple[str, int]]
    held_s: float = 0.0
    told_s: float = 0.0
    known_s: dict[str, float] = field(default_factory=dict)


class Fleet:
    """``nodes`` nodes of ``ranks_per_node`` ranks each, over ``connections`` connections to the broker."""

    def __init__(  # noqa: PLR0913 - what a load consists of
        self, job: str, *, nodes: int, ranks_per_node: int, store: Path, connections: int, every_s: float, seed: int
    ) -> None:
        self.job = job
        self._every_s = every_s
        self.world = nodes * ranks_per_node
        self.nodes = {
            name: Node(
                job=job,
                world=nodes * ranks_per_node,
                name=name,
                url="",
                ranks=range(number * ranks_per_node, (number + 1) * ranks_per_node),
                domain={"node": name, "rack": f"r{number // NODES_A_RACK}"},
                client=number % connections,
            )
            for number, name in ((number, f"n{number:05d}") for number in range(nodes))
        }
        self.counts: Counter[str] = Counter()
        self.protected: dict[int, Step] = {}
        self.ready: dict[int, Step] = {}
        self._store = store
        self._rng = random.Random(seed)
        self.late_s: list[float] = []
        """How late each thing that was due was done: what is measured is no better than that."""
        self._connections = connections
        self._clients: list[FleetMqtt] = []
        self._todo: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._holders: dict[str, str] = {}
        self._receipts: dict[tuple[int, int], Copy] = {}
        self._news = asyncio.Event()

    # --- running -------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def running(self, *, coordinator: str, broker: Address) -> AsyncIterator[None]:
        """Have all nodes there, heard by the coordinator, while the context lasts."""
        app = web.Application()
        app.router.add_get("/{node}/v1/inventory", self._asked)
        async with served(app, Address(host="127.0.0.1", port=0)) as url, aiohttp.ClientSession() as session:
            for node in self.nodes.values():
                node.url = f"{url}/{node.name}"
            self._session, self._coordinator = session, coordinator
            async with self._connected(broker), asyncio.TaskGroup() as tasks:
                loops = [tasks.create_task(loop) for loop in (self._do(), self._check(), self._listen())]
                yield
                for loop in loops:
                    loop.cancel()

    @contextlib.asynccontextmanager
    async def _connected(self, broker: Address) -> AsyncIterator[None]:
        """Have each node hear its documents, and one connection more the whole, as a standby coordinator does."""
        async with contextlib.AsyncExitStack() as stack:
            for number in range(self._connections):
                client = await FleetMqtt.connected(broker, identifier=f"fleet-{number}", hear=self._hear)
                stack.callback(client.close)
                self._clients.append(client)
                mine = [f"{self._topic(node)}/desired" for node in self.nodes.values() if node.client == number]
                for at in range(0, len(mine), 64):
                    await client.subscribe(mine[at : at + 64])
            watch = await FleetMqtt.connected(broker, identifier="fleet-watch", hear=self._hear_whole)
            stack.callback(watch.close)
            await watch.subscribe([f"toprope/{self.job}/desired"])
            self._clients.append(watch)
            yield

    async def _listen(self) -> None:
        """End with an error when a connection is lost."""
        lost, _ = await asyncio.wait([client.lost for client in self._clients], return_when=asyncio.FIRST_COMPLETED)
        for one in lost:
            await one

    async def wait(self, done: Callable[[], bool], *, what: str, timeout_s: float) -> None:
        """Return once something is so.

        Raises:
            TimeoutError: it is not so in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not done():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError as error:
            raise TimeoutError(f"{what}: not after {timeout_s:.0f} s") from error

    def _publish(self, node: Node) -> None:
        client = self._clients[node.client]
        if node.published_s == 0.0:
            presence = Presence(node=node.name, boot_id=node.identity, incarnation=node.identity, alive=True)
            client.publish(f"{self._topic(node)}/presence", encode(presence))
        node.queued = False
        body = encode(node.inventory())
        node.published_s = _now_s()
        client.publish(f"{self._topic(node)}/inventory", body)
        self._note_told(node)
        self._count("inventory", len(body))

    def _topic(self, node: Node) -> str:
        return f"toprope/{self.job}/nodes/{node.name}"

    async def _do(self) -> None:
        while True:
            while self._todo and self._todo[0][0] <= (now_s := _now_s()):
                due_s, _, work = heapq.heappop(self._todo)
                self.late_s.append(now_s - due_s)
                work()
            await asyncio.sleep(0.005)

    async def _check(self) -> None:
        """Tell the coordinator by HTTP now and then, each node in its turn, as a sidecar does, broker or not."""
        async with asyncio.TaskGroup() as tasks:
            for node in self.nodes.values():
                tasks.create_task(self._check_one(node))

    async def _check_one(self, node: Node) -> None:
        await asyncio.sleep(self._rng.random() * RETRY_S * HTTP_CHECK_ROUNDS)
        while True:
            await (self._tell_again(node) if node.published_s else self._ask(node))
            pace_s = 0.0 if node.desired is None else node.desired.report_every_s
            await asyncio.sleep((RETRY_S + pace_s) * HTTP_CHECK_ROUNDS)

    async def _ask(self, node: Node) -> None:
        path = f"{self._coordinator}/v1/desired?node={node.name}"
        async with self._session.get(path) as answer:
            self._answered(node, answer.status, await answer.read())

    async def _tell_again(self, node: Node) -> None:
        body = encode(node.inventory())
        self._note_told(node)
        self._count("inventory by HTTP", len(body))
        async with self._session.put(f"{self._coordinator}/v1/nodes/{node.name}/inventory", data=body) as answer:
            self._answered(node, answer.status, await answer.read())

    def _answered(self, node: Node, status: int, body: bytes) -> None:
        if status == 200:  # noqa: PLR2004 - HTTP's ok
            self._take(node, decode(body, Desired, limit=MAX_DESIRED_BYTES))
            self._count("desired by HTTP", len(body))

    async def _asked(self, request: web.Request) -> web.Response:
        body = encode(self.nodes[request.match_info["node"]].inventory())
        self._count("inventory asked for", len(body))
        return web.Response(body=body, content_type="application/json")

    def _count(self, what: str, size: int) -> None:
        self.counts[what] += 1
        self.counts[f"{what} bytes"] += size

    # --- what nodes do ---------------------------------------------------------------------------------------------

    def _hear(self, topic: str, body: bytes) -> None:
        self._count("desired", len(body))
        self._take(self.nodes[topic.split("/")[-2]], decode(body, Desired, limit=MAX_DESIRED_BYTES))

    def _hear_whole(self, _topic: str, body: bytes) -> None:
        self._count("whole document", len(body))
        self._news.set()

    def _take(self, node: Node, desired: Desired) -> None:
        before = node.desired
        if before is not None and (desired.term, desired.version) <= (before.term, before.version):
            return
        node.desired = desired
        for steps, reached, was in (
            (self.protected, desired.protected_step, before.protected_step if before is not None else 0),
            (self.ready, desired.ready_step, before.ready_step if before is not None else 0),
        ):
            for number, step in steps.items():
                if was < number <= reached:
                    step.known_s.setdefault(node.name, _now_s())
        if before is None or before.attempt != desired.attempt:
            self._on_attempt(node, desired)
        for task in desired.read_backs:
            if task.key not in node.read_backs and task.key not in node.reading:
                node.reading.add(task.key)
                done = ReadBack(key=task.key, digest=task.digest, ok=True)
                self._after(READ_BACK, lambda done=done: self._read_back(node, done))  # type: ignore[misc]
        wanted = {task.key for task in desired.read_backs}
        node.read_backs = {key: done for key, done in node.read_backs.items() if key in wanted}
        self._news.set()

    def _on_attempt(self, node: Node, desired: Desired) -> None:
        attempt = desired.attempt
        if attempt is None:
            return
        reached: dict[str, Literal["staged", "applied"]] = {"opened": "staged", "staged": "applied"}
        phase = reached.get(attempt.phase)
        for rank in node.ranks:
            verdict = None if phase is None else RankVerdict(attempt_uid=attempt.uid, phase=phase, ok=True)
            node.stand(rank, attempt.from_step, verdict)
        self._say(node, at_once=True)

    def _read_back(self, node: Node, done: ReadBack) -> None:
        node.reading.discard(done.key)
        node.read_backs[done.key] = done
        *_, step, file = done.key.split("/")  # s000000010/rank-00003-of-...
        node.news.append((READ, int(file.split("-")[1]), int(step[1:])))
        self._note_held(int(step[1:]))
        self._say(node)

    def _after(self, part: float, work: Callable[[], None]) -> None:
        delay_s = self._rng.uniform(0.1, 1.0) * part * self._every_s
        heapq.heappush(self._todo, (_now_s() + delay_s, next(self._numbers), work))

    def _say(self, node: Node, *, at_once: bool = False) -> None:
        """Publish what a node lists, which has changed, as soon as a sidecar would."""
        if node.desired is None:
            return
        node.version += 1
        if at_once or node.published_s == 0.0:
            self._publish(node)
            return
        if node.queued:
            return
        node.queued = True
        now_s = _now_s()
        due_s = now_s + until_turn_s(node.desired.report_every_s, node=node.name, now_s=now_s)
        heapq.heappush(self._todo, (due_s, next(self._numbers), lambda: self._publish_queued(node)))

    def _publish_queued(self, node: Node) -> None:
        if node.queued:  # not told at once meanwhile
            self._publish(node)

    def _note_told(self, node: Node) -> None:
        now_s = _now_s()
        for what, rank, number in node.news:
            for steps in (self.protected, self.ready):
                step = steps.get(number)
                if step is not None and (what, rank) in step.missing:
                    step.missing.discard((what, rank))
                    step.told_s = now_s
        node.news.clear()

    # --- what a measurement does -----------------------------------------------------------------------------------

    async def arrive(self) -> None:
        """Let all nodes come, and be heard."""
        names = iter(self.nodes.values())

        async def some() -> None:
            for node in names:
                while node.desired is None:
                    await self._ask(node)
                self._say(node)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(16):
                tasks.create_task(some())
        while await self._heard() < len(self.nodes):  # noqa: ASYNC110 - it is asked over the network
            await asyncio.sleep(0.5)

    async def _heard(self) -> int:
        """Return how many nodes the coordinator has heard."""
        async with self._session.get(f"{self._coordinator}/v1/status") as answer:
            return len(msgspec.json.decode(await answer.read(), type=_Status).nodes)

    async def open(self) -> None:
        """Open an attempt of all ranks, and have it applied.

        Raises:
            RuntimeError: it was refused for good.
        """
        world = [
            Member(rank=rank, node=node.name, boot_id=node.identity)
            for node in self.nodes.values()
            for rank in node.ranks
        ]
        request = OpenRequest(
            job=self.job, launch_id=LAUNCH, round=0, world=tuple(world), spec={"model": {}}, versions={}
        )
        while True:
            async with self._session.post(f"{self._coordinator}/v1/attempts", data=encode(request)) as response:
                answer = decode(await response.read(), OpenAnswer, limit=MAX_DESIRED_BYTES)
            if answer.attempt is not None:
                break
            if answer.code not in {"unavailable", "busy", "unknown-node"}:
                raise RuntimeError(f"{answer.code}: {answer.text}")
            await asyncio.sleep(0.5)
        await self.wait(
            lambda: all(_phase(one) == "applied" for one in self.nodes.values()), what="applied", timeout_s=120
        )

    def prepare(self, step: int) -> None:
        """Write the indexes of a step that will be stored: in a job that is the work of all its nodes."""
        for node in self.nodes.values():
            for rank in node.ranks:
                self._receipts[step, rank] = node.stored(step, rank, store=self._store)

    def snapshot(self, step: int, *, local: bool, store: bool) -> None:
        """Let all ranks seal a step, and all that follows come about; what is to be stored was prepared."""
        some = next(iter(self.nodes.values())).desired
        assert some is not None
        assert some.attempt is not None
        ranks = range(self.world)
        self.protected[step] = Step({(tier, rank) for tier in ("memory", "peer") for rank in ranks})
        if store:
            self.ready[step] = Step({(what, rank) for what in ("object", READ) for rank in ranks})
        for node in self.nodes.values():
            self._holders.update(
                {place.owner: place.holder for place in (node.desired.placement if node.desired is not None else ())}
            )
        for node in self.nodes.values():
            for rank in node.ranks:
                self._after(HASHED, lambda n=node, r=rank: self._sealed(n, step, r, local=local, store=store))  # type: ignore[misc]

    def _sealed(self, node: Node, step: int, rank: int, *, local: bool, store: bool) -> None:
        node.stand(rank, step, None)
        self._list(node, node.copy(step, rank, "memory"))
        holder = self.nodes[self._holders[node.name]]
        self._after(PULLED, lambda: self._list(holder, node.copy(step, rank, "peer")))
        if local:
            self._after(LOCAL, lambda: self._list(node, node.copy(step, rank, "local")))
        if store:
            self._after(STORED, lambda: self._list(node, self._receipts[step, rank]))

    def _list(self, node: Node, copy: Copy) -> None:
        node.hold(copy)
        self._note_held(copy.step)
        self._say(node)

    def _note_held(self, number: int) -> None:
        for steps in (self.protected, self.ready):
            if number in steps and steps[number].missing:
                steps[number].held_s = _now_s()


class _Status(msgspec.Struct):
    """What is wanted of the coordinator's status."""

    nodes: tuple[msgspec.Raw, ...]


def _phase(node: Node) -> str:
    return "" if node.desired is None or node.desired.attempt is None else node.desired.attempt.phase


def _now_s() -> float:
    return asyncio.get_running_loop().time()
