"""Judges a run from outside, promise by promise. Pure: evidence in, a verdict out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from toprope.chaos.evidence import Evidence, Restart
from toprope.chaos.hits import costs_protection, ends_trainers, spoils_numbers
from toprope.chaos.journal import Event
from toprope.chaos.oracle import RECOVERS_S, compare, steps_lost_allowed, torn_restores
from toprope.chaos.promises import PROMISES
from toprope.chaos.timeline import figures, goodput, losses, spans
from toprope.chaos.verdict import Outcome, Promise, Verdict

QUEUED_BOUNDS_MAX = 3.0
"""How much of what a step waited for a processor is not held against saving, in bounds of a stall."""
OPEN_FILES_MORE = 8
"""How many more open files a service may have at the end: connections come and go."""
LONG_S, GROWN_BYTES_MAX = 300.0, 2 * 1024 * 1024
"""A service that has lived for so long since it was warm may have grown by so much and no more."""
_SHOWN = 6
Finding = tuple[Outcome, list[str]]


def judge(evidence: Evidence, *, stopped: str = "") -> Verdict:
    """Return the verdict; of a run that was ``stopped`` nothing is judged."""
    scenario = evidence.scenario
    promises = []
    for name, look in _JUDGES.items():
        outcome, found = look(evidence) if not stopped else ("not judged", [f"not carried through: {_line(stopped)}"])
        shown = found[:_SHOWN] + ([f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else [])
        attacked = name in scenario.attacks
        promise = Promise(name=name, says=PROMISES[name], outcome=outcome, evidence=tuple(shown), attacked=attacked)
        promises.append(promise)
    return Verdict(
        scenario=scenario.name,
        about=scenario.about,
        seed=evidence.seed,
        steps=scenario.workload.steps,
        world=scenario.topology.world,
        seconds=round(evidence.seconds, 2),
        promises=tuple(promises),
        injections=evidence.injections,
        timeline=spans(evidence),
        figures=figures(evidence),
        losses=losses(evidence),
        goodput=goodput(evidence),
        log=evidence.log,
        stopped=_line(stopped),
    )


def _line(text: str) -> str:
    return text.splitlines()[0] if text else ""


def _finding(broken: Iterable[str], *held: str) -> Finding:
    found = list(broken)
    return ("broken", found) if found else ("held", list(held))


def _identical(evidence: Evidence) -> Finding:
    world = evidence.scenario.topology.world
    judgement = compare(evidence.finals, evidence.reference, world=world)
    digests = [
        f"rank {final.rank}, step {final.step}: {part} {digest[:16]}, the same in both runs"
        for final in evidence.finals
        for part, digest in final.digests.items()
    ]
    return _finding(judgement.differences, *digests)


def _not_torn(evidence: Evidence) -> Finding:
    broken = list(torn_restores(evidence.events, is_wrong=_lost_wrongly(evidence)))
    held = []
    for restart in evidence.restarts:
        begins = _begins(evidence, restart)
        steps = sorted({event.step for event in begins})
        if len(steps) > 1:
            broken.append(f"after the restart at {_at(evidence, restart)} ranks went on from steps {steps}")
        elif steps:
            held.append(f"after the restart at {_at(evidence, restart)} from step {steps[0]}: {_sources(begins)}")
    again = Counter(event.step for event in evidence.events if event.event == "step")
    count = sum(times > evidence.scenario.topology.world for times in again.values())
    return _finding(broken, f"{count} steps were done again, with equal losses", *held)


def _lost_wrongly(evidence: Evidence) -> Callable[[Event], bool]:
    """Return what says whether a step lost a wrong number: between a fault of numbers and the next restart."""
    spoilt = [evidence.began_s + one.at_s for one in evidence.injections if spoils_numbers(one)]
    restarts = [one.at_s for one in evidence.restarts]

    def is_wrong(event: Event) -> bool:
        after = max((at_s for at_s in spoilt if at_s <= event.monotonic_s), default=None)
        return after is not None and not any(after < at_s <= event.monotonic_s for at_s in restarts)

    return is_wrong


def _sources(begins: Iterable[Event]) -> str:
    shards = {(int(one["rank"]), str(one["tier"]), str(one["node"])) for event in begins for one in event.restored}
    return ", ".join(f"shard {rank} from {tier} {node}".strip() for rank, tier, node in sorted(shards)) or "nothing"


def _little_lost(evidence: Evidence) -> Finding:
    if not evidence.restarts:
        return "not judged", ["the world was never started again"]
    broken: list[str] = []
    held: list[str] = []
    for restart in evidence.restarts:
        begins = _begins(evidence, restart)
        if not begins:
            continue  # ended before it had begun: the next one tells
        lost, allowed = restart.newest_step - min(event.step for event in begins), _may_lose(evidence, restart)
        line = f"at {_at(evidence, restart)}: {lost} steps lost of {restart.newest_step}, {allowed} allowed"
        (broken if lost > allowed else held).append(line)
    return _finding(broken, *held) if broken or held else ("not judged", ["no restart came so far as to begin"])


def _may_lose(evidence: Evidence, restart: Restart) -> int:
    """Return how many steps may be lost: by the cadence, or all past the protected one if its making was disturbed."""
    if evidence.scenario.bounds.lost_steps is not None:
        return evidence.scenario.bounds.lost_steps
    every = evidence.scenario.topology.every
    protected = restart.protected_step >= restart.newest_step - restart.newest_step % every
    by_cadence = steps_lost_allowed(newest_due_protected=protected, every=every)
    unprotected = restart.newest_step - restart.protected_step
    return max(by_cadence, unprotected) if _was_disturbed(evidence, restart) else by_cadence


def _was_disturbed(evidence: Evidence, restart: Restart) -> bool:
    """Say whether a fault that costs protection was in force, or just over, since the step after the protected one."""
    step = restart.protected_step + evidence.scenario.topology.every
    before = (event for event in evidence.events if event.event == "step" and event.monotonic_s <= restart.at_s)
    ends_s = (event.monotonic_s for event in before if event.step == step)
    since_s = min(ends_s, default=restart.at_s) - evidence.began_s - RECOVERS_S
    until_s = restart.at_s - evidence.began_s
    return any(costs_protection(one) and one.at_s <= until_s and one.until_s >= since_s for one in evidence.injections)


def _verified(evidence: Evidence) -> Finding:
    if evidence.log_trouble:
        return "broken", [evidence.log_trouble]
    if evidence.scenario.expected.damaged:
        missed = [] if evidence.damages else ["objects were damaged on purpose, and verifying found nothing wrong"]
        return _finding(missed, *evidence.damages)
    if not evidence.verified:
        return "broken", ["there is no READY checkpoint to verify"]
    return _finding(evidence.damages, f"{evidence.verified} READY checkpoints were read back in full")


def _once(evidence: Evidence) -> Finding:
    broken = [evidence.log_trouble] if evidence.log_trouble else []
    for (attempt, step), count in Counter((one.attempt, one.step) for one in evidence.readies).items():
        if count > 1:
            broken.append(f"step {step} of attempt {attempt} is READY {count} times")
    lost = [
        step
        for step, number in sorted(evidence.told_ready.items())
        if not any(one.step == step and one.attempt <= number for one in evidence.readies)
    ]
    broken += [f"step {step} was said to be READY, and there is no record of it in the log" for step in lost]
    return _finding(broken, f"{len(evidence.log)} records, {len(evidence.readies)} of them READY, each step once")


def _ready_again(evidence: Evidence) -> Finding:
    """Judge by the records as they lie in the log, not by what a coordinator says to be READY."""
    if not evidence.ready_due:
        return "not judged", ["no step was due that all ranks must have saved"]
    newest = max((one.step for one in evidence.readies), default=0)
    if newest < evidence.ready_due:
        return "broken", [f"step {evidence.ready_due} was due, step {newest} is the newest READY in the log"]
    return "held", [f"step {newest} was READY {evidence.ready_after_s:.1f} s after the last step ended"]


def _protected_again(evidence: Evidence) -> Finding:
    """Judge each stretch in which nothing disturbed the job, if it was long enough to ask for it."""
    bound_s = evidence.scenario.bounds.protected_s
    broken: list[str] = []
    held: list[str] = []
    for begin_s, end_s in undisturbed(evidence):
        newest = _step_at(evidence, begin_s)
        later = (one for one in evidence.protections if one.at_s >= begin_s and one.step > newest)
        first = next(later, None)
        line = f"undisturbed from {begin_s - evidence.began_s:.1f} s, step {newest}, on: "
        if first is not None and first.at_s <= begin_s + bound_s:
            held.append(f"{line}step {first.step} was protected {first.at_s - begin_s:.1f} s later")
        elif end_s > begin_s + bound_s:
            broken.append(f"{line}no newer step was protected within {bound_s:g} s")
    return _finding(broken, *held) if broken or held else ("not judged", ["it was disturbed until the end"])


def undisturbed(evidence: Evidence) -> list[tuple[float, float]]:
    """Return the stretches of time after the first fault in which none was in force and no rank was being started."""
    faults = [(one.at_s, max(one.at_s, one.until_s)) for one in evidence.injections if one.fired]
    disturbed = [(evidence.began_s + begin_s, evidence.began_s + end_s) for begin_s, end_s in faults]
    for restart in evidence.restarts:
        begun_s = [event.monotonic_s for event in _begins(evidence, restart)]
        disturbed.append((_blow_s(evidence, restart), max(begun_s, default=restart.at_s)))
    found, until_s = [], 0.0
    last_s = max((event.monotonic_s for event in evidence.events if event.event == "step"), default=0.0)
    for begin_s, end_s in [*sorted(disturbed), (last_s, last_s)]:
        if until_s and begin_s > until_s:
            found.append((until_s, begin_s))
        until_s = max(until_s, end_s)
    return found


def _step_at(evidence: Evidence, at_s: float) -> int:
    """Return the newest step that ranks were at, at this time: what they have lost before no longer counts."""
    last = {event.rank: event.step for event in evidence.events if event.monotonic_s <= at_s and event.step}
    return max(last.values(), default=0)


def _goes_on(evidence: Evidence) -> Finding:
    allowed = evidence.scenario.bounds.restarts
    hits = sum(one.fired and ends_trainers(one.fault, one.target) for one in evidence.injections)
    allowed = hits if allowed is None else allowed
    told = [f"ranks ended at {_at(evidence, one)}: {_ends(one)}" for one in evidence.restarts]
    if len(evidence.restarts) > allowed:
        return "broken", [f"{len(evidence.restarts)} restarts, {hits} faults hit the trainer", *told]
    return "held", told or ["no rank ended before the last step"]


def _short_stall(evidence: Evidence) -> Finding:
    """Judge how long steps were held up, but for what they waited for a processor, which others may take.

    That a step waits so in its own thread is the machine's doing, if it is not for long: a step that is held up for
    several times its bound is held against saving all the same, since what saves may be what takes the processor.
    """
    steps = [event for event in evidence.events if event.event == "step"]
    if not steps:
        return "not judged", ["no step was done"]
    bound = evidence.scenario.bounds.stall_s
    slow = [
        f"rank {event.rank}: end_step({event.step}) took {event.took_s:.2f} s, {event.queued_s:.2f} s of it in a queue"
        for event in steps
        if _held_up_s(event, bound) > bound
    ]
    worst = max(steps, key=lambda event: _held_up_s(event, bound))
    held_ms, took_ms, queued_ms = (1000 * s for s in (_held_up_s(worst, bound), worst.took_s, worst.queued_s))
    held = f"saving held up no step for longer than {held_ms:.0f} ms (bound: {bound * 1000:.0f} ms)"
    return _finding(slow, f"{held}: its end_step took {took_ms:.0f} ms, {queued_ms:.0f} ms of it in a queue")


def _held_up_s(event: Event, bound_s: float) -> float:
    return event.took_s - min(event.queued_s, QUEUED_BOUNDS_MAX * bound_s)


def _recovers(evidence: Evidence) -> Finding:
    if not evidence.restarts:
        return "not judged", ["the world was never started again"]
    broken: list[str] = []
    held: list[str] = []
    bound = evidence.scenario.bounds.recovered_s
    for restart in evidence.restarts:
        first, blow_s = first_step_after(evidence, restart), _blow_s(evidence, restart)
        line = f"a blow at {blow_s - evidence.began_s:.1f} s, "
        if first is None and restart is not evidence.restarts[-1]:
            continue  # hit again before it had done a step
        if first is None or first - blow_s > bound:
            broken.append(line + ("no step was done after it" if first is None else f"{first - blow_s:.1f} s down"))
        else:
            held.append(line + f"the next step was done {first - blow_s:.1f} s later")
    return _finding(broken, *held)


def _was_told(evidence: Evidence) -> Finding:
    if not evidence.told:
        return "not judged", ["the scenario says of no words that they must be told"]
    broken = [f"the log of {one.process} says nothing of {one.words!r}" for one in evidence.told if not one.line]
    return _finding(broken, *(f"{one.process}: {one.line[:160]}" for one in evidence.told))


def _nothing_left(evidence: Evidence) -> Finding:
    if not evidence.looked:
        return "not judged", ["the run was broken off"]
    broken = list(evidence.leftovers)
    for use in evidence.uses:
        before, after = use.open_files
        if after > before + OPEN_FILES_MORE:
            broken.append(f"{use.process} had {before} files open when warm and {after} {use.seconds:.0f} s later")
        grown_bytes = use.resident_bytes[1] - use.resident_bytes[0]
        if use.seconds >= LONG_S and grown_bytes > GROWN_BYTES_MAX:
            broken.append(f"{use.process} had grown by {grown_bytes} bytes {use.seconds:.0f} s after it was warm")
    held = [
        f"{use.process}: {use.open_files[0]} open files when warm, {use.open_files[1]} {use.seconds:.0f} s later"
        for use in evidence.uses
    ]
    return _finding(broken, *held, "no process and no file is left")


def first_step_after(evidence: Evidence, restart: Restart) -> float | None:
    """Return when the ranks of a restart had done their first step."""
    steps = (event for event in evidence.events if event.event == "step" and event.pid in restart.pids)
    return min((event.monotonic_s for event in steps), default=None)


def _blow_s(evidence: Evidence, restart: Restart) -> float:
    """Return when what ended the ranks was done to them, since noticing takes time; else when it was seen."""
    hits = [one.at_s for one in evidence.injections if one.fired and ends_trainers(one.fault, one.target)]
    return max(
        (at_s + evidence.began_s for at_s in hits if at_s + evidence.began_s <= restart.at_s), default=restart.at_s
    )


def _begins(evidence: Evidence, restart: Restart) -> list[Event]:
    return [event for event in evidence.events if event.event == "begin" and event.pid in restart.pids]


def _at(evidence: Evidence, restart: Restart) -> str:
    return f"{restart.at_s - evidence.began_s:.1f} s"


def _ends(restart: Restart) -> str:
    return ", ".join(f"rank {rank} with status {status}" for rank, status in sorted(restart.ended.items()))


_JUDGES: dict[str, Callable[[Evidence], Finding]] = {
    "bit-identical": _identical,
    "no torn step": _not_torn,
    "little lost": _little_lost,
    "verified": _verified,
    "READY once": _once,
    "READY again": _ready_again,
    "protected again": _protected_again,
    "training goes on": _goes_on,
    "short stall": _short_stall,
    "recovers": _recovers,
    "told": _was_told,
    "nothing left": _nothing_left,
}
assert list(_JUDGES) == list(PROMISES)
