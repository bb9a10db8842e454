"""Reads what the records of a log name, as far as decisions rest on it: facts, specs, and where checkpoints lie."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec

from toprope.coordinator.log_view import LogView
from toprope.coordinator.ports import StorePort
from toprope.coordinator.restore_choice import Offer, Stored
from toprope.store.checkpoint import manifest
from toprope.store.checkpoint.manifest import Shard
from toprope.store.errors import CorruptObjectError, StoreError
from toprope.store.log.fold import JobState
from toprope.store.log.records import AttemptFacts, Base
from toprope.store.names import facts_key


class Reader:
    """Reads for one reign. What does not change is read once."""

    def __init__(self, store: StorePort, job: str) -> None:
        self._store = store
        self._job = job

    async def log_view(self, state: JobState, before: LogView | None) -> LogView:
        """Return the view of a log; ``before`` is one of its beginning.

        Raises:
            StoreError: an object that a record names is not what it should be.
            UnavailableError: the store did not answer.
        """
        attempt = state.attempt
        wanted = before.spec if before is not None and before.state.spec_sha256 == state.spec_sha256 else None
        if state.spec_sha256 is not None and wanted is None:
            wanted = json.loads(await self._facts(state.spec_sha256))
        if attempt is None:
            return LogView(state=state, spec=wanted)
        if before is not None and before.state.attempt == attempt:
            return LogView(state=state, spec=wanted, facts=before.facts, offer=before.offer)
        facts = msgspec.json.decode(await self._facts(attempt.facts_sha256), type=AttemptFacts)
        offer = await self._offer(state, attempt.ready) if attempt.ready is not None else None
        if state.base is not None and state.is_base(state.source_of(attempt)):
            offer = await self._base_offer(state.base)
        return LogView(state=state, spec=wanted, facts=facts, offer=offer)

    async def _facts(self, sha256: str) -> bytes:
        key = facts_key(self._job, sha256)
        body = await self._store.read(key)
        found = manifest.sha256(body)
        if found != sha256:
            raise CorruptObjectError(f"{key}: SHA-256 is {found}, expected {sha256}")
        return body

    async def offers(self, state: JobState, seqs: tuple[int, ...]) -> tuple[Offer, ...]:
        """Return these READY checkpoints, newest first, down to the first that is whole, and then the job's base.

        Raises:
            UnavailableError: the store did not answer.
        """
        offers: list[Offer] = []
        for seq in seqs:
            offers.append(await self._offer(state, seq))
            if not offers[-1].damage:
                return tuple(offers)
        return (*offers, *([] if state.base is None else [await self._base_offer(state.base)]))

    async def _offer(self, state: JobState, seq: int) -> Offer:
        ready = state.readies[seq]
        shards, damage = await _whole(partial(self._store.shards, state, seq))
        return Offer(
            seq=seq,
            attempt=ready.attempt,
            attempt_uid=ready.attempt_uid,
            step=ready.step,
            shards=shards,
            damage=damage,
        )

    async def _base_offer(self, base: Base) -> Offer:
        shards, damage = await _whole(partial(self._store.base_shards, base))
        return Offer(seq=None, attempt=0, attempt_uid=base.attempt_uid, step=base.step, shards=shards, damage=damage)


async def _whole(read: Callable[[], Awaitable[tuple[Shard, ...]]]) -> tuple[tuple[Stored, ...], str]:
    """Return the shards of a checkpoint, or none and what is wrong with it.

    What came wrong is read once more: a checkpoint that is passed over for it is lost to the job.
    """
    try:
        try:
            shards = await read()
        except CorruptObjectError:
            shards = await read()
    except StoreError as error:
        return (), str(error)
    return tuple(Stored(key=one.index_key, bytes=one.bytes, digest=one.digest) for one in shards), ""
