"""Opens attempts: asks the nodes what they hold, and brings what the core decides, with the log or without, into it."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from functools import partial

from toprope.coordinator import spec
from toprope.coordinator.effects import Enter, Learn, Prepare
from toprope.coordinator.events import EnterEnded, Event, Learned, LogReached, OpenFailed, Prepared
from toprope.coordinator.intents import OpenAttempt, make_attempt, make_spec
from toprope.coordinator.log import Log
from toprope.coordinator.metrics import Metrics
from toprope.coordinator.ports import Ports
from toprope.coordinator.provisional import make_entry
from toprope.coordinator.reading import Reader
from toprope.coordinator.wire import Inventory
from toprope.store.checkpoint import manifest
from toprope.store.errors import UnavailableError
from toprope.store.names import facts_key

_LOG = logging.getLogger("toprope.coordinator")


class Opener:
    """Does it for one reign. What comes of it is told to ``post``."""

    def __init__(  # noqa: PLR0913 - what a reign consists of
        self,
        ports: Ports,
        log: Log,
        reader: Reader,
        metrics: Metrics,
        *,
        post: Callable[[Event], None],
        moved: Callable[[], Awaitable[None]],
        known_n: Callable[[], int],
        held_up: Callable[[], bool],
    ) -> None:
        """``moved`` lets the core know that the log is longer; ``known_n``: how long it is as far as the core knows.

        ``held_up``: an attempt that was opened without the log must come into it first.
        """
        self._job = log.state.job
        self._nodes, self._store = ports.nodes, ports.store
        self._log, self._reader, self._metrics = log, reader, metrics
        self._post, self._moved, self._known_n, self._held_up = post, moved, known_n, held_up

    async def prepare(self, effect: Prepare) -> None:
        """Ask all nodes what they hold, and look up the READYs to begin from."""
        answers: dict[str, Inventory | None] = {}

        async def ask(name: str, url: str) -> None:
            answers[name] = await self._nodes.inventory(url)

        async with asyncio.TaskGroup() as asking:
            for name, url in effect.nodes:
                asking.create_task(ask(name, url))
        offers, why = None, ""
        try:
            if effect.ready_seqs is not None:
                offers = await self._reader.offers(self._log.state, effect.ready_seqs)
        except UnavailableError as error:
            why = str(error)
        uid = secrets.token_hex(16)
        unsure = self._is_unsure()
        self._post(Prepared(answers=answers, offers=offers, uid=uid, why=why, unsure=unsure, now_s=_now_s()))

    def _is_unsure(self) -> bool:
        """Say whether the log may have more than the core knows: on its way, or read but not what it names."""
        return self._log.is_unsure or self._log.state.n > self._known_n()

    async def open(self, intent: OpenAttempt) -> None:
        """Append an attempt, unless another one must come into the log first."""
        job = self._job
        spec_body, facts_body = spec.encode(intent.spec), manifest.encode(intent.facts)
        spec_sha256, facts_sha256 = manifest.sha256(spec_body), manifest.sha256(facts_body)
        make = partial(make_attempt, intent=intent, spec_sha256=spec_sha256, facts_sha256=facts_sha256)
        try:
            await self._store.create_facts(facts_key(job, spec_sha256), spec_body)
            await self._store.create_facts(facts_key(job, facts_sha256), facts_body)
            await self._log.append(lambda state: make_spec(state, spec_sha256=spec_sha256))
            await self._log.catch_up()
            done = await self._log.append(lambda state: None if self._held_up() else make(state))
            await self._moved()
        except UnavailableError as error:
            self._post(LogReached(why=str(error), now_s=_now_s()))
            self._post(OpenFailed(uid=intent.uid, text=str(error), again=False, now_s=_now_s()))
            return
        if done.seq is None:
            self._post(OpenFailed(uid=intent.uid, text="the log has moved on", again=True, now_s=_now_s()))
        else:
            self._metrics.attempts_opened.inc()

    async def enter(self, effect: Enter) -> None:
        """Append an attempt that was decided without the log."""
        one = effect.attempt
        facts_body = manifest.encode(one.facts)
        try:
            await self._store.create_facts(facts_key(self._job, manifest.sha256(facts_body)), facts_body)
            done = await self._log.append(lambda state: make_entry(state, one))
            await self._moved()
        except UnavailableError as error:
            self._post(LogReached(why=str(error), now_s=_now_s()))
        else:
            if done.seq is not None:
                self._metrics.attempts_entered.inc()
                _LOG.info("attempt %d, opened without the log, is record %d of it now", one.number, done.seq)
        self._post(EnterEnded(now_s=_now_s()))

    async def learn(self, effect: Learn) -> None:
        """Ask a node what it has adopted."""
        adopted = await self._nodes.adopted(effect.url)
        self._post(Learned(node=effect.node, adopted=adopted, now_s=_now_s()))


def _now_s() -> float:
    return asyncio.get_running_loop().time()
