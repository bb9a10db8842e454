"""The report is a pure function of the evidence, and says so when a promise was not kept."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from toprope.chaos.journal import Event, Final
from toprope.chaos.report import Evidence, KilledProcess, Member, build, render

_DIGESTS = {"weights": "aa", "optimizer": "bb", "rng": "cc"}


def _event(event: str, at_s: float, *, rank: int = 0, pid: int = 1, step: int = 0, tier: str = "") -> Event:
    restored = ({"rank": 1, "tier": tier, "node": "a"},) if tier else ()
    return Event(event=event, rank=rank, pid=pid, monotonic_s=at_s, step=step, restored=restored)


def evidence() -> Evidence:
    finals = tuple(Final(rank=rank, world=2, step=9, digests=dict(_DIGESTS)) for rank in range(2))
    events = [_event("begin", 1.0), _event("begin", 1.0, rank=1)]
    events += [_event("step", 1.0 + step, step=step) for step in range(1, 7)]
    events += [_event("failed", 10.5), _event("begin", 14.0, pid=2, step=4, tier="peer")]
    events += [_event("begin", 14.0, rank=1, pid=3, step=4, tier="peer")]
    events += [_event("step", 10.0 + step, pid=2, step=step) for step in range(5, 10)]
    return Evidence(
        job="demo",
        steps=9,
        seed=1,
        every=4,
        world=2,
        node="b",
        killed=(KilledProcess(what="sidecar of node b", pid=4711, status=-9),),
        killed_at_s=10.0,
        killed_at_utc="12:00:00 UTC",
        kill_took_s=0.1,
        boot_id_old="01",
        boot_id_new="02",
        world_before=(Member(rank=0, node="a", boot_id="00"), Member(rank=1, node="b", boot_id="01")),
        world_after=(Member(rank=0, node="a", boot_id="00"), Member(rank=1, node="b", boot_id="02")),
        due_from=0,
        protected_at_kill=4,
        events=tuple(events),
        log=("0 JOB",),
        finals=finals,
        reference=finals,
    )


def test_times_and_lost_steps_come_from_the_journals() -> None:
    report = build(evidence())

    assert (report.bit_identical, report.broken) == ("yes", ())
    assert (report.newest_step_at_kill, report.newest_due_at_kill, report.restored_step) == (6, 4, 4)
    assert (report.steps_lost, report.steps_lost_allowed) == (2, 4)
    assert (report.detected_after_s, report.first_new_step_after_s, report.regained_after_s) == (0.5, 5.0, 7.0)


def test_an_unprotected_newest_step_may_cost_two_intervals() -> None:
    report = build(msgspec.structs.replace(evidence(), protected_at_kill=0))

    assert (report.newest_due_protected, report.steps_lost_allowed) == (False, 8)


def test_a_shard_that_did_not_come_from_a_peers_memory_breaks_a_promise() -> None:
    good = evidence()
    events = [msgspec.structs.replace(one, restored=()) if one.pid == 3 else one for one in good.events]
    events.append(_event("begin", 14.0, rank=1, pid=3, step=4, tier="object"))

    report = build(msgspec.structs.replace(good, events=tuple(events)))

    assert not report.good
    assert "did not all come from a peer's memory" in "".join(report.broken)


def test_a_process_that_was_not_killed_by_sigkill_breaks_a_promise() -> None:
    survivor = (KilledProcess(what="rank", pid=1, status=0),)

    assert "rank ended with 0" in build(msgspec.structs.replace(evidence(), killed=survivor)).broken


def _restored_at(*steps: int) -> tuple[Event, ...]:
    """The events of a run whose ranks go on from these steps."""
    begins = [_event("begin", 14.0, rank=rank, pid=2 + rank, step=step, tier="peer") for rank, step in enumerate(steps)]
    first = [event for event in evidence().events if event.pid == 1]
    return (*first, *begins, *(_event("step", 10.0 + step, pid=2, step=step) for step in range(steps[0] + 1, 10)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"events": _restored_at(1, 1)}, "5 steps were lost, 4 are allowed"),
        ({"events": _restored_at(0, 0)}, "training began afresh"),
        ({"events": _restored_at(4, 2)}, "ranks restored different steps: {0: 4, 1: 2}"),
        ({"boot_id_new": "01"}, "the new node has the boot id of the old one"),
        ({"events": _restored_at(4, 4)[:-1]}, ""),
        ({"events": (*_restored_at(4, 4), _event("step", 25.0, pid=2, step=11))}, "step 11 came after step 9"),
    ],
)
def test_each_broken_promise_is_named_and_spoils_the_report(changes: dict[str, object], said: str) -> None:
    report = build(msgspec.structs.replace(evidence(), **changes))

    assert report.good == (not said)
    assert said in "; ".join(report.broken)


def test_the_printed_report_ends_with_the_verdict_and_names_what_differs() -> None:
    spoiled = tuple(msgspec.structs.replace(final, digests=_DIGESTS | {"rng": "ff"}) for final in evidence().reference)
    printed = io.StringIO()

    render(build(msgspec.structs.replace(evidence(), reference=spoiled)), Console(file=printed, width=100))

    assert printed.getvalue().rstrip().splitlines()[-1] == "bit-identical: no"
    assert "rank 0: rng differ" in printed.getvalue()
    assert "pid 4711  status -9  sidecar of node b" in printed.getvalue()
