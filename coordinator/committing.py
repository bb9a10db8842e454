"""Makes a step READY: its indexes are read and checked, its manifest is written, and one record is appended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from toprope.coordinator.index_checks import expected_of
from toprope.coordinator.intents import CommitStep, ReadIndexes, make_manifest, make_ready
from toprope.coordinator.log import Log
from toprope.coordinator.ports import StorePort
from toprope.coordinator.readiness import Receipt
from toprope.coordinator.wire import Copy
from toprope.store.checkpoint import manifest
from toprope.store.checkpoint.manifest import Index
from toprope.store.errors import CkptError, CorruptObjectError
from toprope.store.log.records import Ready
from toprope.store.names import manifest_key

FEW_RANKS = 32
"""Of so few the indexes are read all at once, and here."""
PORTION, PORTIONS_AT_ONCE = 256, 2
"""Of more ranks, so many are read at a time: by another process, if there is one, which costs time for each portion."""


@dataclass(slots=True, kw_only=True)
class _Ahead:
    """What was read ahead of a step: by receipt, and None where no more need be known."""

    attempt_uid: str
    found: dict[Copy, Index | None] = field(default_factory=dict)
    reading: list[asyncio.Task[None]] = field(default_factory=list)


class Committer:
    """Commits for one reign. ``wall_s`` tells the wall time in seconds since 1970, which is recorded."""

    def __init__(self, store: StorePort, log: Log, *, wall_s: Callable[[], int]) -> None:
        self._store = store
        self._log = log
        self._wall_s = wall_s
        self._ahead: dict[int, _Ahead] = {}
        self._ahead_gate, self._gate = (asyncio.Semaphore(PORTIONS_AT_ONCE) for _ in range(2))

    def read_ahead(self, indexes: ReadIndexes, *, wanted: Container[int], tasks: asyncio.TaskGroup) -> None:
        """Begin to read indexes; one that can't be read now is read again when its step is committed.

        Of other steps than ``wanted``, and of other attempts, nothing is remembered and no more is read.
        """
        uid = indexes.attempt_uid
        self._forget(step for step, one in self._ahead.items() if step not in wanted or one.attempt_uid != uid)
        ahead = self._ahead.setdefault(indexes.step, _Ahead(attempt_uid=uid))
        for portion in _portions(indexes.receipts, world=indexes.world):
            ahead.reading.append(tasks.create_task(self._try(indexes, portion, into=ahead.found)))

    def end(self) -> None:
        """Read nothing ahead any more."""
        self._forget(self._ahead)

    def _forget(self, steps: Iterable[int]) -> None:
        for step in list(steps):
            for task in self._ahead.pop(step).reading:
                task.cancel()

    async def _try(self, indexes: ReadIndexes, receipts: Sequence[Receipt], *, into: dict[Copy, Index | None]) -> None:
        with contextlib.suppress(CkptError):  # what is wrong with one is told of when its step is committed
            await self._read(indexes, receipts, into=into, gate=self._ahead_gate)

    async def committed(self, intent: CommitStep) -> str:
        """Make a step READY; return what is in the way if it never can be.

        Raises:
            StoreError: what it consists of is not what it should be.
            UnavailableError: the store did not answer; it may be tried again.
            FencedError: another coordinator has been elected.
        """
        indexes = await self._indexes(intent)
        state = self._log.state
        seqs = sorted({index.base for index in indexes if index is not None and index.base is not None})
        if gone := sorted(set(seqs) - set(state.live)):
            return f"it points into files of READY {gone[0]}, which is not live"
        bases = {seq: await self._store.indexes(state, seq) for seq in seqs}
        made = make_manifest(state, intent, indexes, bases)
        if isinstance(made, str):
            return made
        body = manifest.encode(made)
        sha256 = manifest.sha256(body)
        key = manifest_key(self._log.state.job, attempt=intent.attempt, step=intent.step, sha256=sha256)
        await self._store.create_manifest(key, body)
        if await self._store.read(key, uncached=True) != body:
            raise CorruptObjectError(f"{key}: the store does not hold what was written there")
        done = await self._log.append(
            lambda state: self._timed(make_ready(state, intent, manifest_sha256=sha256, bases=seqs))
        )
        return "the log has moved on" if done.seq is None else ""

    async def _indexes(self, intent: CommitStep) -> list[Index | None]:
        """Return the indexes of a step, of its receipts and then of the others; None where no more need be known."""
        receipts = (*intent.receipts, *intent.others)
        found = await self._found_ahead(intent)
        missing = [
            one
            for one in receipts
            if one.copy not in found or (found[one.copy] is None and one.copy.key in intent.rested_on)
        ]
        try:
            async with asyncio.TaskGroup() as tasks:
                for portion in _portions(missing, world=intent.world):
                    tasks.create_task(self._read(intent, portion, into=found, gate=self._gate))
        except ExceptionGroup as group:
            raise group.exceptions[0] from group
        return [found[one.copy] for one in receipts]

    async def _found_ahead(self, intent: CommitStep) -> dict[Copy, Index | None]:
        """Return what was read ahead of a step, all of it; nothing of an earlier one is wanted any more."""
        self._forget([step for step in self._ahead if step < intent.step])
        ahead = self._ahead.pop(intent.step, None)
        if ahead is None or ahead.attempt_uid != intent.attempt_uid:
            return {}
        if ahead.reading:
            await asyncio.wait(ahead.reading)
        return ahead.found

    async def _read(
        self,
        of: CommitStep | ReadIndexes,
        receipts: Sequence[Receipt],
        *,
        into: dict[Copy, Index | None],
        gate: asyncio.Semaphore,
    ) -> None:
        """Read and check the indexes of a portion, in its turn if there may be many."""
        rested_on = of.rested_on if isinstance(of, CommitStep) else ()
        async with gate if of.world > FEW_RANKS else contextlib.nullcontext():
            state = self._log.state
            expected = [expected_of(state, of, one, whole=one.copy.key in rested_on) for one in receipts]
            for one, index in zip(receipts, await self._store.read_indexes(expected), strict=True):
                into[one.copy] = index

    def _timed(self, ready: Ready | None) -> Ready | None:
        return None if ready is None else msgspec.structs.replace(ready, at_s=self._wall_s())


def _portions(receipts: Sequence[Receipt], *, world: int) -> Iterator[Sequence[Receipt]]:
    """Yield the receipts that are read with one call: of few ranks each by itself."""
    size = PORTION if world > FEW_RANKS else 1
    for at in range(0, len(receipts), size):
        yield receipts[at : at + size]
