"""Judges a run that was hit against one that was not. Pure: evidence in, findings out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from toprope.chaos.journal import Event, Final

RECOVERS_S = 3.0
"""How long after a fault was mended, or after it began, a rank may have no slot to save a step in."""


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """``identical`` when every rank ended in the same state, bit for bit; else what differs."""

    identical: bool
    differences: tuple[str, ...]


def compare(run: Sequence[Final], reference: Sequence[Final], *, world: int) -> Judgement:
    """Compare two runs' final states rank by rank. A missing rank is a difference; so is an empty pair."""
    differences: list[str] = []
    for rank in range(world):
        mine = next((final for final in run if final.rank == rank), None)
        other = next((final for final in reference if final.rank == rank), None)
        if mine is None or other is None:
            differences.append(f"rank {rank}: {'the run' if mine is None else 'the reference'} left no final state")
            continue
        if mine.step != other.step:
            differences.append(f"rank {rank}: ended at step {mine.step}, the reference at step {other.step}")
        kinds = sorted(mine.digests.keys() | other.digests.keys())
        unequal = [kind for kind in kinds if mine.digests.get(kind) != other.digests.get(kind)]
        differences += [f"rank {rank}: {kind} differ" for kind in unequal]
    return Judgement(identical=not differences and world > 0, differences=tuple(differences))


def torn_restores(events: Iterable[Event], *, is_wrong: Callable[[Event], bool] = lambda _: False) -> tuple[str, ...]:
    """Find processes whose steps do not follow on from where they began, and losses that a step had twice.

    A step done again after a restore must lose exactly what it lost the first time, unless that was no number; from
    what a step lost that ``is_wrong`` says to be wrong nothing is to be learned.
    """
    found: list[str] = []
    last: dict[tuple[int, int], int] = {}
    losses: dict[tuple[int, int], float | None] = {}
    differ: set[int] = set()
    for event in events:
        process = (event.rank, event.pid)
        if event.event == "begin":
            last[process] = event.step
        elif event.event == "step":
            if event.step != last.get(process, -1) + 1:
                found.append(f"rank {event.rank}: step {event.step} came after step {last.get(process)}")
            last[process] = event.step
            if is_wrong(event):
                continue
            before = losses.setdefault((event.rank, event.step), event.loss)
            if before is None:
                losses[event.rank, event.step] = event.loss
            elif (
                before != event.loss and event.rank not in differ
            ):  # the first tells all: each later one follows from it
                differ.add(event.rank)
                found.append(f"rank {event.rank}: step {event.step} lost {event.loss!r}, and {before!r} before")
    return tuple(found)


def step_to_become_ready(events: Sequence[Event], due: Sequence[int], *, world: int, mended_s: float) -> int:
    """Return the newest of the ``due`` steps that must become READY; 0 if none must.

    That is the last one, unless a fault that may cost slots was mended (at ``mended_s``), or ranks began, only when it
    ended or shortly before: then it is the last of which all ranks took a snapshot.
    """
    settled_s = max([mended_s, *(event.monotonic_s for event in events if event.event == "begin")]) + RECOVERS_S
    lasting = {(event.step, event.rank): event for event in events if event.event == "step"}
    last = max(due, default=0)
    ends_s = [event.monotonic_s for (step, _), event in lasting.items() if step == last]
    if ends_s and min(ends_s) > settled_s:
        return last
    saved = [step for step in due if all((one := lasting.get((step, rank))) and one.saved for rank in range(world))]
    return max(saved, default=0)


def steps_lost_allowed(*, newest_due_protected: bool, every: int) -> int:
    """Return how many steps may be lost: one interval if the newest due step was protected at the kill, else two."""
    return every if newest_due_protected else 2 * every
