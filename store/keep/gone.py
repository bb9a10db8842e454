"""READY checkpoints that somebody removed from the store by hand: the log lets go of them, pinned or not.

Their records stay, as all do. What the log itself needs of one, as of its head, is never let go of: then nothing is
deleted until it is put back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from toprope.store.errors import MissingObjectError
from toprope.store.log.fold import JobState, needed_by
from toprope.store.log.records import Retire, Unpin
from toprope.store.names import manifest_key, step_prefix
from toprope.store.objects.protocol import ObjectStore


def gone(store: ObjectStore, state: JobState) -> tuple[int, ...]:
    """Return the live READYs that nothing but a pin needs and of which the manifest, or all the rest, is not there.

    One of which only a part is missing is damaged, and not gone.

    Raises:
        UnavailableError: the store did not answer.
    """
    needed = needed_by(replace(state, pins=frozenset()))
    return tuple(seq for seq in state.live if seq not in needed and _is_gone(store, state, seq))


def _is_gone(store: ObjectStore, state: JobState, seq: int) -> bool:
    ready = state.readies[seq]
    key = manifest_key(state.job, attempt=ready.attempt, step=ready.step, sha256=ready.manifest_sha256)
    try:
        store.size(key)
    except MissingObjectError:
        return True
    return not any(store.list(step_prefix(state.job, attempt=ready.attempt, step=ready.step)))


def make_letting_go(state: JobState, *, seqs: Sequence[int]) -> Unpin | Retire | None:
    """Return the next record that lets go of these READYs, None once they are neither live nor pinned."""
    pinned = next((seq for seq in seqs if seq in state.pins), None)
    if pinned is not None:
        return Unpin(seq=pinned)
    needed = needed_by(state)
    left = tuple(seq for seq in seqs if state.is_live(seq) and seq not in needed)
    return Retire(seqs=left) if left else None


def in_words(state: JobState, seqs: Sequence[int], *, done: bool) -> str:
    """Return the one warning of what is gone: which checkpoints, and that they are let go of, or would be."""
    named = ", ".join(f"step {state.readies[seq].step} (READY {seq}{', pinned' * (seq in state.pins)})" for seq in seqs)
    pinned = sum(seq in state.pins for seq in seqs)
    fate = "unpinned and retired" if pinned == len(seqs) else "retired" + ", the pinned unpinned" * (pinned > 0)
    were, they = "was", "it is" if done else "it would be"
    if len(seqs) > 1:
        were, they = "were", "they are" if done else "they would be"
    return f"job {state.job}: {named} {were} removed from the store by hand: {they} {fate}"
