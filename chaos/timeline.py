"""The timeline of a run and its account: every second of every rank is new training or named waste. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

from toprope.chaos.evidence import Evidence
from toprope.chaos.hits import ends_trainers
from toprope.chaos.journal import Event
from toprope.chaos.verdict import NO_RANK, Goodput, Kind, Loss, Span

_WINDOWS = 24
_WINDOW_S_MIN = 2.0


@dataclass(frozen=True, slots=True)
class _Stretch:
    """What a rank did from ``begin_s`` to ``end_s``, in seconds since the run began."""

    rank: int
    begin_s: float
    end_s: float
    cause: str


USEFUL = "new training"
_KINDS: dict[str, Kind] = {"down": "down", "restore": "restore", "start": "restore"}


def stretches(evidence: Evidence) -> list[_Stretch]:
    """Return what each rank did from its first start to the end of its last step, without a gap."""
    found: list[_Stretch] = []
    by_rank: dict[int, list[Event]] = defaultdict(list)
    for event in evidence.events:
        by_rank[event.rank].append(event)
    for rank, events in sorted(by_rank.items()):
        found += _of_rank(rank, events, evidence.began_s)
    return found


def _of_rank(rank: int, events: list[Event], began_s: float) -> list[_Stretch]:
    lasting = {event.step: event for event in events if event.event == "step"}  # the last doing of each step lasts
    found = []
    for before, event in pairwise(events):
        begin_s, end_s = before.monotonic_s - began_s, event.monotonic_s - began_s
        saving_s = min(event.took_s, end_s - begin_s) if event.event == "step" else 0.0
        found.append(_Stretch(rank, begin_s, end_s - saving_s, _cause(event, lasts=lasting.get(event.step) is event)))
        if saving_s:
            found.append(_Stretch(rank, end_s - saving_s, end_s, "saving"))
    return found


def _cause(event: Event, *, lasts: bool) -> str:
    """Return what the time before an event was spent on."""
    match event.event:
        case "start":
            return "down"
        case "begin":
            return "restore" if event.step else "start"
        case "step":
            return USEFUL if lasts else "steps done again"
        case _:
            return "ending"


def spans(evidence: Evidence) -> tuple[Span, ...]:
    """Return the timeline: training, snapshots, restores and down times of ranks, faults of all."""
    found: list[Span] = []
    for one in stretches(evidence):
        kind: Kind = _KINDS.get(one.cause, "training")
        last = found[-1] if found else None
        if last is not None and (last.rank, last.kind) == (one.rank, kind) and one.begin_s <= last.end_s + 1e-6:
            found[-1] = Span(rank=one.rank, begin_s=last.begin_s, end_s=max(last.end_s, one.end_s), kind=kind)
        else:
            found.append(Span(rank=one.rank, begin_s=one.begin_s, end_s=one.end_s, kind=kind))
    for event in evidence.events:
        if event.event == "step" and event.saved:
            end_s = event.monotonic_s - evidence.began_s
            what = f"step {event.step}"
            found.append(Span(rank=event.rank, begin_s=end_s - event.took_s, end_s=end_s, kind="snapshot", what=what))
    for fault in evidence.injections:
        if fault.fired:
            kind_of, _, which = fault.target.partition(" ")
            rank = int(which) if kind_of == "rank" and which.isdecimal() else NO_RANK
            end_s, what = max(fault.at_s, fault.until_s), f"{fault.fault} {fault.target}".strip()
            found.append(Span(rank=rank, begin_s=fault.at_s, end_s=end_s, kind="fault", what=what))
    return tuple(found)


def losses(evidence: Evidence) -> tuple[Loss, ...]:
    """Return what was no new training, by cause, the greatest first."""
    total: dict[str, float] = defaultdict(float)
    for one in stretches(evidence):
        if one.cause != USEFUL:
            total[one.cause] += one.end_s - one.begin_s
    ordered = sorted(total.items(), key=lambda item: (-item[1], item[0]))
    return tuple(Loss(cause=cause, rank_seconds=round(seconds, 3)) for cause, seconds in ordered)


def goodput(evidence: Evidence) -> tuple[Goodput, ...]:
    """Return the share of new training in each of some equal stretches of time."""
    known = stretches(evidence)
    end_s = max((one.end_s for one in known), default=0.0)
    if not end_s:
        return ()
    begin_s = min(one.begin_s for one in known)
    count = max(1, min(_WINDOWS, int((end_s - begin_s) / _WINDOW_S_MIN)))
    width_s = (end_s - begin_s) / count
    world = len({one.rank for one in known})
    found = []
    for number in range(count):
        low_s, high_s = begin_s + number * width_s, begin_s + (number + 1) * width_s
        useful_s = sum(
            max(0.0, min(one.end_s, high_s) - max(one.begin_s, low_s)) for one in known if one.cause == USEFUL
        )
        found.append(Goodput(at_s=round(high_s, 2), share=round(min(1.0, useful_s / (width_s * world)), 4)))
    return tuple(found)


def figures(evidence: Evidence) -> dict[str, float]:
    """Return what was measured, each with its unit in its name."""
    known = stretches(evidence)
    total_s = sum(one.end_s - one.begin_s for one in known)
    steps = [event for event in evidence.events if event.event == "step"]
    found = {"longest_end_step_s": max((event.took_s for event in steps), default=0.0)}
    if total_s:
        useful_s = sum(one.end_s - one.begin_s for one in known if one.cause == USEFUL)
        found["goodput_share"] = useful_s / total_s
    detected, recovered = [], []
    for restart in evidence.restarts:
        down_s = restart.at_s - evidence.began_s
        blows_s = [one.at_s for one in evidence.injections if one.fired and ends_trainers(one.fault, one.target)]
        detected += [down_s - blow_s for blow_s in blows_s if blow_s <= down_s][-1:]
        again = [event.monotonic_s for event in steps if event.pid in restart.pids]
        recovered += [min(again) - restart.at_s] if again else []
    if detected:
        found["detected_after_s"] = max(detected)
    if recovered:
        found["next_step_after_s"] = max(recovered)
    if evidence.ready_after_s >= 0:
        found["last_ready_after_s"] = evidence.ready_after_s
    for use in evidence.uses:
        name = use.process.replace(" ", "_")
        found[f"{name}_resident_growth_bytes"] = float(use.resident_bytes[1] - use.resident_bytes[0])
        found[f"{name}_open_files_growth"] = float(use.open_files[1] - use.open_files[0])
        found[f"{name}_followed_s"] = use.seconds
    return {name: round(value, 4) for name, value in found.items()}
