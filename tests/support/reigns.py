"""A coordinator's core with a world around it that a test steers: log in memory, nodes as values, time as a number."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from tests.support.fake_store import FakeStore

from toprope.coordinator import spec as specs
from toprope.coordinator.basing import make_base
from toprope.coordinator.core import Core, Settings
from toprope.coordinator.effects import (
    Answer,
    Append,
    Commit,
    Effect,
    Enter,
    Learn,
    Prepare,
    Probe,
    Publish,
    ReadAhead,
    ReadBackHere,
    Say,
    Tidy,
)
from toprope.coordinator.events import (
    Asked,
    CommitFailed,
    EnterEnded,
    Event,
    Heard,
    Hinted,
    Learned,
    LogMoved,
    LogReached,
    OpenFailed,
    Prepared,
    Probed,
    ReadHere,
    Ticked,
)
from toprope.coordinator.intents import CommitStep, OpenAttempt, ReadIndexes, make_attempt, make_ready, make_spec
from toprope.coordinator.log_view import LogView
from toprope.coordinator.moment import moment
from toprope.coordinator.overview import Overview, overview
from toprope.coordinator.provisional import make_entry
from toprope.coordinator.restore_choice import Offer, Stored
from toprope.coordinator.wire import (
    Adopted,
    AttemptView,
    Cadence,
    Copy,
    Desired,
    Inventory,
    Member,
    OpenAnswer,
    OpenRequest,
    Presence,
    Provisional,
    RankState,
    RankVerdict,
    ReadBack,
    Skip,
    Tier,
)
from toprope.store.checkpoint import manifest
from toprope.store.log.chain import append
from toprope.store.log.fold import JobState
from toprope.store.log.records import AttemptFacts, Base, Elected, Job, Record

JOB = "job"
SPEC = {"model": {"w": ["float32", [4]]}}
LAUNCH = "1a" * 16


def digest(attempt_uid: str, step: int, rank: int) -> str:
    """Return the digest that tests give to a shard."""
    return manifest.sha256(f"{attempt_uid} {step} {rank}".encode())[:32]


def copy_of(  # noqa: PLR0913 - what a copy consists of
    attempt_uid: str, step: int, rank: int, tier: Tier, *, world: int = 2, attempt: int = 1, digest_is: str = ""
) -> Copy:
    """Return a copy as a sidecar lists it, right unless the fields say otherwise."""
    stem = f"job/shards/a{attempt}/s{step}/rank-{rank}"
    listed: dict[str, Any] = {
        "key": f"{stem}-0a",
        "nonce": "0a",
        "index_key": f"{stem}.index",
        "index_sha256": "1d" * 32,
        "stored_bytes": 100,
        "stored_digest": digest_is or digest(attempt_uid, step, rank),
    }
    return Copy(
        attempt=attempt,
        attempt_uid=attempt_uid,
        step=step,
        rank=rank,
        world=world,
        tier=tier,
        bytes=100,
        digest=digest_is or digest(attempt_uid, step, rank),
        **(listed if tier == "object" else {}),
    )


def shown(core: Core, *, broker: str = "none", now_s: float) -> Overview:
    """Return what ``ckpt status`` is told."""
    slices = overview(moment(core, broker=broker, now_s=now_s))
    while True:
        try:
            next(slices)
        except StopIteration as done:
            view: Overview = done.value
            return view


@dataclass
class FakeNode:
    """A sidecar as the coordinator sees it. Each ``say`` is a new version of its inventory."""

    name: str
    job_uid: str
    boot_id: str = ""
    incarnation: str = ""
    domain: dict[str, str] = field(default_factory=dict)
    up: bool = True
    url: str = ""
    version: int = 0
    reading: bool = False
    ranks: dict[int, RankState] = field(default_factory=dict)
    copies: list[Copy] = field(default_factory=list)
    skipped: list[Skip] = field(default_factory=list)
    read_backs: list[ReadBack] = field(default_factory=list)
    adopted: list[Provisional] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.boot_id = self.boot_id or manifest.sha256(self.name.encode())[:32]
        self.incarnation = self.incarnation or manifest.sha256(f"{self.name} 1".encode())[:32]

    def inventory(self) -> Inventory:
        return Inventory(
            job=JOB,
            job_uid=self.job_uid,
            node=self.name,
            boot_id=self.boot_id,
            incarnation=self.incarnation,
            version=self.version,
            url=self.url or f"http://{self.name}",
            domain=self.domain,
            ranks=tuple(rank for _, rank in sorted(self.ranks.items())),
            copies=tuple(self.copies),
            skipped=tuple(self.skipped),
            read_backs=tuple(self.read_backs),
            adopted=tuple(Adopted(number=one.number, uid=one.uid) for one in self.adopted),
            reading=self.reading,
        )

    def say(self) -> Inventory:
        self.version += 1
        return self.inventory()


@dataclass
class Reign:
    """One term of a coordinator over ``job``. ``nodes`` are the sidecars; those that are ``up`` answer probes."""

    store: FakeStore = field(default_factory=FakeStore)
    nodes: dict[str, FakeNode] = field(default_factory=dict)
    settings: Settings = field(
        default_factory=lambda: Settings(
            job=JOB, url="http://c", cadence=Cadence(from_step=0, every=2, local_every=4, object_every=8)
        )
    )
    damaged: dict[int, str] = field(default_factory=dict)
    now_s: float = 0.0
    readies: dict[int, CommitStep] = field(default_factory=dict)
    base: Base | None = None
    base_damage: str = ""
    log_up: bool = True
    unsure: bool = False
    held_back: set[type[Effect]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.published: list[Desired] = []
        self.answers: dict[int, OpenAnswer] = {}
        self.said: list[Say] = []
        self.waiting: deque[Effect] = deque()
        self.requests = 0
        self.tidied = 0
        self.read_ahead: list[ReadIndexes] = []
        self.state = JobState(job=JOB)
        self.term = 0
        self.writer_id = f"c{len(self.store.objects)}"
        self.kept_back: list[Effect] = []
        self._append(lambda state: Job(uid="0b" * 16, name=JOB) if state.n == 0 else None)
        self._append(lambda _: Elected())
        self.term = self.state.term
        if self.base is not None:
            self._append(functools.partial(make_base, base=self.base))
        self.core = Core(self.settings, self._log_view(), now_s=self.now_s)
        self.do(Ticked(now_s=self.now_s))

    def successor(self) -> Reign:
        """Return the next term, of a coordinator that knows only the store; it has heard nobody yet."""
        after = Reign.__new__(Reign)
        Reign.__init__(
            after,
            store=self.store,
            nodes=self.nodes,
            settings=self.settings,
            damaged=self.damaged,
            now_s=self.now_s,
            readies=self.readies,
            base=self.base,
            base_damage=self.base_damage,
        )
        return after

    # --- the world

    def node(
        self, name: str, *, boot_id: str = "", incarnation: str = "", domain: dict[str, str] | None = None
    ) -> FakeNode:
        """Add a node, or a new life of it, and let it be heard."""
        self.nodes[name] = FakeNode(
            name=name, job_uid=self.state.job_uid, boot_id=boot_id, incarnation=incarnation, domain=domain or {}
        )
        self.hear(name)
        return self.nodes[name]

    def hear(self, *names: str) -> None:
        """Let nodes publish what they hold."""
        for name in names or tuple(name for name, node in sorted(self.nodes.items()) if node.up):
            self.do(Heard(inventory=self.nodes[name].say(), live=False, now_s=self.now_s))

    def lose(self, name: str) -> None:
        """A node dies: its last will comes, and it does not answer."""
        node = self.nodes[name]
        node.up = False
        presence = Presence(node=name, boot_id=node.boot_id, incarnation=node.incarnation, alive=False)
        self.do(Hinted(presence=presence, now_s=self.now_s))

    def wait(self, seconds: float) -> None:
        """Let time pass, half a second at a time."""
        for _ in range(round(seconds * 2)):
            self.now_s += 0.5
            self.do(Ticked(now_s=self.now_s))

    def ask(
        self, *places: str, launch_id: str = LAUNCH, round_number: int = 0, spec: dict[str, Any] | None = None
    ) -> OpenAnswer | None:
        """Ask for an attempt whose ranks sit on these nodes, rank 0 first."""
        world = tuple(
            Member(rank=rank, node=name, boot_id=self.nodes[name].boot_id if name in self.nodes else "00")
            for rank, name in enumerate(places)
        )
        return self.request(
            OpenRequest(
                job=JOB,
                launch_id=launch_id,
                round=round_number,
                world=world,
                spec=spec or SPEC,
                versions={"torch": "2"},
            )
        )

    def request(self, request: OpenRequest) -> OpenAnswer | None:
        """Ask for an attempt; None: there is no answer yet."""
        self.requests += 1
        number = self.requests
        self.do(Asked(request_id=number, request=request, now_s=self.now_s))
        return self.answers.get(number)

    def hold(self, step: int, *, tiers: tuple[Tier, ...] = ("memory",), ranks: tuple[int, ...] = (0, 1)) -> None:
        """Let each rank's node hold its shard of a step in these tiers; a peer's copy lies on the other node."""
        attempt = self.state.attempt
        assert attempt is not None
        facts = self.core.log_view.facts
        assert facts is not None
        for member in facts.world:
            if member.rank not in ranks:
                continue
            for tier in tiers:
                others = [name for name in sorted(self.nodes) if name != member.node]
                name = others[0] if tier == "peer" else member.node
                self.nodes[name].copies.append(
                    copy_of(attempt.uid, step, member.rank, tier, world=attempt.world_size, attempt=attempt.attempt)
                )
        self.hear()

    def verdict(
        self,
        phase: Literal["staged", "applied"],
        *,
        ranks: tuple[int, ...] = (0, 1),
        ok: bool = True,
        reason: str = "",
        misfit: bool = False,
        unanswered: bool = False,
    ) -> None:
        """Let ranks of the current attempt tell their verdict."""
        attempt, facts = self.state.attempt, self.core.log_view.facts
        assert attempt is not None
        assert facts is not None
        for member in facts.world:
            if member.rank in ranks:
                self.nodes[member.node].ranks[member.rank] = RankState(
                    rank=member.rank,
                    world=attempt.world_size,
                    launch_id=attempt.launch_id,
                    attempt_uid=attempt.uid,
                    step=attempt.from_step,
                    lock_held=True,
                    verdict=RankVerdict(
                        attempt_uid=attempt.uid,
                        phase=phase,
                        ok=ok,
                        reason=reason,
                        misfit=misfit,
                        unanswered=unanswered,
                    ),
                )
        self.hear()

    def verdict_of(self, view: AttemptView, *, ok: bool = True, reason: str = "") -> None:
        """Let all ranks of an attempt, in the log or not, tell that they have applied it, or why they could not."""
        for member in view.world:
            verdict = RankVerdict(attempt_uid=view.uid, phase="applied" if ok else "staged", ok=ok, reason=reason)
            self.nodes[member.node].ranks[member.rank] = RankState(
                rank=member.rank,
                world=len(view.world),
                launch_id=view.launch_id,
                attempt_uid=view.uid,
                step=view.from_step,
                lock_held=True,
                verdict=verdict,
            )
        self.hear()

    def end_trainers(self) -> None:
        """All trainers die: their locks are free."""
        for node in self.nodes.values():
            node.ranks = {
                rank: msgspec.structs.replace(state, lock_held=False, verdict=None)
                for rank, state in node.ranks.items()
            }
        self.hear()

    def log_away(self, why: str = "no answer") -> None:
        """Let the log be out of reach, or with an empty ``why`` be there again."""
        self.log_up = not why
        self.do(LogReached(why=why, now_s=self.now_s))

    def adopt(self, *names: str) -> None:
        """Let nodes adopt what is proposed."""
        proposed = self.desired.proposed
        assert proposed is not None
        for name in names:
            self.nodes[name].adopted.append(proposed)
            self.hear(name)

    def read_back(self, *, spoil: str = "") -> None:
        """Let nodes do the read-backs that are wanted of them; the object of key ``spoil`` has another digest."""
        for task in self.desired.read_backs:
            ok = task.key != spoil
            self.nodes[task.node].read_backs.append(
                ReadBack(key=task.key, digest=task.digest, ok=ok, found=task.digest if ok else "ff" * 16)
            )
        self.hear()

    @property
    def desired(self) -> Desired:
        """Return what was published last."""
        return self.published[-1]

    @property
    def ready_steps(self) -> list[int]:
        """Return the steps that are READY, oldest first."""
        return [ready.step for ready in self.state.readies.values()]

    # --- doing what the core wants

    def do(self, event: Event) -> None:
        """Tell the core, and do what it wants until nothing is left but what is ``held_back``."""
        self._tell(event)
        self._work()

    def release(self) -> None:
        """Do what was held back."""
        self.held_back = set()
        self.waiting.extend(self.kept_back)
        self.kept_back = []
        self._work()

    def _work(self) -> None:
        while self.waiting:
            effect = self.waiting.popleft()
            if type(effect) in self.held_back:
                self.kept_back.append(effect)
            else:
                self._perform(effect)

    def _tell(self, event: Event) -> None:
        self.waiting.extend(self.core.handle(event))

    def _perform(self, effect: Effect) -> None:  # noqa: C901 - one case per kind of effect
        match effect:
            case Publish():
                self.published.append(effect.desired)
            case Answer():
                self.answers[effect.request_id] = effect.answer
            case Say():
                self.said.append(effect)
            case Probe():
                self._tell(Probed(node=effect.node, inventory=self._probe(effect.node), now_s=self.now_s))
            case Prepare():
                self._tell(self._prepare(effect))
            case Append():
                self._tell(self._open(effect.intent))
            case Enter():
                self._enter(effect.attempt)
            case Learn():
                node = self.nodes[effect.node]
                adopted = tuple(node.adopted) if node.up else None
                self._tell(Learned(node=effect.node, adopted=adopted, now_s=self.now_s))
            case ReadAhead():
                self.read_ahead.append(effect.indexes)
            case Commit():
                self._tell(self._commit(effect.intent))
            case Tidy():
                self.tidied += 1
            case ReadBackHere():
                task = effect.task
                result = ReadBack(key=task.key, digest=task.digest, ok=True, found=task.digest)
                self._tell(ReadHere(key=task.key, result=result, now_s=self.now_s))

    def _probe(self, name: str) -> Inventory | None:
        node = self.nodes.get(name)
        return node.inventory() if node is not None and node.up else None

    def _prepare(self, effect: Prepare) -> Prepared:
        return Prepared(
            answers={name: self._probe(name) for name, _ in effect.nodes},
            offers=None
            if effect.ready_seqs is None or not self.log_up
            else (*(self._offer(seq) for seq in effect.ready_seqs), *self._base_offer()),
            uid=manifest.sha256(f"attempt {self.state.attempt_number + 1} {self.requests}".encode())[:32],
            why="" if self.log_up else "no answer",
            unsure=self.unsure,
            now_s=self.now_s,
        )

    def _enter(self, one: Provisional) -> None:
        if self.log_up:
            body = manifest.encode(one.facts)
            self.store.objects[f"facts/{manifest.sha256(body)}"] = body  # type: ignore[index] # a short key will do
            self._append(lambda state: make_entry(state, one))
            self._tell(LogMoved(log_view=self._log_view(), now_s=self.now_s))
        self._tell(EnterEnded(now_s=self.now_s))

    def _offer(self, seq: int) -> Offer:
        ready = self.state.readies[seq]
        receipts = self.readies[seq].receipts
        shards = tuple(Stored(key=one.copy.index_key, bytes=one.copy.bytes, digest=one.copy.digest) for one in receipts)
        return Offer(
            seq=seq,
            attempt=ready.attempt,
            attempt_uid=ready.attempt_uid,
            step=ready.step,
            shards=() if seq in self.damaged else shards,
            damage=self.damaged.get(seq, ""),
        )

    def _base_offer(self) -> tuple[Offer, ...]:
        if self.base is None:
            return ()
        uid, step = self.base.snapshot
        shards = tuple(
            Stored(key=f"other/rank-{rank}.index", bytes=100, digest=digest(uid, step, rank))
            for rank in range(self.base.world)
        )
        damage = self.base_damage
        return (Offer(seq=None, attempt=0, attempt_uid=uid, step=step, shards=() if damage else shards, damage=damage),)

    def _open(self, intent: OpenAttempt) -> Event:
        if not self.log_up:
            return OpenFailed(uid=intent.uid, text="the log does not answer", again=False, now_s=self.now_s)
        spec_sha256 = specs.name(intent.spec)
        body = manifest.encode(intent.facts)
        self.store.objects[f"facts/{manifest.sha256(body)}"] = body  # type: ignore[index] # a short key will do
        self.store.objects[f"facts/{spec_sha256}"] = specs.encode(intent.spec)  # type: ignore[index] # the same
        self._append(functools.partial(make_spec, spec_sha256=spec_sha256))
        opened = self._append(
            lambda state: make_attempt(state, intent, spec_sha256=spec_sha256, facts_sha256=manifest.sha256(body))
        )
        if not opened:
            return OpenFailed(uid=intent.uid, text="moved", again=True, now_s=self.now_s)
        return LogMoved(log_view=self._log_view(), now_s=self.now_s)

    def _commit(self, intent: CommitStep) -> Event:
        seq = self.state.n
        if not self._append(lambda state: make_ready(state, intent, manifest_sha256="3a" * 32)):
            return CommitFailed(
                attempt_uid=intent.attempt_uid, step=intent.step, text="moved", final=True, now_s=self.now_s
            )
        self.readies[seq] = intent
        return LogMoved(log_view=self._log_view(), now_s=self.now_s)

    def _append(self, make: Callable[[JobState], Record | None]) -> bool:
        done = append(self.store, self.state, make, term=self.term, writer_id=self.writer_id)
        self.state = done.state
        return done.seq is not None

    def lost_append(self) -> OpenAttempt:
        """Return the attempt whose append is held back, which is not done any more."""
        (append,) = self.kept_back
        assert isinstance(append, Append)
        self.kept_back.clear()
        return append.intent

    def append_record(self, record: Record) -> None:
        """Append a record as somebody of this term would, and let the core know."""
        self._append(lambda _: record)
        self.do(LogMoved(log_view=self._log_view(), now_s=self.now_s))

    def _log_view(self) -> LogView:
        attempt = self.state.attempt
        facts = None
        if attempt is not None:
            body = self.store.objects[f"facts/{attempt.facts_sha256}"]  # type: ignore[index] # a short key will do
            facts = msgspec.json.decode(body, type=AttemptFacts)
        offer = self._offer(attempt.ready) if attempt is not None and attempt.ready is not None else None
        if attempt is not None and self.state.is_base(self.state.source_of(attempt)):
            (offer,) = self._base_offer()
        return LogView(state=self.state, spec=self._spec(), facts=facts, offer=offer)

    def _spec(self) -> dict[str, Any] | None:
        if self.state.spec_sha256 is None:
            return None
        body = self.store.objects[f"facts/{self.state.spec_sha256}"]  # type: ignore[index] # a short key will do
        decoded: dict[str, Any] = msgspec.json.decode(body)
        return decoded


def two_nodes() -> Reign:
    """Return a reign over two living nodes, a and b."""
    reign = Reign()
    reign.node("a")
    reign.node("b")
    return reign


def training() -> Reign:
    """Return a reign over a fresh attempt of two ranks, on nodes a and b, that trains."""
    reign = two_nodes()
    assert reign.ask("a", "b") is not None
    reign.verdict("staged")
    reign.verdict("applied")
    return reign
