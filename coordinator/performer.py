"""Does what the core wants done, and tells it what came of it. One loop, one core, calls to it never overlap."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import assert_never

from toprope.coordinator import spec
from toprope.coordinator.basing import make_base
from toprope.coordinator.committing import Committer
from toprope.coordinator.config import Config
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
    Connected,
    Declared,
    Event,
    Heard,
    Hinted,
    LogMoved,
    LogReached,
    Probed,
    ReadHere,
    SeenDesired,
    Ticked,
)
from toprope.coordinator.extracts import Extracts
from toprope.coordinator.intents import (
    CommitStep,
)
from toprope.coordinator.log import Log
from toprope.coordinator.metrics import Metrics
from toprope.coordinator.moment import Moment, moment
from toprope.coordinator.opener import Opener
from toprope.coordinator.overview import Overview, Slices, overview
from toprope.coordinator.pacing import Pacing
from toprope.coordinator.ports import BrokerPort, Document, Ports
from toprope.coordinator.reading import Reader
from toprope.coordinator.serving import told
from toprope.coordinator.tidying import Tidier
from toprope.coordinator.wire import (
    Desired,
    Health,
    Inventory,
    OpenAnswer,
    OpenRequest,
    Presence,
    ReadBack,
    ReadBackTask,
)
from toprope.store.checkpoint import manifest
from toprope.store.errors import StoreError, UnavailableError, UsageError
from toprope.store.keep.changes import Change, ChangeAnswer, ChangeRequest, OtherStoreError, checked, make_policy
from toprope.store.log.fold import JobState
from toprope.store.log.records import Base, Record
from toprope.store.names import Key, facts_key

_LOG = logging.getLogger("toprope.coordinator")
_OPEN_TIMEOUT_S = 60.0
_CANCEL_AGAIN_S = 0.5
STANDBY_FORGOTTEN_S = 5.0
BROKER_TOPICS = ("nodes/+/inventory", "nodes/+/presence", "desired")


class Coordinator:
    """One reign: what a coordinator does from its election until it ends, or another one is elected."""

    def __init__(
        self,
        config: Config,
        *,
        metrics: Metrics,
        base: Base | None = None,
        wall_s: Callable[[], int] | None = None,
    ) -> None:
        """``wall_s`` tells the wall time in seconds since 1970, which is recorded and decides nothing here."""
        self.config = config
        self.metrics = metrics
        self.core: Core | None = None
        self.read_s = 0.0
        """When the log was last read to its end."""
        self.standbys: dict[str, float] = {}
        """The coordinators that stand by, by url, and when each last asked."""
        self._wall_s = wall_s or _wall_s
        self._base = base
        self._over = False
        self._broker: BrokerPort | None = None
        self._waiting: dict[int, asyncio.Future[OpenAnswer]] = {}
        self._requests = 0
        self._news = asyncio.Event()
        self._changed = asyncio.Condition()
        self._pacing = Pacing()
        self._decision: asyncio.TimerHandle | None = None
        self._extracts: Extracts | None = None
        self._unreachable = ""

    def gauge(self) -> bool:
        """Set the gauges of the job to what they are now; return whether that is known yet."""
        if self.core is None:
            return False
        known, gauges = self._moment(self.core), self.metrics
        gauges.term.set(known.term)
        gauges.attempt.set(known.log_view.state.attempt_number)
        gauges.protected_step.set(known.protected_step)
        gauges.protected_age_s.set(known.protected_age_s)
        gauges.ready_step.set(known.log_view.ready_step)
        gauges.nodes_alive.set(sum(node.alive for node in known.nodes))
        gauges.placements_unmet.set(len(known.plan.unmet))
        gauges.broker_connected.set(known.broker == "connected")
        gauges.log_away_s.set(known.log_away_s)
        gauges.provisional.set(known.provisional)
        gauges.attempts_fenced.set(len(self.core.outage.fenced))
        return True

    # --- what the HTTP server asks ---------------------------------------------------------------------------------

    def heard(self, inventory: Inventory) -> None:
        """Take in an inventory whose sender is there."""
        self._post(Heard(inventory=inventory, live=True, now_s=_now_s()))

    def desired(self, *, node: str = "") -> Desired | None:
        """Return how the job is wanted to be: all of it, or what a node needs."""
        cut = self._cut()
        return None if cut is None else cut.of(node) if node else cut.whole

    def _cut(self) -> Extracts | None:
        """Return the extracts of the newest Desired, which is cut once for all."""
        whole = self.core.desired if self.core is not None else None
        if whole is not None and (self._extracts is None or self._extracts.whole is not whole):
            self._extracts = Extracts(whole)
        return self._extracts

    def _newest(self) -> Extracts:
        cut = self._cut()
        assert cut is not None, "there was one"
        return cut

    async def desired_after(self, term: int, version: int) -> None:
        """Return once there is a Desired newer than (term, version), or the reign is over."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._over or self._is_after(term, version))

    def _is_after(self, term: int, version: int) -> bool:
        desired = self.desired()
        return desired is not None and (desired.term, desired.version) > (term, version)

    async def _remember_spec(self, request: OpenRequest) -> None:
        """Keep a spec that was refused, so that a person can look at it and accept it."""
        body = spec.encode(request.spec)
        try:
            await self._ports.store.create_facts(facts_key(self.config.job, manifest.sha256(body)), body)
        except UnavailableError as error:
            _LOG.warning("the spec that was refused could not be kept: %s", error)

    async def change(self, asked: ChangeRequest) -> ChangeAnswer:
        """Append a change of the job that a person asks for; raises as ``changes.checked`` and ``Log.append``.

        Raises:
            OtherStoreError: it is asked of another store, a copy of this one; the message is where this one is.
        """
        if self.core is None:
            raise UnavailableError("the coordinator is still reading the log")
        if asked.job_uid != self._log.state.job_uid:
            raise UsageError(f"this coordinator serves job {self.config.job} of another uid")
        if not await self._ports.store.sees_probe(asked.probe):
            raise OtherStoreError(self.config.store)
        done = await self._log.append(partial(self._changed_now, asked.change))
        await self._log_moved()
        return ChangeAnswer(seq=done.seq)

    def _changed_now(self, change: Change, state: JobState) -> Record | None:
        """Return the record of a change, unless an attempt must come into the log first that could not follow it."""
        if self._held_up():
            raise UnavailableError("an attempt that was opened without the log comes into it first: try again")
        return checked(state, change)

    def declare_dead(self, node: str) -> None:
        """Take in that a person says that a node is dead.

        Raises:
            UsageError: there is no such node.
            UnavailableError: this coordinator can't take it in: it reads the log yet, or leads no more.
        """
        if self.core is None:
            raise UnavailableError("the coordinator is still reading the log")
        if self._over:
            raise UnavailableError("this coordinator leads no more; ask again")
        if node not in (known := self.core.known_nodes()):
            raise UsageError(f"there is no node {node} in this job; there are: {', '.join(known) or 'none yet'}")
        self._post(Declared(node=node, now_s=_now_s()))

    async def open(self, request: OpenRequest) -> OpenAnswer:
        """Return the attempt for a launch, or why there is none."""
        if self.core is None:
            return OpenAnswer(code="unavailable", text="the coordinator is still reading the log")
        self._requests += 1
        number = self._requests
        answer: asyncio.Future[OpenAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._post(Asked(request_id=number, request=request, now_s=_now_s()))
        try:
            async with asyncio.timeout(_OPEN_TIMEOUT_S):
                answered = await answer
                if answered.code == "spec-mismatch":
                    await self._remember_spec(request)
                return answered
        except TimeoutError:
            return OpenAnswer(code="unavailable", text=f"no decision within {_OPEN_TIMEOUT_S:.0f} s")
        finally:
            self._waiting.pop(number, None)

    def status(self) -> Slices[Overview] | None:
        """Work out what is safe where by now; None while the log is still being read."""
        return None if self.core is None else overview(self._moment(self.core))

    def _moment(self, core: Core) -> Moment:
        broker = "none" if self._broker is None else ("connected" if self._broker.is_connected else "away")
        standbys = tuple(sorted(url for url, at_s in self.standbys.items() if _now_s() - at_s < STANDBY_FORGOTTEN_S))
        return moment(core, broker=broker, standbys=standbys, now_s=_now_s())

    # --- what the broker brings ------------------------------------------------------------------------------------

    def deliver(self, document: Document) -> None:
        """Take in a document from the broker."""
        match document:
            case Inventory():
                self._post(Heard(inventory=document, live=False, now_s=_now_s()))
            case Presence():
                self._post(Hinted(presence=document, now_s=_now_s()))
            case Desired():
                self._post(SeenDesired(desired=document, now_s=_now_s()))
            case Health():
                pass
            case _:
                assert_never(document)

    def connected(self) -> None:
        """Take in that the broker was reached."""
        self._post(Connected(now_s=_now_s()))

    # --- the reign -------------------------------------------------------------------------------------------------

    async def reign(
        self, ports: Ports, log: Log, *, url: str, stop: asyncio.Event, on_serving: Callable[[], None]
    ) -> None:
        """Serve from the election of ``log``'s writer until ``stop``; ``on_serving`` is called once it does.

        Raises:
            FencedError: another coordinator has been elected; it may come in a group.
        """
        self._ports, self._log, self.read_s = ports, log, _now_s()
        self._reader = Reader(ports.store, self.config.job)
        self._committer = Committer(ports.store, log, wall_s=self._wall_s)
        self._tidier = Tidier(ports.store, log, self.metrics, held_up=self._held_up)
        self._opener = Opener(
            ports,
            log,
            self._reader,
            self.metrics,
            post=self._post,
            moved=self._log_moved,
            known_n=self._known_n,
            held_up=self._held_up,
        )
        if self.config.retain is not None:
            await log.append(partial(make_policy, text=self.config.retain))
        if self._base is not None:
            await log.append(partial(make_base, base=self._base))
        settings = Settings(
            job=self.config.job,
            url=url,
            copies=self.config.copies,
            cadence=self.config.cadence,
            verdict_deadline_s=self.config.verdict_deadline_s,
            proceeds=self.config.on_log_outage == "proceed",
        )
        log_view = await self._reader.log_view(log.state, None)
        _LOG.info("job %s: elected for term %d; the log has %d records", log_view.state.job, log.term, log_view.state.n)
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self.core = Core(settings, log_view, now_s=_now_s())
            self._post(Ticked(now_s=_now_s()))
            self._broker = ports.connect(BROKER_TOPICS, deliver=self.deliver, connected=self.connected)
            running = [self._tick(), self._heartbeat(), self._publish(), self._tidier.run()]
            if self._broker is not None:
                running.append(self._broker.run())
            loops = {tasks.create_task(loop) for loop in running}
            on_serving()
            try:
                await stop.wait()
            finally:
                self._over = True
                self._committer.end()
                await ended(loops)
                await self._let_go()

    async def _let_go(self) -> None:
        """Answer all who wait for something of this reign, which is over."""
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_result(OpenAnswer(code="unavailable", text="this coordinator leads no more; ask again"))
        async with self._changed:
            self._changed.notify_all()

    def health(self, *, url: str) -> Health:
        """Return what this coordinator says of itself."""
        state = self._log.state
        return Health(
            job=state.job,
            job_uid=state.job_uid,
            role="leader",
            url=url,
            term=self._log.term,
            leader=url,
            log_s=round(_now_s() - self.read_s, 3),
        )

    def _post(self, event: Event) -> None:
        if self.core is None or self._over:
            return
        for effect in told(self._handle, event, tasks=self._tasks):
            self._perform(effect)

    def _handle(self, event: Event) -> tuple[Effect, ...]:
        """Tell the core of an event; what nodes say may wait until it is decided on together with more of the kind."""
        assert self.core is not None
        wait_s = self._pacing.wait_s(now_s=event.now_s) if isinstance(event, Heard | Hinted | Probed) else 0.0
        if wait_s > 0.0:
            if self._decision is None:
                self._decision = asyncio.get_running_loop().call_later(wait_s, self._decide)
            return tuple(self.core.take(event))
        began_s = _now_s()
        effects = self.core.handle(event)
        self._pacing.took(began_s, _now_s())
        return effects

    def _decide(self) -> None:
        self._decision = None
        self._post(Ticked(now_s=_now_s()))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.config.tick_s)
            self._post(Ticked(now_s=_now_s()))

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(self.config.heartbeat_s)
            try:
                await self._log.catch_up()
                self.read_s = _now_s()
                await self._log_moved()
                self._post(LogReached(why="", now_s=_now_s()))
                if self._broker is not None and self.core is not None:
                    await self._broker.beat(self.health(url=self.core.settings.url))
            except UnavailableError as error:
                if not self._unreachable:
                    _LOG.error("the job log can't be read: %s", error)
                self._unreachable = str(error)
                self._post(LogReached(why=str(error), now_s=_now_s()))
            else:
                if self._unreachable:
                    _LOG.info("the job log can be read again")
                self._unreachable = ""

    async def _publish(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            async with self._changed:
                self._changed.notify_all()
            if self._cut() is not None and self._broker is not None:
                await self._broker.publish(self._newest)

    async def _log_moved(self) -> None:
        assert self.core is not None
        if self._log.state.n != self.core.logged.state.n:
            log_view = await self._reader.log_view(self._log.state, self.core.logged)
            self._post(LogMoved(log_view=log_view, now_s=_now_s()))

    # --- doing -----------------------------------------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:  # noqa: C901, PLR0912 - one case per kind of effect
        match effect:
            case Publish():
                self._news.set()
            case Answer():
                self._answer(effect)
            case Say():
                _LOG.log(logging.getLevelNamesMapping()[effect.level.upper()], effect.text)
            case Probe():
                self._tasks.create_task(self._probe(effect))
            case Prepare():
                self._tasks.create_task(self._opener.prepare(effect))
            case Append():
                self._tasks.create_task(self._opener.open(effect.intent))
            case Enter():
                self._tasks.create_task(self._opener.enter(effect))
            case Learn():
                self._tasks.create_task(self._opener.learn(effect))
            case ReadAhead():
                self._committer.read_ahead(effect.indexes, wanted=effect.wanted, tasks=self._tasks)
            case Commit():
                self._tasks.create_task(self._commit(effect.intent))
            case Tidy():
                self._tidier.wake()
            case ReadBackHere():
                self._tasks.create_task(self._read_back(effect.task))
            case _:
                assert_never(effect)

    def _answer(self, effect: Answer) -> None:
        if effect.answer.attempt is None:
            self.metrics.requests_refused.inc()
            _LOG.warning("a launch was given no attempt: %s: %s", effect.answer.code, effect.answer.text)
        waiting = self._waiting.get(effect.request_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(effect.answer)

    async def _probe(self, effect: Probe) -> None:
        inventory = await self._ports.nodes.inventory(effect.url)
        self._post(Probed(node=effect.node, inventory=inventory, now_s=_now_s()))

    def _known_n(self) -> int:
        return self.core.logged.state.n if self.core is not None else 0

    def _held_up(self) -> bool:
        return self.core is not None and self.core.held_up

    async def _commit(self, intent: CommitStep) -> None:
        try:
            failure, final = await self._committer.committed(intent), True
        except UnavailableError as error:
            failure, final = str(error), False
        except StoreError as error:
            failure, final = str(error), True
        if not failure:
            await self._log_moved()
            self.metrics.steps_ready.inc()
        else:
            self.metrics.commits_failed.inc()
            self._post(
                CommitFailed(
                    attempt_uid=intent.attempt_uid, step=intent.step, text=failure, final=final, now_s=_now_s()
                )
            )

    async def _read_back(self, task: ReadBackTask) -> None:
        try:
            found = await self._ports.store.digest_uncached(Key(task.key))
        except UnavailableError as error:
            _LOG.warning("%s can't be read back: %s", task.key, error)
            found = None
        except StoreError as error:
            found = f"unreadable ({error})"
        result = None
        if found is not None:
            result = ReadBack(key=task.key, digest=task.digest, ok=found == task.digest, found=found)
        self._post(ReadHere(key=task.key, result=result, now_s=_now_s()))


async def ended(loops: set[asyncio.Task[None]]) -> None:
    """End what would go on for ever.

    Cancelled again until it has ended: in Python 3.11 ``wait_for``, which the MQTT client uses, loses a cancellation
    that comes at the moment of its result.
    """
    while loops:
        for loop in loops:
            loop.cancel()
        _, loops = await asyncio.wait(loops, timeout=_CANCEL_AGAIN_S)


def _wall_s() -> int:
    return int(datetime.now(UTC).timestamp())


def _now_s() -> float:
    return asyncio.get_running_loop().time()
