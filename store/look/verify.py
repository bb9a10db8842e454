"""Verify: read back everything that a job's log names, and check every digest.

``plan`` says which READYs are to be read; ``verify_checkpoint`` and ``verify_facts`` read. Nothing is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from toprope.store.checkpoint.manifest import Index, sha256
from toprope.store.checkpoint.ready import Damage, damage_of, read_index, read_manifest, scan_object, scan_shard
from toprope.store.errors import CorruptObjectError, MissingObjectError, NothingToVerifyError, UnseenObjectError
from toprope.store.log.fold import JobState
from toprope.store.names import facts_key, manifest_key
from toprope.store.objects.protocol import ObjectStore

MAX_DAMAGES = 10_000
"""How many findings of one checkpoint are told one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReport:
    """What was found in one READY checkpoint. ``bytes`` is what its shards should have.

    After ``MAX_DAMAGES`` of them the rest is not read any more, and the last one says so.
    """

    job: str
    seq: int
    attempt: int
    step: int
    world: int
    bytes: int
    damages: tuple[Damage, ...]


def plan(state: JobState, *, step: int | None = None) -> tuple[int, ...]:
    """Return the READYs to verify, oldest first: all that are not retired, or those of one step.

    Raises:
        NothingToVerifyError: there are none.
    """
    wanted = tuple(seq for seq in state.live if step is None or state.readies[seq].step == step)
    if not wanted:
        raise NothingToVerifyError(f"job {state.job}: {_nothing(state, step)}")
    return wanted


def _nothing(state: JobState, step: int | None) -> str:
    if step is None:
        return "no READY checkpoint, so nothing to verify"
    have = sorted({state.readies[seq].step for seq in state.live})
    return f"no READY checkpoint of step {step}; there are steps {have}" if have else "no READY checkpoint"


def verify_checkpoint(store: ObjectStore, state: JobState, seq: int) -> CheckpointReport:
    """Read READY ``seq`` from end to end: manifest, indexes, files.

    Raises:
        UnavailableError: the store did not answer.
    """
    ready = state.readies[seq]
    attempt = state.attempts[ready.attempt - 1]
    return CheckpointReport(
        job=state.job,
        seq=seq,
        attempt=ready.attempt,
        step=ready.step,
        world=attempt.world_size,
        bytes=ready.bytes,
        damages=_first(_damages(store, state, seq), state, seq),
    )


def _first(damages: Iterator[Damage], state: JobState, seq: int) -> tuple[Damage, ...]:
    found = tuple(islice(damages, MAX_DAMAGES))
    if len(found) < MAX_DAMAGES or next(damages, None) is None:
        return found
    ready = state.readies[seq]
    key = manifest_key(state.job, attempt=ready.attempt, step=ready.step, sha256=ready.manifest_sha256)
    more = Damage(
        job=state.job,
        key=key,
        what="there is more, which was not read",
        step=ready.step,
        attempt=ready.attempt,
        unseen=all(damage.unseen for damage in found),
    )
    return (*found, more)


def _damages(store: ObjectStore, state: JobState, seq: int) -> Iterator[Damage]:
    try:
        manifest, _ = read_manifest(store, state, seq)
    except (CorruptObjectError, MissingObjectError) as error:
        yield damage_of(error, state, seq=seq)
        return
    for shard in manifest.shards:
        try:
            index = read_index(store, manifest, shard)
        except (CorruptObjectError, MissingObjectError) as error:
            yield damage_of(error, state, seq=seq, rank=shard.rank)
        else:
            yield from _shard_damages(store, index, job=state.job)


def _shard_damages(store: ObjectStore, index: Index, *, job: str) -> Iterator[Damage]:
    """Read the image, and then each file that is not just the image for what the image does not take in."""
    found = tuple(scan_shard(store, index, job=job))
    yield from found
    for file in index.files:
        is_image = (file.packed, file.bytes, file.digest) == (None, index.bytes, index.digest)
        if not is_image and all(damage.key != file.key for damage in found):
            yield from scan_object(store, index, file, job=job)


def verify_facts(store: ObjectStore, state: JobState) -> tuple[Damage, ...]:
    """Check what records name by its hash: the spec, and the facts of each attempt."""
    wanted = {attempt.facts_sha256: f"the facts of attempt {attempt.attempt}" for attempt in state.attempts}
    if state.spec_sha256 is not None:
        wanted[state.spec_sha256] = "the spec"
    return tuple(damage for digest, what in wanted.items() for damage in _fact_damage(store, state.job, digest, what))


def _fact_damage(store: ObjectStore, job: str, digest: str, what: str) -> Iterator[Damage]:
    key = facts_key(job, digest)
    try:
        found = sha256(store.read(key))
    except (CorruptObjectError, MissingObjectError) as error:
        unseen = isinstance(error, UnseenObjectError)
        yield Damage(job=job, key=key, what=f"{what}: {str(error).removeprefix(f'{key}: ')}", unseen=unseen)
        return
    if found != digest:
        yield Damage(job=job, key=key, what=f"{what}: SHA-256 is {found}, expected {digest}")
