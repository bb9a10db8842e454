"""Purging: a whole job goes, its log too. What may stand against it, and in which order it goes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from toprope.store.errors import UsageError
from toprope.store.keep.gc import DELETED_AT_ONCE
from toprope.store.log.fold import JobState
from toprope.store.look.show import job_names, read_beginning
from toprope.store.names import PROBES, Key, holds_prefix, log_prefix, parse_hold
from toprope.store.objects.protocol import ObjectStore

_PROBE = re.compile(rf"{PROBES}[0-9a-f]{{32}}")


def check_unneeded(store: ObjectStore, state: JobState) -> None:
    """Check that nobody reads the job, and that no other one starts from it; of a damaged log as far as it can be read.

    Raises:
        UsageError: somebody does; the message says who.
    """
    held = {hold[0] for key in store.list(holds_prefix(state.job)) if (hold := parse_hold(state.job, key)) is not None}
    if held:
        raise UsageError(
            f"job {state.job}: a reader holds READY {min(held)}; wait until it is done. `ckpt gc --drop-holds` drops "
            "what was left behind"
        )
    for name in job_names(store):
        other = state if name == state.job else read_beginning(store, name)[0].state  # which has its base, if any
        base = other.base
        if base is None or base.job != state.job or state.job_uid not in {"", base.job_uid}:
            continue
        if not other.restorable():
            raise UsageError(
                f"job {state.job}: job {name} starts from its step {base.step} and has no READY checkpoint of "
                "its own yet"
            )


def keys_of(store: ObjectStore, job: str) -> tuple[Key, ...]:
    """Return the keys of all that a job has, the log last and from its end: what is left at any time is a job."""
    keys = list(store.list(f"{job}/"))
    log = sorted((key for key in keys if key.startswith(log_prefix(job))), reverse=True)
    return (*(key for key in keys if not key.startswith(log_prefix(job))), *log)


def probes_of(store: ObjectStore) -> tuple[Key, ...]:
    """Return the keys of the probes that were left by those who may not delete."""
    return tuple(key for key in store.list(PROBES) if _PROBE.fullmatch(key))


def delete(store: ObjectStore, keys: Sequence[Key]) -> None:
    """Delete objects in this order.

    Raises:
        UnavailableError: the store did not answer; purge again.
    """
    for begin in range(0, len(keys), DELETED_AT_ONCE):
        store.delete(keys[begin : begin + DELETED_AT_ONCE])
