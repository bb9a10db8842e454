"""The judge says no: for each promise a planted piece of evidence that breaks it, and only it is named."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from toprope.chaos.evidence import Evidence, Protection, ReadyFact, Restart, Told, Use
from toprope.chaos.hits import costs_slots
from toprope.chaos.journal import Event, Final
from toprope.chaos.judging import judge, undisturbed
from toprope.chaos.promises import PROMISES
from toprope.chaos.scenario import Bounds, Expected, Fault, Scenario, Workload
from toprope.chaos.verdict import Injection, Verdict

STEPS = 24
SCENARIO = Scenario(
    name="planted",
    about="a rank of two is killed after step 10",
    attacks=("bit-identical",),
    label="chaos",
    fault=(Fault(do="kill", target="rank 1", at_step=10),),
    workload=Workload(steps=STEPS),
    bounds=Bounds(protected_s=8.0),
    expected=Expected(told=("sidecar a: trouble",)),
)
KILL = Injection(
    fault="kill", target="rank 1", trigger="after step 10", fired=True, witness="pid 11 ended with -9", at_s=10.1
)


def event(kind: str, rank: int, pid: int, at_s: float, **more: object) -> Event:
    return replace(Event(event=kind, rank=rank, pid=pid, monotonic_s=100.0 + at_s), **more)


def done(rank: int, pid: int, step: int, *, at_s: float, saved: bool = False) -> Event:
    return event("step", rank, pid, at_s, step=step, loss=1 / step, took_s=0.01, saved=saved)


def ran() -> list[Event]:
    """Two ranks end step s at second s, are ended after step 10, and go on from step 8 at second 13."""
    events = []
    for rank, (first, second) in enumerate(((20, 30), (21, 31))):
        events += [event("start", rank, first, 0.0), event("begin", rank, first, 0.5)]
        events += [
            event("step", rank, first, s, step=s, loss=1 / s, took_s=0.01, saved=s % 4 == 0) for s in range(1, 11)
        ]
        events += [event("start", rank, second, 12.0), event("begin", rank, second, 13.0, step=8)]
        events += [done(rank, second, step, at_s=5.0 + step) for step in range(9, STEPS + 1)]
    return sorted(events, key=lambda one: one.monotonic_s)


def evidence(**changes: object) -> Evidence:
    finals = tuple(Final(rank=rank, world=2, step=STEPS, digests={"model": "ab" * 32}) for rank in range(2))
    whole = Evidence(
        scenario=SCENARIO,
        seed=1,
        began_s=100.0,
        seconds=30.0,
        events=tuple(ran()),
        finals=finals,
        reference=finals,
        injections=(KILL,),
        restarts=(Restart(at_s=110.5, newest_step=10, protected_step=8, ended={1: -9}, pids=(30, 31)),),
        readies=(ReadyFact(number=3, attempt=1, step=8), ReadyFact(number=5, attempt=2, step=24)),
        told_ready={8: 1, 24: 2},
        protections=(Protection(at_s=104.5, step=4), Protection(at_s=118.5, step=12)),
        log=("0 JOB", "1 ELECTED"),
        verified=2,
        ready_due=24,
        ready_after_s=0.5,
        told=(Told(process="sidecar a", words="trouble", line="trouble"),),
        uses=(Use(process="coordinator", open_files=(20, 21), resident_bytes=(1000, 1100)),),
    )
    return replace(whole, **changes)


def changed(rank: int, **more: object) -> tuple[Final, ...]:
    return tuple(replace(one, **more) if one.rank == rank else one for one in evidence().finals)


def with_event(index: int, **more: object) -> tuple[Event, ...]:
    """The events, with something else in one step that a rank does again."""
    events = ran()
    again = [number for number, one in enumerate(events) if one.event == "step" and one.pid == 31]
    events[again[index]] = replace(events[again[index]], **more)
    return tuple(events)


def restart(**more: object) -> tuple[Restart, ...]:
    return (replace(evidence().restarts[0], **more),)


BREAKS: list[tuple[str, dict[str, Any]]] = [
    ("bit-identical", {"finals": changed(1, digests={"model": "ac" * 32})}),
    ("bit-identical", {"finals": evidence().finals[:1]}),
    ("bit-identical", {"reference": ()}),
    ("no torn step", {"events": with_event(0, loss=7.0)}),
    ("no torn step", {"events": with_event(3, step=99)}),
    ("little lost", {"restarts": restart(newest_step=13, protected_step=12)}),
    ("little lost", {"restarts": restart(newest_step=17)}),
    ("verified", {"damages": ("shard 1: digest differs",)}),
    ("verified", {"verified": 0}),
    ("verified", {"scenario": replace(SCENARIO, expected=Expected(damaged=True, told=SCENARIO.expected.told))}),
    ("READY once", {"readies": (*evidence().readies, ReadyFact(number=6, attempt=2, step=24))}),
    ("READY once", {"told_ready": {8: 1, 16: 2, 24: 2}}),  # of step 16 there is no record
    (
        "READY once",  # step 8 was READY in attempt 1, and is so again only in attempt 2
        {"readies": (ReadyFact(number=5, attempt=2, step=8), ReadyFact(number=7, attempt=2, step=24))},
    ),
    ("READY again", {"readies": evidence().readies[:1], "told_ready": {8: 1}}),  # whatever the coordinator says
    ("protected again", {"protections": ()}),
    ("protected again", {"protections": (Protection(at_s=105.0, step=12), Protection(at_s=114.0, step=8))}),
    ("training goes on", {"injections": (replace(KILL, target="sidecar a"),)}),
    ("short stall", {"events": with_event(2, took_s=1.5)}),
    ("recovers", {"restarts": restart(at_s=50.0)}),
    ("recovers", {"restarts": restart(pids=(77, 78))}),
    ("told", {"told": (Told(process="sidecar a", words="trouble", line=""),)}),
    ("nothing left", {"leftovers": ("process 99 still ran",)}),
    ("nothing left", {"uses": (Use(process="coordinator", open_files=(20, 60), resident_bytes=(1, 1)),)}),
    (
        "nothing left",
        {"uses": (Use(process="sidecar a", seconds=900, open_files=(1, 1), resident_bytes=(1 << 20, 4 << 20)),)},
    ),
]


def outcome(verdict: Verdict, name: str) -> str:
    return next(one.outcome for one in verdict.promises if one.name == name)


def test_a_run_in_which_all_was_kept_is_good() -> None:
    verdict = judge(evidence())
    assert [(one.name, one.outcome) for one in verdict.promises] == [(name, "held") for name in PROMISES]
    assert verdict.good
    assert verdict.exit_status == 0


@pytest.mark.parametrize(("promise", "changes"), BREAKS)
def test_what_breaks_a_promise_is_found_and_named_alone(promise: str, changes: dict[str, Any]) -> None:
    verdict = judge(evidence(**changes))
    assert verdict.broken == (promise,)
    assert not verdict.good
    assert verdict.exit_status == 1
    assert all(one.evidence for one in verdict.promises)


def test_every_promise_has_evidence_that_breaks_it() -> None:
    assert {promise for promise, _ in BREAKS} == set(PROMISES)


def test_what_steps_lose_after_a_fault_of_numbers_is_no_evidence_until_ranks_have_gone_back() -> None:
    other = with_event(0, loss=7.0)  # step 9 again, at 14 s: it lost 1/9 at 9 s
    spike = replace(KILL, fault="spike", target="world", at_s=8.5)
    assert judge(evidence(events=other, injections=(KILL, spike))).broken == ()
    assert judge(evidence(events=other, injections=(KILL, replace(spike, at_s=9.5)))).broken == ("no torn step",)
    assert judge(evidence(events=other, injections=(KILL, replace(spike, fired=False)))).broken == ("no torn step",)
    again = replace(spike, at_s=13.5)  # after the restart: what is done again loses other numbers, in other steps
    assert judge(evidence(events=other, injections=(KILL, again))).broken == ()
    none = with_event(0, loss=None)
    assert judge(evidence(events=none, injections=(KILL, again))).broken == ()
    assert judge(evidence(events=none)).broken == ("no torn step",), "NaN that nobody has made"
    skipped = with_event(3, step=99)
    assert judge(evidence(events=skipped, injections=(KILL, again))).broken == ("no torn step",)


def test_a_log_that_is_damaged_breaks_what_rests_on_it() -> None:
    verdict = judge(evidence(log_trouble="LOG_CORRUPT record 4", log=(), verified=0))
    assert verdict.broken == ("verified", "READY once")


def test_a_planned_fault_that_did_not_happen_fails_the_run_though_all_was_kept() -> None:
    verdict = judge(evidence(injections=(KILL, replace(KILL, fired=False, witness="its moment never came"))))
    assert verdict.broken == ()
    assert len(verdict.unfired) == 1
    assert not verdict.good


def test_an_attacked_promise_that_could_not_be_judged_proves_nothing() -> None:
    asked = replace(SCENARIO, attacks=("told",))
    verdict = judge(evidence(scenario=asked, told=()))
    assert outcome(verdict, "told") == "not judged"
    assert not verdict.good


def test_what_a_step_waited_for_a_processor_is_not_held_against_saving() -> None:
    assert judge(evidence(events=with_event(2, took_s=1.5, queued_s=0.6))).good
    assert judge(evidence(events=with_event(2, took_s=1.5, queued_s=0.4))).broken == ("short stall",)


def test_a_step_that_waited_for_a_processor_for_several_bounds_was_held_up_all_the_same() -> None:
    assert judge(evidence(events=with_event(2, took_s=3.5, queued_s=3.4))).good
    assert judge(evidence(events=with_event(2, took_s=4.1, queued_s=4.0))).broken == ("short stall",)


def test_the_longest_end_step_and_the_one_that_saving_held_up_longest_are_told_apart() -> None:
    queued = with_event(2, took_s=0.9, queued_s=0.8)
    first = next(one for one in queued if (one.event, one.rank, one.step) == ("step", 0, 1))
    slow = tuple(replace(one, took_s=0.3) if one is first else one for one in queued)
    verdict = judge(evidence(events=slow))
    (said,) = next(one.evidence for one in verdict.promises if one.name == "short stall")
    assert said.startswith("saving held up no step for longer than 300 ms (bound: 1000 ms): its end_step took 300 ms")
    assert verdict.figures["longest_end_step_s"] == 0.9


def test_a_restart_is_as_long_as_from_the_blow_to_the_next_step_not_from_when_somebody_noticed() -> None:
    late = evidence(scenario=replace(SCENARIO, bounds=Bounds(recovered_s=5.0)), injections=(replace(KILL, at_s=8.0),))
    assert judge(late).broken == ("recovers",)
    assert "a blow at 8.0 s, 6.0 s down" in next(one for one in judge(late).promises if one.name == "recovers").evidence
    assert judge(replace(late, injections=(replace(KILL, at_s=9.5),))).good


def test_a_stretch_is_undisturbed_from_the_end_of_all_faults_and_restarts_to_the_next_or_the_last_step() -> None:
    assert undisturbed(evidence()) == [(113.0, 129.0)]
    pause = replace(KILL, fault="pause", target="sidecar a", at_s=12.0, until_s=15.0)
    late = replace(pause, at_s=20.0, until_s=21.0)
    assert undisturbed(evidence(injections=(KILL, late, pause))) == [(115.0, 120.0), (121.0, 129.0)]
    assert undisturbed(evidence(injections=(replace(KILL, fired=False),), restarts=())) == []


def test_what_was_disturbed_until_the_end_need_not_be_protected_again() -> None:
    pause = replace(KILL, fault="pause", target="sidecar a", at_s=12.0, until_s=22.0)
    verdict = judge(evidence(injections=(KILL, pause), protections=()))
    assert outcome(verdict, "protected again") == "not judged"


def test_where_no_step_must_become_ready_nothing_is_said_to_be_kept() -> None:
    asked = replace(SCENARIO, attacks=("READY again",))
    verdict = judge(evidence(scenario=asked, ready_due=0))
    assert outcome(verdict, "READY again") == "not judged"
    assert not verdict.good


@pytest.mark.parametrize(
    ("fault", "excused"),
    [
        ({"fault": "pause", "target": "sidecar b"}, True),
        ({"fault": "kill", "target": "broker"}, True),
        ({"fault": "roll", "target": "services"}, True),
        ({"fault": "network", "target": "broker"}, True),
        ({"fault": "fail", "target": "sidecar a", "witness": "before:peers.receive peer http://x, 2 times"}, True),
        ({"fault": "fail", "target": "sidecar a", "witness": "before:objects.create throttled x, 2 times"}, False),
        ({"fault": "fail", "target": "sidecar a", "witness": "before:disk.write ENOSPC x, 2 times"}, False),
        ({"fault": "network", "target": "store"}, False),
        ({"fault": "slow", "target": "rank 1"}, False),
        ({"fault": "ckpt", "target": "coordinator"}, False),
        ({"fault": "flip", "target": "store"}, False),
        ({"fault": "twice", "target": "world"}, False),
        ({"fault": "pause", "target": "sidecar b", "fired": False}, False),
    ],
)
def test_only_a_fault_of_what_protects_excuses_that_more_was_lost(fault: dict[str, Any], excused: bool) -> None:  # noqa: FBT001 - a case
    away = replace(KILL, at_s=9.0, until_s=10.0, **fault)
    verdict = judge(evidence(restarts=restart(newest_step=17, protected_step=8), injections=(KILL, away)))
    assert ("little lost" in verdict.broken) is not excused


def test_only_a_fault_of_a_service_excuses_that_a_rank_had_no_slot() -> None:
    service = replace(KILL, target="sidecar a")
    assert costs_slots(service)
    assert costs_slots(replace(service, fault="network", target="store")), "what is uploaded keeps its slot"
    assert not costs_slots(replace(service, fault="slow", target="rank 1"))
    assert not costs_slots(replace(service, fault="ckpt", target="store"))
    assert not costs_slots(replace(service, fired=False))


def test_while_a_service_was_away_what_was_not_protected_may_be_lost_and_no_more() -> None:
    away = replace(KILL, target="coordinator", at_s=9.0, until_s=10.0)
    long_ago = replace(away, at_s=1.0, until_s=2.0)
    unprotected = restart(newest_step=17, protected_step=8)
    assert judge(evidence(restarts=unprotected, injections=(KILL, away))).good
    assert judge(evidence(restarts=unprotected, injections=(KILL, long_ago))).broken == ("little lost",)
    lost = restart(newest_step=19, protected_step=10)
    assert judge(evidence(restarts=lost, injections=(KILL, away))).broken == ("little lost",)


def test_bounds_are_those_of_the_scenario() -> None:
    strict = replace(SCENARIO, bounds=Bounds(stall_s=0.005, lost_steps=1, recovered_s=3.0, restarts=0))
    verdict = judge(evidence(scenario=strict))
    assert verdict.broken == ("little lost", "training goes on", "short stall", "recovers")


def test_every_second_of_every_rank_is_new_training_or_named_waste() -> None:
    verdict = judge(evidence())
    causes = {one.cause: one.rank_seconds for one in verdict.losses}
    whole_s = 2 * 29.0
    useful_s = verdict.figures["goodput_share"] * whole_s
    assert sum(causes.values()) + useful_s == pytest.approx(whole_s, abs=0.05)
    assert causes["restore"] == pytest.approx(2.0)
    assert causes["down"] == pytest.approx(2 * 2.0)
    assert causes["steps done again"] == pytest.approx(2 * 1.99, abs=0.05)  # steps 9 and 10, the first time
    assert verdict.goodput[-1].at_s == pytest.approx(29.0)
    assert all(0.0 <= one.share <= 1.0 for one in verdict.goodput)


def test_the_timeline_has_a_row_for_each_rank_and_the_faults() -> None:
    spans = judge(evidence()).timeline
    of_one = [(one.kind, round(one.begin_s, 2), round(one.end_s, 2)) for one in spans if one.rank == 1]
    assert ("training", 0.5, 10.0) in of_one
    assert ("down", 10.0, 12.0) in of_one
    assert ("restore", 12.0, 13.0) in of_one
    assert ("training", 13.0, 29.0) in of_one
    assert [one.kind for one in spans if one.what == "kill rank 1"] == ["fault"]
    assert [one.what for one in spans if one.rank == 0 and one.kind == "snapshot"] == ["step 4", "step 8"]
