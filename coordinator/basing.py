"""A job that starts from a checkpoint of another job: its base, a READY of a job in the same store.

One of another store is copied into this one before, under its job's name, each object checked on its way. The base is
pinned there first and then recorded in the new job's log, named by the SHA-256 of its manifest; so what is begun from
can't change or go. It is the oldest step of the new job's lineage, and no attempt of it starts afresh.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from toprope.coordinator.changing import ASK_NOBODY, Changer
from toprope.store.checkpoint.manifest import Shard
from toprope.store.checkpoint.ready import read_index, read_manifest
from toprope.store.errors import CorruptObjectError, FencedError, StoreError, UsageError
from toprope.store.keep.changes import OtherStoreError
from toprope.store.keep.holds import holding
from toprope.store.log.chain import read_log
from toprope.store.log.fold import JobState
from toprope.store.log.records import Base, Job, Pin
from toprope.store.look.show import read_job, read_state
from toprope.store.names import Key
from toprope.store.objects.opening import open_store
from toprope.store.objects.protocol import ObjectStore
from toprope.store.places import parse_base
from toprope.store.sizes import size_text
from toprope.store.transfer.copy import copy
from toprope.store.transfer.copy import plan as plan_copy
from toprope.store.transfer.restore import plan

_TRIES = 5


def pinned_base(  # noqa: PLR0913 - which checkpoint, into what, and how
    store: ObjectStore,
    job: str,
    *,
    at: str,
    take: Literal["all", "weights"],
    token: str,
    into: Callable[[], ObjectStore],
    say: Callable[[str], None],
) -> Base:
    """Return the base ``at`` (``JOB@STEP`` or ``ROOT/JOB@STEP``) for a job, pinned in this store.

    ``into`` opens this store as ``bring_base`` needs it, and is called where there may be something to copy.
    It is that of the job if it was recorded before. Raises as ``bring_base`` does, and:

    Raises:
        UsageError: there is none such, it is tainted, or the job has begun in another way. Nothing was changed.
        NothingToVerifyError: there is no READY checkpoint of that step.
        CkptError: it could not be pinned.
    """
    root, name, step = parse_base(at)
    begun = read_log(store, job)
    if begun.base is not None and (begun.base.job, begun.base.step, begun.base.take) == (name, step, take):
        return begun.base
    _check_new(begun, at)
    if name == job:
        raise UsageError(f"--base {at}: a job can't start from itself; give a checkpoint of another job")
    if root:
        bring_base(into(), job, at, say=say)
    source = read_state(store, name)
    (seq,) = plan(source, step=step)
    ready = source.readies[seq]
    if source.is_tainted(attempt=ready.attempt, step=step):
        raise UsageError(f"--base {at}: that step is tainted; `ckpt show --job {name}` says why")
    changer = Changer(store=store, root="this store", coordinator_url="", token=token, say=say)
    try:
        changer.append(source, Pin(seq=seq), purpose="base")
    except OtherStoreError:  # this one has a copy of a job that runs there
        replace(changer, coordinator_url=ASK_NOBODY).append(source, Pin(seq=seq), purpose="base")
    return Base(
        job=name,
        job_uid=source.job_uid,
        seq=seq,
        attempt_uid=ready.attempt_uid,
        step=step,
        world=source.attempts[ready.attempt - 1].world_size,
        manifest_sha256=ready.manifest_sha256,
        take=take,
    )


def bring_base(store: ObjectStore, job: str, at: str, *, say: Callable[[str], None]) -> None:
    """Copy the checkpoint ``at`` into this store for a job that has not begun, unless it is here, as ``JOB@STEP`` is.

    Done again after it was interrupted, it goes on. The store should not be patient: it is asked for much that is not
    there.

    Raises:
        UsageError: it is not there, it is tainted, or this store has another job of its name.
        NothingToVerifyError: there is no READY checkpoint of that step.
        StoreError: an object of it is damaged; the log was not copied, so this store has no such checkpoint.
        UnavailableError: a store did not answer.
    """
    root, name, step = parse_base(at)
    begun = read_log(store, job)
    if not root or begun.base is not None or begun.attempts:
        return
    there = open_store(root)
    state = read_state(there, name)
    (seq,) = plan(state, step=step)
    with holding(there, state, seq, say=say):
        for tries_left in reversed(range(_TRIES)):
            if _is_here(store, state, seq):
                return
            log = read_job(there, name)
            objects = plan_copy(there, log, step=step)
            say(f"copying {name}@{step} from {root}: {len(objects)} objects, {size_text(state.readies[seq].bytes)}")
            try:
                copy(there, store, log, objects=objects, step=step)
            except (FencedError, UsageError):  # another coordinator copies it as well
                if not tries_left:
                    raise
            else:
                return


def _is_here(store: ObjectStore, there: JobState, seq: int) -> bool:
    """Say whether this store has a READY of the other one, live: a copy of its job, or of this checkpoint."""
    here, wanted = read_log(store, there.job), there.readies[seq].manifest_sha256
    return here.job_uid == there.job_uid and any(here.readies[one].manifest_sha256 == wanted for one in here.live)


def make_base(state: JobState, *, base: Base) -> Job | None:
    """Return the record that sets the job's base, None if it is set.

    Raises:
        UsageError: the job has begun in another way.
    """
    if state.base == base:
        return None
    _check_new(state, f"{base.job}@{base.step}")
    return Job(uid=state.job_uid, name=state.job, base=base)


def _check_new(state: JobState, at: str) -> None:
    if state.base is not None:
        there = f"{state.base.job}@{state.base.step}, {state.base.take}"
        raise UsageError(f"--base {at}: job {state.job} starts from {there}, which can't be changed; name another job")
    if state.attempts:
        raise UsageError(f"--base {at}: job {state.job} has begun without it; name another job, or leave out --base")


def base_shards(store: ObjectStore, base: Base) -> tuple[Shard, ...]:
    """Return the shards of a base by rank, each file of them there and as long as it should be.

    Raises:
        StoreError: its job is another one by now, it was retired or tainted there, or objects of it are damaged.
        UnavailableError: the store did not answer.
    """
    at = f"the base {base.job}@{base.step}"
    try:
        source = read_state(store, base.job)
    except UsageError as error:
        raise StoreError(f"{at} is gone: {error}") from error
    ready = source.readies.get(base.seq)
    if source.job_uid != base.job_uid or ready is None or ready.manifest_sha256 != base.manifest_sha256:
        raise StoreError(f"{at} is gone: the job of that name is another one than the one that was recorded")
    if source.is_tainted(attempt=ready.attempt, step=ready.step):
        raise StoreError(f"{at} was tainted in its own job")
    return shards_there(store, source, base.seq)


def shards_there(store: ObjectStore, state: JobState, seq: int) -> tuple[Shard, ...]:
    """Return the shards of a READY checkpoint by rank, each file of them there and as long as it should be.

    Raises:
        StoreError: one is not, or a manifest or index is not what it should be.
        UnavailableError: the store did not answer.
    """
    manifest, _ = read_manifest(store, state, seq)
    files = {file.key: file for shard in manifest.shards for file in read_index(store, manifest, shard).files}
    for file in files.values():
        size = store.size(Key(file.key))
        if size != file.stored_bytes:
            raise CorruptObjectError(f"{file.key}: {size} bytes, expected {file.stored_bytes}")
    return manifest.shards
