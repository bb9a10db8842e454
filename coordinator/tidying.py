"""Retention, garbage collection and folds of the log in a reign: off the way to READY, one by one, never fatal."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from toprope.coordinator.log import Log
from toprope.coordinator.metrics import Metrics
from toprope.coordinator.ports import StorePort
from toprope.store.errors import CkptError, FencedError, StoreError
from toprope.store.keep.gone import in_words, make_letting_go
from toprope.store.keep.holds import HoldWatch
from toprope.store.keep.retention import make_retire
from toprope.store.log.fold import JobState
from toprope.store.log.records import Record, Retire
from toprope.store.log.snap import EVERY

_HELD_UP_S = 1.0
_LOG = logging.getLogger("toprope.coordinator")


class Tidier:
    """Does what the job's policy of retention says, when it is told that there may be something to do."""

    def __init__(self, store: StorePort, log: Log, metrics: Metrics, *, held_up: Callable[[], bool]) -> None:
        """``held_up``: an attempt must come into the log first that could not follow what is retired here."""
        self._store = store
        self._log = log
        self._metrics = metrics
        self._held_up = held_up
        self._watch = HoldWatch()
        self._due = asyncio.Event()
        self._snap_at = log.state.n + EVERY

    def wake(self) -> None:
        """Let it see whether there is something to do."""
        self._due.set()

    async def run(self) -> None:
        """Retire and delete whenever woken, until cancelled.

        Raises:
            FencedError: another coordinator has been elected.
        """
        while True:
            await self._due.wait()
            if self._held_up():
                await asyncio.sleep(_HELD_UP_S)
                continue
            self._due.clear()
            await self._round()

    async def _round(self) -> None:
        try:
            if self._log.state.retain:
                await self._retire()
                await self._collect()
            if self._log.state.n >= self._snap_at:
                await self._store.put_snap(self._log.state)
                self._snap_at = self._log.state.n + EVERY
        except FencedError:
            raise
        except CkptError as error:
            self._metrics.tidying_failed.inc()
            _LOG.warning("old checkpoints were not cleared away, which is tried again later: %s", error)

    async def _retire(self) -> None:
        done = await self._log.append(self._unless_held_up(make_retire))
        if isinstance(done.record, Retire):
            self._metrics.readies_retired.inc(len(done.record.seqs))
            _LOG.info("retired READY %s", ", ".join(str(seq) for seq in done.record.seqs))

    def _unless_held_up(self, make: Callable[[JobState], Record | None]) -> Callable[[JobState], Record | None]:
        return lambda state: None if self._held_up() else make(state)

    async def _collect(self) -> None:
        now_s = asyncio.get_running_loop().time
        try:
            plan = await self._store.collect_garbage(self._log.state, self._watch, now_s=now_s)
        except StoreError:
            if not await self._let_go():
                raise
            plan = await self._store.collect_garbage(self._log.state, self._watch, now_s=now_s)
        self._metrics.objects_deleted.inc(len(plan.condemned))
        if plan.condemned:
            _LOG.info("deleted %d objects that the log has condemned", len(plan.condemned))

    async def _let_go(self) -> bool:
        """Let go of what was removed from the store by hand, which would hinder the collector for ever; say if any."""
        before = self._log.state
        seqs = await self._store.gone(before)
        make = self._unless_held_up(partial(make_letting_go, seqs=seqs))
        appended = False
        while (await self._log.append(make)).record is not None:
            appended = True
        if not seqs or make_letting_go(self._log.state, seqs=seqs) is not None:
            return False
        if appended:
            _LOG.warning("%s", in_words(before, seqs, done=True))
        return True
