"""Trainers: simulated ranks that speak the hook's frames, take snapshots into slots, die, linger and restore.

They stand for ``toprope.trainer_hooks`` (torch, threads, a Unix socket) and for the training loop and launcher around
it. Steps are in lock-step, as with an all-reduce; so a launch lives and dies as one, but for zombies.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from toprope.chaos.sim.loop import Process, SimLoop
from toprope.chaos.sim.memory import File
from toprope.trainer_hooks.link import wire
from toprope.trainer_hooks.link.slot import Page, SlotState

if TYPE_CHECKING:
    from toprope.chaos.sim.sidecar import SimSidecar
    from toprope.chaos.sim.world import Node, World

_F = TypeVar("_F", wire.Attempt, wire.Staged, wire.Go)
_ROOM_BYTES = 64
_RETRY_FOR_S = 90.0
_PHASE_S = 60.0
_COPY_S = 0.02
_AGREE_S = (0.0, 2.0)
"""How long a rank allows for all to hear of a step: enough, or so little that some won't in time."""
_GRACE_S = 20.0


class EndedError(Exception):
    """This rank ends with a typed error; the launcher sees it exit."""


class PreemptedError(EndedError):
    """This rank was to be ended, and ends at a step that all ranks save."""


class _NextRoundError(Exception):
    """The attempt is over before it began."""


def image_of(attempt: wire.Attempt, *, step: int, rank: int, world: int) -> bytes:
    """Return the state of a rank after a step: other bytes for each attempt, so that a mixture shows.

    Besides what each step changes there is what changes seldom, what never does, and what all ranks have alike.
    """
    payload = hashlib.sha256(f"{attempt.uid} {step} {rank}".encode()).digest() * 4
    seldom = hashlib.sha256(f"{attempt.uid} {step // 16} {rank}".encode()).digest() * 4
    frozen = hashlib.sha256(f"{rank}".encode()).digest() * 4
    alike = hashlib.sha256(f"{attempt.uid} {step // 2}".encode()).digest() * 4
    data = frozen + seldom + alike + payload
    ends = [len(frozen), len(frozen + seldom), len(frozen + seldom + alike), len(data)]
    header: dict[str, object] = {
        "__metadata__": {
            "format": "1",
            "job_uid": attempt.job_uid,
            "attempt": str(attempt.number),
            "attempt_uid": attempt.uid,
            "step": str(step),
            "rank": str(rank),
            "world": str(world),
            "document": "__document__",
        },
        "frozen": {"dtype": "F32", "shape": [len(frozen) // 4], "data_offsets": [0, ends[0]]},
        "seldom": {"dtype": "F32", "shape": [len(seldom) // 4], "data_offsets": ends[:2]},
        "alike": {"dtype": "F32", "shape": [len(alike) // 4], "data_offsets": ends[1:3]},
        "__document__": {"dtype": "U8", "shape": [len(payload)], "data_offsets": ends[2:]},
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 256) * 256)
    return struct.pack("<Q", len(text)) + text + data


class Pipe:
    """One direction of a Unix socket: in order, and nothing is lost while both ends live."""

    def __init__(self, loop: SimLoop, process: Process, deliver: Callable[..., None]) -> None:
        self._loop = loop
        self._process = process
        self._deliver = deliver
        self._last_s = 0.0

    def send(self, *item: object) -> None:
        """Let something arrive."""
        self._last_s = max(self._last_s + 1e-6, self._loop.time() + self._loop.rng.uniform(0.0001, 0.003))
        self._loop.call_at(self._last_s, self._deliver, *item, context=self._process.context)


class Connection:
    """A trainer's connection to the sidecar of its node."""

    def __init__(self, rank: Rank, sidecar: SimSidecar, number: int) -> None:
        self.number = number
        self.open = True
        self._rank = rank
        loop = rank.world.loop
        self._up = Pipe(loop, sidecar.process, lambda frame: sidecar.frame(number, frame))
        self._down = Pipe(loop, rank.process, rank.heard)
        self._end_up = Pipe(loop, sidecar.process, lambda: sidecar.closed(number))
        self._end_down = Pipe(loop, rank.process, rank.lost)
        sidecar.accept(self)
        rank.process.at_death(self._up_end)
        sidecar.process.at_death(self.hang_up)

    def to_sidecar(self, frame: wire.FromHook) -> None:
        """Send a frame up."""
        if self.open:
            self._up.send(frame)

    def to_trainer(self, frame: wire.FromSidecar) -> None:
        """Send a frame down."""
        if self.open:
            self._down.send(self, frame)

    def hang_up(self) -> None:
        """End it from the sidecar's side."""
        if self.open:
            self.open = False
            self._end_down.send(self)

    def _up_end(self) -> None:
        if self.open:
            self.open = False
            self._end_up.send()


class Group:
    """The process group: what all ranks gather. A rank that dies leaves the others waiting."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._turns: dict[int, dict[int, Any]] = {}
        self._full: dict[int, asyncio.Event] = {}
        self._at: dict[int, int] = {}

    async def gather(self, rank: int, value: object) -> list[Any]:
        """Return what each rank gave, by rank."""
        turn = self._at[rank] = self._at.get(rank, 0) + 1
        values = self._turns.setdefault(turn, {})
        full = self._full.setdefault(turn, asyncio.Event())
        values[rank] = value
        if len(values) == self.size:
            full.set()
            self._turns.pop(turn - 2, None)
            self._full.pop(turn - 2, None)
        await full.wait()
        return [values[one] for one in range(self.size)]


@dataclass(slots=True)
class Grant:
    """A slot that may be filled once, with its mapping."""

    frame: wire.Slot
    file: File


@dataclass(slots=True)
class Said:
    """What a new connection must be told (see ``trainer_hooks.wire``)."""

    open: wire.Open | None = None
    join: wire.Join | None = None
    verdict: wire.Verdict | None = None
    size: wire.Size | None = None
    sealed: dict[int, wire.Sealed] = field(default_factory=dict)
    ask: wire.Ask | None = None

    def all(self) -> list[wire.FromHook]:
        """Return it in order."""
        frames = (self.open, self.join, self.verdict, self.size, *self.sealed.values(), self.ask)
        return [frame for frame in frames if frame is not None]


class Rank:
    """One trainer process."""

    def __init__(self, world: World, launch: Launch, rank: int, node: Node) -> None:
        self.world = world
        self.launch = launch
        self.rank = rank
        self.node = node
        self.process = Process(world.loop, f"l{launch.number}.r{rank}")
        self.step = 0
        self.in_training = False
        self.restoring = False
        self._connection: Connection | None = None
        self._welcome: wire.Welcome | None = None
        self._desired: wire.Desired | None = None
        self._heard: deque[wire.FromSidecar] = deque()
        self._news = asyncio.Event()
        self._free: deque[Grant] = deque()
        self._said = Said()
        self._attempt: wire.Attempt | None = None
        self._noticed_s: float | None = None
        self._reached = 0
        self._late = 0

    # The connection

    def start(self) -> None:
        """Begin."""
        self.process.start(self._life())
        self.process.start(self._connect())

    async def _life(self) -> None:
        try:
            await self._main()
        except EndedError as error:
            self.world.trace.note(self.process.name, f"ends: {error}")
        self.process.kill()

    async def _connect(self) -> None:
        """Be connected, and again whenever the connection has ended."""
        while True:
            sidecar = self.node.sidecar
            if self._connection is None and sidecar is not None and sidecar.process.alive:
                connection = Connection(self, sidecar, self.world.next_number())
                self._connection = connection
                hello = wire.Hello(
                    job=self.world.job, launch_id=self.launch.id, rank=self.rank, world=self.launch.size, pid=1
                )
                for frame in (hello, *self._said.all()):
                    connection.to_sidecar(frame)
            await asyncio.sleep(0.3)

    def _send(self, frame: wire.FromHook) -> None:
        if self._connection is not None:
            self._connection.to_sidecar(frame)

    def heard(self, connection: Connection, frame: wire.FromSidecar) -> None:
        """Take a frame."""
        if connection is not self._connection:
            return
        match frame:
            case wire.Slot():
                self._lend(frame)
            case wire.Desired():
                self._desired = frame
                self._look()
            case wire.Welcome():
                self._welcome = frame
            case _:
                self._heard.append(frame)
        self._news.set()

    def lost(self, connection: Connection) -> None:
        """Learn that the connection has ended: what was lent over it and not begun is forgotten."""
        if connection is self._connection:
            self._connection, self._welcome = None, None
            self._free.clear()
            self.world.trace.sometimes("a trainer lost its sidecar")

    def _lend(self, frame: wire.Slot) -> None:
        file = self.node.memory.at(frame.path)
        if file is None or (file.holder() is not None and file.lock is not self.process):
            return
        file.lock = self.process
        sealed = self._said.sealed.get(frame.slot)
        if sealed is not None and sealed.seq != frame.seq:
            del self._said.sealed[frame.slot]
        self._free = deque(grant for grant in self._free if grant.frame.slot != frame.slot)
        self._free.append(Grant(frame, file))

    async def _wait_for(self, kind: type[_F], *, uid: str, phase: str, timeout_s: float) -> _F | wire.Go | wire.Error:
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    while self._heard:
                        frame = self._heard.popleft()
                        if wire.answers(frame, kind, uid=uid, phase=phase):
                            return frame  # type: ignore[return-value]
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError as error:
            raise EndedError(f"no word of {kind.__name__} for {timeout_s:g} s") from error

    # Restoring

    async def _main(self) -> None:
        while self._welcome is None:
            self._news.clear()
            await self._news.wait()
        members = tuple(await self.launch.group.gather(self.rank, self._member()))
        for round_number in range(16):
            attempt = await self._opened(members, round_number)
            try:
                with self.world.trace.phase("restore", (attempt.uid, attempt.from_step, self.rank)):
                    await self._enter(attempt)
            except _NextRoundError as reason:
                self.world.trace.sometimes("another round was asked for")
                self.world.trace.note(self.process.name, f"asks for another round: {reason}")
                continue
            await self._train(attempt)
        raise EndedError("no attempt could begin")

    def _member(self) -> wire.Member:
        assert self._welcome is not None
        return wire.Member(rank=self.rank, node=self._welcome.node, boot_id=self._welcome.boot_id)

    async def _opened(self, members: tuple[wire.Member, ...], round_number: int) -> wire.Attempt:
        answer: wire.Attempt | str = ""
        if self.rank == 0:
            request = wire.Open(
                launch_id=self.launch.id, round=round_number, world=members, spec={"model": "simulated"}, versions={}
            )
            answer = await self._ask(request)
        answer = (await self.launch.group.gather(self.rank, answer))[0]
        if isinstance(answer, str):
            raise EndedError(answer)
        return answer

    async def _ask(self, request: wire.Open) -> wire.Attempt | str:
        end_s = self.world.loop.time() + _RETRY_FOR_S
        while self.world.loop.time() < end_s:
            self._said.open = request
            self._send(request)
            answer = await self._wait_for(wire.Attempt, uid=self.launch.id, phase="", timeout_s=_RETRY_FOR_S)
            if isinstance(answer, wire.Attempt) and answer.round == request.round:
                return answer
            if isinstance(answer, wire.Error):
                self.world.trace.sometimes(f"a launch was answered {answer.code}")
                if answer.code not in {"busy", "unavailable"}:
                    self.world.trace.note(self.process.name, f"{answer.code}: {answer.text}")
                    return f"{answer.code}: {answer.text}"
                await asyncio.sleep(1.0)
        return "no attempt was opened in time"

    async def _enter(self, attempt: wire.Attempt) -> None:
        self._said.open, self._said.verdict, self._said.ask = None, None, None
        self.restoring = True
        wants = tuple(wire.Want(rank=rank, tensors=(wire.ALL,)) for rank in range(attempt.source_world))
        self._said.join = wire.Join(attempt_uid=attempt.uid, ask=1, wants=wants)
        self._send(self._said.join)
        staged = await self._wait_for(wire.Staged, uid=attempt.uid, phase="1", timeout_s=_PHASE_S)
        if not isinstance(staged, wire.Staged):
            raise _end(staged)
        mapped = [(one, self.node.opened(one.path)) for one in staged.shards]
        await self._agree(attempt, "staged")
        images = [(one.rank, read()[: one.bytes]) for one, read in mapped if read is not None]
        if len(images) < len(mapped):
            raise EndedError("what was staged was gone before it was opened")
        self.world.oracle.on_restored(attempt_uid=attempt.uid, rank=self.rank, images=images)
        await self._agree(attempt, "applied", fatal=True)

    async def _agree(self, attempt: wire.Attempt, phase: str, *, fatal: bool = False) -> None:
        self._said.verdict = wire.Verdict(attempt_uid=attempt.uid, phase=phase, ok=True)
        self._send(self._said.verdict)
        answer = await self._wait_for(wire.Go, uid=attempt.uid, phase=phase, timeout_s=_PHASE_S)
        if not isinstance(answer, wire.Go) or not answer.ok:
            if fatal:
                raise EndedError(f"the attempt failed while it was applied: {answer}")
            raise _end(answer)

    # Training

    async def _train(self, attempt: wire.Attempt) -> None:
        self.step, self.in_training, self.restoring = attempt.from_step, True, False
        self.world.oracle.on_training(attempt.uid)
        self.world.trace.note(self.process.name, f"trains from step {self.step} of attempt {attempt.number}")
        schedule, self._attempt = attempt.schedule, attempt
        while True:
            await asyncio.sleep(self.world.options.step_s)
            await self.launch.group.gather(self.rank, None)
            self.step += 1
            for frame in self._heard:
                if isinstance(frame, wire.Error) and frame.code == "superseded":
                    self._end_training(attempt, frame.text)
                if isinstance(frame, wire.Go) and not frame.ok and frame.attempt_uid == attempt.uid:
                    self._end_training(attempt, frame.reason)
            self._heard.clear()
            desired = self._desired
            if desired is not None and desired.attempt > attempt.number:
                self._end_training(attempt, f"attempt {desired.attempt} was opened")
            if self._said.size is None:
                size = len(image_of(attempt, step=self.step, rank=self.rank, world=self.launch.size))
                self._said.size = wire.Size(bytes=size + _ROOM_BYTES)
                self._send(self._said.size)
            if asked := self._named_step(attempt) == self.step:
                self._reached = self.step
            if schedule.due(self.step) or asked:
                await self._save(attempt, asked=asked)
            await self._leave(attempt)

    # Leaving

    def notice(self) -> None:
        """Learn that this rank is to be ended soon."""
        if self._attempt is not None and self._noticed_s is None:
            self._noticed_s = self.world.loop.time()
            self._ask_for_a_step(self._attempt)

    def _named_step(self, attempt: wire.Attempt) -> int:
        desired = self._desired
        return desired.extra_step if desired is not None and desired.attempt_uid == attempt.uid else 0

    def _look(self) -> None:
        """Take in which step all are to save and end at; one that is over here calls for another one."""
        attempt = self._attempt
        extra = self._named_step(attempt) if attempt is not None else 0
        if attempt is None or not extra:
            return
        if self._noticed_s is None:
            self._noticed_s = self.world.loop.time()
        if extra <= self.step and extra not in {self._reached, self._late}:
            self._late = extra
            self.world.trace.sometimes("a step to end at was heard of too late")
            self._send(wire.Skipped(attempt_uid=attempt.uid, step=extra, reason="heard too late"))
            self._ask_for_a_step(attempt)

    def _ask_for_a_step(self, attempt: wire.Attempt) -> None:
        ahead_s = self.world.loop.rng.choice(_AGREE_S)
        step = self.step + max(1, math.ceil(ahead_s / self.world.options.step_s))
        self._said.ask = wire.Ask(attempt_uid=attempt.uid, after=self.step, step=step)
        self._send(self._said.ask)

    async def _leave(self, attempt: wire.Attempt) -> None:
        """End here if this is the step, or if there will be none."""
        self._look()
        if self._noticed_s is None:
            return
        if self._reached == self.step:
            await self._drain(attempt, since_s=self._noticed_s)
        elif self._named_step(attempt) <= self.step:
            if self.world.loop.time() - self._noticed_s > _GRACE_S:
                raise PreemptedError("no step to end at was named in time")
            if self._said.ask is None or self._said.ask.step <= self.step:
                self._ask_for_a_step(attempt)

    async def _drain(self, attempt: wire.Attempt, *, since_s: float) -> None:
        """Wait until the step is safe elsewhere; return if all are to go on to a later one."""
        while self.world.loop.time() - since_s <= _GRACE_S:
            desired = self._desired
            if desired is not None and desired.attempt > attempt.number:
                self._end_training(attempt, f"attempt {desired.attempt} was opened")
            if self._named_step(attempt) > self.step:
                self.world.trace.sometimes("ranks went on to a later step to end at")
                return
            if desired is not None and max(desired.protected_step, desired.ready_step) >= self.step:
                self.world.oracle.on_left(attempt_uid=attempt.uid, rank=self.rank, step=self.step)
                raise PreemptedError(f"step {self.step} is safe")
            await asyncio.sleep(0.1)
        raise PreemptedError(f"step {self.step} was not safe in time")

    def _end_training(self, attempt: wire.Attempt, why: str) -> None:
        self.world.trace.sometimes("a live launch was superseded")
        self.world.oracle.on_told_to_end(attempt_uid=attempt.uid, rank=self.rank, why=why)
        raise EndedError(f"superseded: {why}")

    async def _save(self, attempt: wire.Attempt, *, asked: bool) -> None:
        step = self.step
        if self._welcome is None or not self._free:
            self.world.trace.sometimes("a due step was skipped")
            self._send(wire.Skipped(attempt_uid=attempt.uid, step=step, reason="no free slot"))
            return
        grant = self._free.popleft()
        frame, file = grant.frame, grant.file
        image = image_of(attempt, step=step, rank=self.rank, world=self.launch.size)
        page = Page(
            state=SlotState.WRITING,
            seq=frame.seq,
            launch_id=self.launch.id,
            rank=self.rank,
            world=self.launch.size,
            attempt=attempt.number,
            attempt_uid=attempt.uid,
            step=step,
            asked=asked,
        )
        rng, half = self.world.loop.rng, len(image) // 2
        with self.world.trace.phase("shm copy", (attempt.uid, step, self.rank)):
            file.page = page
            await asyncio.sleep(rng.uniform(0.0, _COPY_S))
            file.data[:half] = image[:half]
            self.world.at("copy")
            await asyncio.sleep(rng.uniform(0.0, _COPY_S))
            file.data[half : len(image)] = image[half:]
            file.flipped = False
            self.world.oracle.on_sealed((attempt.uid, step, self.rank), image)
            file.page = replace(page, state=SlotState.SEALED, bytes=len(image))
        self.world.trace.note(self.process.name, f"sealed step {step} in slot {frame.slot}", step=step)
        sealed = wire.Sealed(slot=frame.slot, seq=frame.seq, attempt_uid=attempt.uid, step=step, bytes=len(image))
        self._said.sealed[frame.slot] = sealed
        self._send(sealed)


class Launch:
    """One launch of all ranks, under one launch id."""

    def __init__(self, world: World, number: int, places: list[Node]) -> None:
        self.number = number
        self.id = world.loop.rng.randbytes(16).hex()
        options = world.options
        nodes = [node for node in places for _ in range(options.ranks_per_node)]
        self.size = len(nodes)
        self.group = Group(self.size)
        self.ranks = [Rank(world, self, rank, node) for rank, node in enumerate(nodes)]
        self.over = asyncio.Event()
        for rank in self.ranks:
            rank.process.at_death(self.over.set)

    def start(self) -> None:
        """Begin."""
        for rank in self.ranks:
            rank.start()

    def end(self) -> None:
        """Kill what still runs; a paused rank can't be killed just now: a zombie."""
        for rank in self.ranks:
            if rank.process.held is None:
                rank.process.kill()

    def step(self) -> int:
        """Return the step that all ranks train at, 0 while one does not."""
        ready = all(rank.in_training and rank.process.alive for rank in self.ranks)
        return min(rank.step for rank in self.ranks) if ready else 0


def _end(answer: object) -> Exception:
    if isinstance(answer, wire.Go) and not answer.ok:
        return _NextRoundError(answer.reason)
    return EndedError(str(answer))
