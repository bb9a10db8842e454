"""What a restore did not begin from, in words, for whoever wonders why: what is tainted, and what is no checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from toprope.store.log.fold import JobState, covers
from toprope.store.look.show import on_one_line
from toprope.store.names import shards_prefix, written_at
from toprope.store.objects.protocol import ObjectStore


def passed_over(state: JobState, *, past: int) -> Iterator[str]:
    """Yield a line for each live READY step past ``past`` that no restore begins from unless it is named."""
    restorable = {seq for seq, _ in state.restorable()}
    for seq in state.live:
        ready = state.readies[seq]
        if seq in restorable or ready.step <= past:
            continue
        reasons = [one.reason for one in state.taints if covers(one, attempt=ready.attempt, step=ready.step)]
        why = f"tainted: {'; '.join(map(on_one_line, reasons))}" if reasons else "the job went on from an earlier step"
        yield f"step {ready.step} (READY {seq}) of attempt {ready.attempt}: {why}"


def unready(store: ObjectStore, state: JobState, *, past: int) -> Iterator[str]:
    """Yield a line for each step past ``past`` that is not READY, and one for each object with a name of its own.

    Raises:
        UnavailableError: the store did not answer.
    """
    known = {(ready.attempt, ready.step) for ready in state.readies.values()}
    stored: dict[tuple[int, int], int] = {}
    for key in store.list(shards_prefix(state.job)):
        at = written_at(state.job, key)
        if at is None:
            yield f"{key}: no object of a checkpoint has such a name"
        elif at not in known and at[1] > past:
            stored[at] = stored.get(at, 0) + key.endswith(".index.json")  # the last that a rank writes
    for (attempt, step), ranks in sorted(stored.items()):
        world = state.attempts[attempt - 1].world_size if attempt <= state.attempt_number else "?"
        yield f"step {step} of attempt {attempt}: not READY, {ranks} of {world} ranks have stored it"
