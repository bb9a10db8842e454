"""Attempts that are opened while the log can't be reached, and how they come into it afterwards. Pure.

Safety rests on the log alone: it takes such an attempt only if nothing that decides about it was appended since it was
decided (``fold.violation``); another attempt of its number, or a taint of its source, fences it off, and nothing of it
ever becomes READY. That every node of the old and of the new world adopts it, and no other attempt of its number, is
what keeps two of them from training at once, each for nothing if the other one wins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
from msgspec import UNSET

from toprope.coordinator.log_view import LogView
from toprope.coordinator.wire import Member, Provisional
from toprope.store.log.fold import JobState, fold, violation
from toprope.store.log.records import Attempt, Record, Taint
from toprope.store.log.records import Member as Placed


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The log as it is going to be: ``view`` has the attempts of ``chain``, which are not in it yet, in order.

    ``fenced`` are those that it can't take any more, by uid, each with the reason.
    """

    view: LogView
    chain: tuple[Provisional, ...] = ()
    fenced: Mapping[str, str] = field(default_factory=dict)


def outlook(logged: LogView, attempts: Sequence[Provisional]) -> Outlook:
    """Return what the log comes to when it has taken what it can of these; of two of one number the first wins.

    The other one is not fenced off yet, nor is one of which the attempt before it is not known, or that was decided on
    more records than were read here: the log has the word.
    """
    view = logged
    chain: list[Provisional] = []
    fenced: dict[str, str] = {}
    there = {attempt.uid for attempt in logged.state.attempts}
    for one in sorted(attempts, key=lambda each: each.number):
        if one.uid in there or logged.state.attempt_number < one.number <= view.state.attempt_number:
            continue
        if _is_ahead(logged.state, one):
            continue
        why = obstacle(view.state, one)
        if not why:
            state = fold(view.state, _stamped(view.state, one.record), record_sha256=view.state.tail_sha256)
            view = LogView(state=state, spec=logged.spec, facts=one.facts)
            chain.append(one)
        elif one.number <= logged.state.attempt_number + 1 or one.parent in fenced or _follows(view.state, one):
            fenced[one.uid] = why
    return Outlook(view=view, chain=tuple(chain), fenced=fenced)


def _is_ahead(state: JobState, one: Provisional) -> bool:
    """Say whether an attempt was decided on a longer log than this one, as by a later term that is not known here."""
    return one.record.decided_at is not UNSET and one.record.decided_at > state.n


def _follows(state: JobState, one: Provisional) -> bool:
    return state.attempt is not None and state.attempt.uid == one.parent


def obstacle(state: JobState, one: Provisional) -> str:
    """Return why this log can't take an attempt as its next one; empty if it can."""
    current = state.attempt
    if one.job_uid != state.job_uid:
        return f"it is of job uid {one.job_uid}, not {state.job_uid}"
    if not _follows(state, one):
        said = "none" if current is None else f"attempt {current.attempt}, uid {current.uid[:8]}"
        return f"it follows attempt uid {one.parent[:8]}, and the log has {said}"
    elected = replace(state, term=max(state.term, 1))
    return violation(elected, _stamped(elected, one.record)) or ""


def make_entry(state: JobState, one: Provisional) -> Attempt | None:
    """Return the record that enters an attempt; None when it is there, or can't come there."""
    there = any(attempt.uid == one.uid for attempt in state.attempts)
    return None if there or obstacle(state, one) else one.record


def hinders(state: JobState, record: Record) -> bool:
    """Return whether an attempt that is decided on this log may be refused once this record is in it.

    A taint may be of the source that it chose. One that was itself decided without the log hinders none: whoever has it
    decides what follows it.
    """
    return isinstance(record, Taint) or fold(state, record, record_sha256="").settled > state.settled


def _stamped(state: JobState, record: Attempt) -> Attempt:
    stamps = {"term": state.term, "writer_id": state.writer_id, "nonce": "0" * 8, "prev": state.tail_sha256}
    return msgspec.structs.replace(record, **stamps)


def concerned(old: Sequence[Placed], new: Sequence[Member | Placed], dead: Mapping[str, str]) -> tuple[str, ...]:
    """Return the nodes that must adopt an attempt: those of both worlds, but for lives of them that are over.

    ``dead``: the boot ids of nodes that an operator has declared dead. A launch that names a node with another boot id
    than the world before says that its memory is gone: the node adopts with what it is now.
    """
    lost = {place.node for place in old if dead.get(place.node) == place.boot_id}
    again = {place.node for place in new}
    return tuple(sorted(again | ({place.node for place in old} - lost)))
