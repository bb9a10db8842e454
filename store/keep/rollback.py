"""Going back to a READY: all later steps of the lineage are tainted, and an attempt opens that begins from it. Pure.

Nobody is launched for that attempt: it is there so that the trainers of the one before it learn that theirs is over.
The next launch gets an attempt of its own, which begins from the same step, since nothing later is left.
"""

from __future__ import annotations

from dataclasses import dataclass

from toprope.store.errors import UsageError
from toprope.store.keep.changes import taints_of
from toprope.store.log.fold import JobState
from toprope.store.log.records import NOBODY, Attempt, Taint


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """What is to be appended to go back to ``step``, READY ``seq``; ``given_up`` are READY steps that are tainted.

    There are no taints if the job has gone back to it and nobody was launched since.
    """

    seq: int
    step: int
    taints: tuple[Taint, ...]
    given_up: tuple[int, ...]


def plan_rollback(state: JobState, *, to_step: int, reason: str) -> Rollback:
    """Return how to go back to a step.

    Raises:
        UsageError: it is none that a restore could begin from.
    """
    there = state.restorable()
    found = next(((seq, ready) for seq, ready in there if ready.step == to_step), None)
    if found is None:
        steps = ", ".join(str(ready.step) for _, ready in reversed(there)) or "none"
        raise UsageError(
            f"job {state.job} can't go back to step {to_step}: it has no READY checkpoint that is live, untainted and "
            f"on the way to where the job is; there are steps {steps}"
        )
    current = state.attempt
    done = current is not None and (current.launch_id, current.ready) == (NOBODY, found[0])
    return Rollback(
        seq=found[0],
        step=to_step,
        taints=() if done else taints_of(state, from_step=to_step + 1, to_step=None, reason=reason),
        given_up=tuple(ready.step for _, ready in reversed(there) if ready.step > to_step),
    )


def opened_for_nobody(state: JobState, rollback: Rollback, *, uid: str, facts_sha256: str, reason: str) -> Attempt:
    """Return the record that opens the attempt; ``uid`` is fresh, the facts are the world of the one before it."""
    before = state.attempt
    assert before is not None
    return Attempt(
        attempt=state.attempt_number + 1,
        uid=uid,
        launch_id=NOBODY,
        round=sum(attempt.launch_id == NOBODY for attempt in state.attempts),
        ready=rollback.seq,
        held=None,
        from_step=rollback.step,
        struck=(),
        world_size=before.world_size,
        facts_sha256=facts_sha256,
        spec_sha256=state.spec_sha256 or "",
        why=f"rolled back to step {rollback.step}: {reason}",
    )
