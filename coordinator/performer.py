"""Does what the core wants done, and tells it what came of it. One loop, one core, calls to it never overlap."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from typing import assert_never

import msgspec
from prometheus_client import CollectorRegistry

from toprope.coordinator import spec
from toprope.coordinator.adapters.mqtt import Document, Mqtt
from toprope.coordinator.basing import make_base
from toprope.coordinator.config import Config
from toprope.coordinator.core import Core, Settings
from toprope.coordinator.effects import (
    Answer,
    Append,
    Commit,
    Effect,
    Prepare,
    Probe,
    Publish,
    ReadBackHere,
    Say,
    Tidy,
)
from toprope.coordinator.events import (
    Asked,
    CommitFailed,
    Connected,
    Event,
    Heard,
    Hinted,
    LogMoved,
    OpenFailed,
    Prepared,
    Probed,
    ReadHere,
    SeenDesired,
    Ticked,
)
from toprope.coordinator.intents import (
    CommitStep,
    OpenAttempt,
    index_keys,
    make_attempt,
    make_manifest,
    make_ready,
    make_spec,
)
from toprope.coordinator.log import Log
from toprope.coordinator.log_view import LogView
from toprope.coordinator.metrics import Metrics
from toprope.coordinator.overview import Overview, overview
from toprope.coordinator.ports import Ports
from toprope.coordinator.restore_choice import Offer, Stored
from toprope.coordinator.tidying import Tidier
from toprope.coordinator.wire import Desired, Inventory, OpenAnswer, OpenRequest, Presence, ReadBack, ReadBackTask
from toprope.store.checkpoint import manifest
from toprope.store.checkpoint.manifest import Index, Shard
from toprope.store.errors import CorruptObjectError, StoreError, UnavailableError, UsageError
from toprope.store.keep.changes import ChangeAnswer, ChangeRequest, checked, make_policy
from toprope.store.log.records import AttemptFacts, Base, Ready
from toprope.store.names import Key, facts_key, manifest_key

_LOG = logging.getLogger("toprope.coordinator")
_OPEN_TIMEOUT_S = 60.0
_CANCEL_AGAIN_S = 0.5


class Coordinator:
    """One coordinator process. It is a ``Service`` of the HTTP adapter."""

    def __init__(self, config: Config, *, base: Base | None = None, wall_s: Callable[[], int] | None = None) -> None:
        """``wall_s`` tells the wall time in seconds since 1970, which is recorded and decides nothing here."""
        self.config = config
        self._wall_s = wall_s or _wall_s
        self._base = base
        self.metrics = Metrics()
        self.core: Core | None = None
        self.mqtt: Mqtt | None = None
        self._waiting: dict[int, asyncio.Future[OpenAnswer]] = {}
        self._requests = 0
        self._news = asyncio.Event()
        self._changed = asyncio.Condition()
        self._unreachable = ""

    @property
    def registry(self) -> CollectorRegistry:
        """Return the metrics, as they are now."""
        view = self.status()
        if view is not None:
            gauges = self.metrics
            gauges.term.set(view.term)
            gauges.attempt.set(view.attempt.number if view.attempt is not None else 0)
            gauges.protected_step.set(view.protected_step)
            gauges.protected_age_s.set(view.protected_age_s)
            gauges.ready_step.set(view.ready_step)
            gauges.nodes_alive.set(sum(node.alive for node in view.nodes))
            gauges.placements_unmet.set(len(self.core.placing.plan.unmet) if self.core is not None else 0)
            gauges.broker_connected.set(view.broker == "connected")
        return self.metrics.registry

    # --- what the HTTP server asks ---------------------------------------------------------------------------------

    def heard(self, inventory: Inventory) -> None:
        """Take in an inventory whose sender is there."""
        self._post(Heard(inventory=inventory, live=True, now_s=_now_s()))

    def desired(self) -> Desired | None:
        """Return how the job is wanted to be."""
        return self.core.desired if self.core is not None else None

    async def desired_after(self, term: int, version: int) -> None:
        """Return once there is a Desired newer than (term, version)."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_after(term, version))

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
        """Append a change of the job that a person asks for; raises as ``changes.checked`` and ``Log.append``."""
        if self.core is None:
            raise UnavailableError("the coordinator is still reading the log")
        if asked.job_uid != self._log.state.job_uid:
            raise UsageError(f"this coordinator serves job {self.config.job} of another uid")
        done = await self._log.append(lambda state: checked(state, asked.change))
        await self._log_moved()
        return ChangeAnswer(seq=done.seq)

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

    def status(self) -> Overview | None:
        """Return what is safe where; None while the log is still being read."""
        if self.core is None:
            return None
        broker = "none" if self.mqtt is None else ("connected" if self.mqtt.is_connected else "away")
        return overview(self.core, broker=broker, now_s=_now_s())

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
            case _:
                assert_never(document)

    def connected(self) -> None:
        """Take in that the broker was reached."""
        self._post(Connected(now_s=_now_s()))

    # --- the reign -------------------------------------------------------------------------------------------------

    async def reign(self, ports: Ports, *, url: str, stop: asyncio.Event, on_serving: Callable[[], None]) -> None:
        """Be elected, then serve until ``stop``; ``on_serving`` is called once it does.

        Raises:
            FencedError: another coordinator has been elected.
        """
        self._ports = ports
        writer_id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._log = Log(ports.store, self.config.job, writer_id=writer_id, url=url)
        await self._log.elect(job_uid=secrets.token_hex(16))
        self._tidier = Tidier(ports.store, self._log, self.metrics)
        if self.config.retain is not None:
            await self._log.append(partial(make_policy, text=self.config.retain))
        if self._base is not None:
            await self._log.append(partial(make_base, base=self._base))
        settings = Settings(
            job=self.config.job,
            url=url,
            cadence=self.config.cadence,
            verdict_deadline_s=self.config.verdict_deadline_s,
        )
        log_view = await self._log_view()
        _LOG.info(
            "job %s: elected for term %d; the log has %d records", log_view.state.job, self._log.term, log_view.state.n
        )
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self.core = Core(settings, log_view, now_s=_now_s())
            self._post(Ticked(now_s=_now_s()))
            loops = [
                tasks.create_task(loop)
                for loop in (self._tick(), self._heartbeat(), self._publish(), self._tidier.run())
            copies=self.config.copies,
            ]
            if self.mqtt is not None:
                loops.append(tasks.create_task(self.mqtt.run()))
            on_serving()
            await stop.wait()
            await _ended(set(loops))

    def _post(self, event: Event) -> None:
        if self.core is None:
            return
        try:
            effects = self.core.handle(event)
        except Exception as error:
            self._tasks.create_task(_raised(error))
            raise
        for effect in effects:
            self._perform(effect)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.config.tick_s)
            self._post(Ticked(now_s=_now_s()))

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(self.config.heartbeat_s)
            try:
                await self._log.catch_up()
                await self._log_moved()
            except UnavailableError as error:
                if not self._unreachable:
                    _LOG.error("the job log can't be read: %s", error)
                self._unreachable = str(error)
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
            desired = self.desired()
            if desired is not None:
                await self._ports.broker.publish(desired)

    async def _log_moved(self) -> None:
        assert self.core is not None
        if self._log.state.n != self.core.log_view.state.n:
            self._post(LogMoved(log_view=await self._log_view(), now_s=_now_s()))

    # --- doing -----------------------------------------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
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
                self._tasks.create_task(self._prepare(effect))
            case Append():
                self._tasks.create_task(self._open(effect.intent))
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

    async def _prepare(self, effect: Prepare) -> None:
        answers: dict[str, Inventory | None] = {}

        async def ask(name: str, url: str) -> None:
            answers[name] = await self._ports.nodes.inventory(url)

        async with asyncio.TaskGroup() as asking:
            for name, url in effect.nodes:
                asking.create_task(ask(name, url))
        try:
            offers = await self._offers(effect.ready_seqs)
        except UnavailableError as error:
            self._post(OpenFailed(text=str(error), again=False, now_s=_now_s()))
            return
        uid = secrets.token_hex(16)
        self._post(Prepared(answers=answers, offers=offers, uid=uid, now_s=_now_s()))

    async def _open(self, intent: OpenAttempt) -> None:
        job = self.config.job
        spec_body, facts_body = spec.encode(intent.spec), manifest.encode(intent.facts)
        spec_sha256, facts_sha256 = manifest.sha256(spec_body), manifest.sha256(facts_body)
        try:
            await self._ports.store.create_facts(facts_key(job, spec_sha256), spec_body)
            await self._ports.store.create_facts(facts_key(job, facts_sha256), facts_body)
            await self._log.append(lambda state: make_spec(state, spec_sha256=spec_sha256))
            done = await self._log.append(
                lambda state: make_attempt(state, intent, spec_sha256=spec_sha256, facts_sha256=facts_sha256)
            )
            await self._log_moved()
        except UnavailableError as error:
            self._post(OpenFailed(text=str(error), again=False, now_s=_now_s()))
            return
        if done.seq is None:
            self._post(OpenFailed(text="the log has moved on", again=True, now_s=_now_s()))
        else:
            self.metrics.attempts_opened.inc()

    async def _commit(self, intent: CommitStep) -> None:
        try:
            failure, final = await self._committed(intent), True
        except UnavailableError as error:
            failure, final = str(error), False
        except StoreError as error:
            failure, final = str(error), True
        if failure:
            self.metrics.commits_failed.inc()
            self._post(
                CommitFailed(
                    attempt_uid=intent.attempt_uid, step=intent.step, text=failure, final=final, now_s=_now_s()
                )
            )

    async def _committed(self, intent: CommitStep) -> str:
        """Make a step READY; return what is in the way if it never can be."""
        indexes = [
            manifest.decode(
                await self._ports.store.read_index(key), Index, key=key, expected_sha256=receipt.copy.index_sha256
            )
            for receipt, key in zip(
                (*intent.receipts, *intent.others), index_keys(self._log.state, intent), strict=True
            )
        ]
        state = self._log.state
        seqs = sorted({index.base for index in indexes if index.base is not None})
        if gone := sorted(set(seqs) - set(state.live)):
            return f"it points into files of READY {gone[0]}, which is not live"
        bases = {seq: await self._ports.store.indexes(state, seq) for seq in seqs}
        made = make_manifest(state, intent, indexes, bases)
        if isinstance(made, str):
            return made
        body = manifest.encode(made)
        sha256 = manifest.sha256(body)
        key = manifest_key(self.config.job, attempt=intent.attempt, step=intent.step, sha256=sha256)
        await self._ports.store.create_manifest(key, body)
        if await self._ports.store.read(key, uncached=True) != body:
            raise CorruptObjectError(f"{key}: the store does not hold what was written there")
        done = await self._log.append(
            lambda state: self._timed(make_ready(state, intent, manifest_sha256=sha256, bases=seqs))
        )
        await self._log_moved()
        if done.seq is None:
            return "the log has moved on"
        self.metrics.steps_ready.inc()
        return ""

    def _timed(self, ready: Ready | None) -> Ready | None:
        return None if ready is None else msgspec.structs.replace(ready, at_s=self._wall_s())

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

    # --- what records name -----------------------------------------------------------------------------------------

    async def _log_view(self) -> LogView:
        state = self._log.state
        attempt = state.attempt
        before = self.core.log_view if self.core is not None else None
        wanted = before.spec if before is not None and before.state.spec_sha256 == state.spec_sha256 else None
        if state.spec_sha256 is not None and wanted is None:
            wanted = json.loads(await self._facts(state.spec_sha256))
        if attempt is None:
            return LogView(state=state, spec=wanted)
        if before is not None and before.state.attempt == attempt:
            return LogView(state=state, spec=wanted, facts=before.facts, offer=before.offer)
        facts = msgspec.json.decode(await self._facts(attempt.facts_sha256), type=AttemptFacts)
        offer = await self._offer(attempt.ready) if attempt.ready is not None else None
        if state.base is not None and state.is_base(state.source_of(attempt)):
            offer = await self._base_offer(state.base)
        return LogView(state=state, spec=wanted, facts=facts, offer=offer)

    async def _facts(self, sha256: str) -> bytes:
        key = facts_key(self.config.job, sha256)
        body = await self._ports.store.read(key)
        found = manifest.sha256(body)
        if found != sha256:
            raise CorruptObjectError(f"{key}: SHA-256 is {found}, expected {sha256}")
        return body

    async def _offers(self, seqs: tuple[int, ...]) -> tuple[Offer, ...]:
        """Return the READY checkpoints, newest first, down to the first that is whole, and then the job's base."""
        offers: list[Offer] = []
        for seq in seqs:
            offers.append(await self._offer(seq))
            if not offers[-1].damage:
                return tuple(offers)
        base = self._log.state.base
        return (*offers, *([] if base is None else [await self._base_offer(base)]))

    async def _offer(self, seq: int) -> Offer:
        ready = self._log.state.readies[seq]
        shards, damage = await _whole(self._ports.store.shards(self._log.state, seq))
        return Offer(
            seq=seq,
            attempt=ready.attempt,
            attempt_uid=ready.attempt_uid,
            step=ready.step,
            shards=shards,
            damage=damage,
        )

    async def _base_offer(self, base: Base) -> Offer:
        shards, damage = await _whole(self._ports.store.base_shards(base))
        return Offer(seq=None, attempt=0, attempt_uid=base.attempt_uid, step=base.step, shards=shards, damage=damage)


async def _whole(reading: Awaitable[tuple[Shard, ...]]) -> tuple[tuple[Stored, ...], str]:
    """Return the shards of a checkpoint, or none and what is wrong with it."""
    try:
        shards = await reading
    except StoreError as error:
        return (), str(error)
    return tuple(Stored(key=one.index_key, bytes=one.bytes, digest=one.digest) for one in shards), ""


async def _ended(loops: set[asyncio.Task[None]]) -> None:
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


async def _raised(error: Exception) -> None:
    """Fail in a task of the group: a request's own task would only log it, and go on with what is left."""
    raise error
