"""Makes a step READY: its indexes are read and checked, its manifest is written, and one record is appended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from toprope.coordinator.intents import CommitStep, fault_of, index_key_of, make_manifest, make_ready, stands_alone
from toprope.coordinator.log import Log
from toprope.coordinator.ports import StorePort
from toprope.store.checkpoint import manifest
from toprope.store.checkpoint.manifest import Index
from toprope.store.errors import CorruptObjectError
from toprope.store.log.records import Ready
from toprope.store.names import manifest_key

READ_AT_ONCE = 32
PORTIONS_AT_ONCE = 2
"""Of more shards than are read at once, as many as that are a portion: another process reads it, if there is one."""


class Committer:
    """Commits for one reign. ``wall_s`` tells the wall time in seconds since 1970, which is recorded."""

    def __init__(self, store: StorePort, log: Log, *, wall_s: Callable[[], int]) -> None:
        self._store = store
        self._log = log
        self._wall_s = wall_s

    async def committed(self, intent: CommitStep) -> str:
        """Make a step READY; return what is in the way if it never can be.

        Raises:
            StoreError: what it consists of is not what it should be.
            UnavailableError: the store did not answer; it may be tried again.
            FencedError: another coordinator has been elected.
        """
        indexes = await self._indexes(intent)
        if isinstance(indexes, str):
            return indexes
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

    async def _indexes(self, intent: CommitStep) -> list[Index | None] | str:
        """Return the indexes of a step, of its receipts and then of the others, or what is wrong with one.

        Several are read at a time. Of those that stand alone nothing is kept once they are found to be right: those of
        thousands of ranks together would not fit into memory.
        """
        receipts, state = (*intent.receipts, *intent.others), self._log.state
        many = len(receipts) > READ_AT_ONCE
        size = READ_AT_ONCE if many else 1
        waiting = iter(range(0, len(receipts), size))
        found: dict[int, Index | None] = {}
        wrong: dict[int, str] = {}

        async def read_on() -> None:
            for at in waiting:
                portion = receipts[at : at + size]
                keys = [index_key_of(state, intent, receipt) for receipt in portion]
                bodies = await self._store.read_indexes(keys)
                for number, (receipt, key, body) in enumerate(zip(portion, keys, bodies, strict=True), at):
                    index = manifest.decode(body, Index, key=key, expected_sha256=receipt.copy.index_sha256)
                    found[number] = None if stands_alone(intent, index) else index
                    if found[number] is None and (why := fault_of(state, intent, receipt, index)):
                        wrong[number] = why
                    if many:
                        await asyncio.sleep(0)  # an index may be long, and others wait for the loop

        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(PORTIONS_AT_ONCE if many else len(receipts)):
                    tasks.create_task(read_on())
        except ExceptionGroup as group:
            raise group.exceptions[0] from group
        return wrong[min(wrong)] if wrong else [found[number] for number in range(len(receipts))]

    def _timed(self, ready: Ready | None) -> Ready | None:
        return None if ready is None else msgspec.structs.replace(ready, at_s=self._wall_s())
