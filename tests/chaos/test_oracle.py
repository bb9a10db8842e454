"""The oracle says no when there is any reason to."""

from __future__ import annotations

import msgspec
import pytest

from toprope.chaos.journal import Event, Final
from toprope.chaos.oracle import compare, step_to_become_ready, steps_lost_allowed, torn_restores

_DIGESTS = {"weights": "aa", "optimizer": "bb", "rng": "cc", "position": "dd"}


def _finals(world: int = 2) -> list[Final]:
    return [Final(rank=rank, world=world, step=9, digests=dict(_DIGESTS)) for rank in range(world)]


def _event(event: str, step: int, *, pid: int = 1, loss: float = 0.5) -> Event:
    return Event(event=event, rank=0, pid=pid, monotonic_s=0.0, step=step, loss=loss)


def saved(step: int, *ranks: int, world: int = 2, at_s: float = 0.0) -> list[Event]:
    """A step of all ranks, of which these took a snapshot."""
    return [
        Event(event="step", rank=rank, pid=rank, monotonic_s=at_s or float(step), step=step, saved=rank in ranks)
        for rank in range(world)
    ]


def test_the_last_due_step_must_become_ready_once_all_is_mended() -> None:
    events = saved(8, 0, 1) + saved(16)
    assert step_to_become_ready(events, (8, 16), world=2, mended_s=2.0) == 16, "whether or not it was saved"
    assert step_to_become_ready(events, (8, 16), world=2, mended_s=14.0) == 8, "there may have been no slot yet"
    begun = Event(event="begin", rank=0, pid=5, monotonic_s=14.0)
    assert step_to_become_ready([*events, begun], (8, 16), world=2, mended_s=2.0) == 8, "its slots may not be there yet"
    assert step_to_become_ready(saved(8, 1), (8, 16), world=2, mended_s=14.0) == 0
    again = saved(16, at_s=5.0) + saved(16, 0, 1)
    assert step_to_become_ready(again, (8, 16), world=2, mended_s=15.0) == 16, "its last doing counts"


def test_equal_runs_are_identical() -> None:
    assert compare(_finals(), _finals(), world=2).identical


@pytest.mark.parametrize("kind", sorted(_DIGESTS))
def test_each_kind_of_digest_counts(kind: str) -> None:
    other = _finals()
    other[1] = msgspec.structs.replace(other[1], digests=_DIGESTS | {kind: "ee"})

    judgement = compare(_finals(), other, world=2)

    assert (judgement.identical, judgement.differences) == (False, (f"rank 1: {kind} differ",))


def test_a_missing_rank_an_early_end_and_an_empty_pair_are_no_identity() -> None:
    early = [_finals()[0], msgspec.structs.replace(_finals()[1], step=8)]

    assert not compare(_finals()[:1], _finals(), world=2).identical
    assert not compare(_finals(), [], world=2).identical
    assert not compare([], [], world=2).identical
    assert not compare(early, _finals(), world=2).identical


def test_a_digest_that_one_side_lacks_is_a_difference() -> None:
    other = [msgspec.structs.replace(final, digests={"weights": "aa"}) for final in _finals()]

    assert not compare(_finals(), other, world=2).identical


def test_steps_must_follow_on_from_the_restored_one() -> None:
    good = [_event("begin", 4), _event("step", 5), _event("step", 6)]
    gap = [_event("begin", 4), _event("step", 6)]

    assert torn_restores(good) == ()
    assert torn_restores(gap) == ("rank 0: step 6 came after step 4",)


def test_a_step_done_again_must_lose_the_same() -> None:
    events = [_event("begin", 0), _event("step", 1), _event("begin", 0, pid=2), _event("step", 1, pid=2, loss=0.25)]

    assert torn_restores(events) == ("rank 0: step 1 lost 0.25, and 0.5 before",)


def test_a_step_that_lost_no_number_may_lose_one_when_done_again_and_never_the_other_way_round() -> None:
    def twice(first: float | None, second: float | None) -> tuple[str, ...]:
        begin = [_event("begin", 0), _event("begin", 0, pid=2)]
        steps = [_event("step", 1, pid=pid) for pid in (1, 2)]
        steps = [msgspec.structs.replace(one, loss=loss) for one, loss in zip(steps, (first, second), strict=True)]
        return torn_restores([begin[0], steps[0], begin[1], steps[1]])

    assert twice(None, 0.5) == twice(None, None) == ()
    assert twice(0.5, None) == ("rank 0: step 1 lost None, and 0.5 before",)


def test_two_intervals_may_be_lost_only_when_the_newest_was_not_protected() -> None:
    assert steps_lost_allowed(newest_due_protected=True, every=4) == 4
    assert steps_lost_allowed(newest_due_protected=False, every=4) == 8
