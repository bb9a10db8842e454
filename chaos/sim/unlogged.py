"""Watches attempts that are opened without the log: who adopts them, when they are opened, what the log takes.

It has a text of its own of the rule of PROTOCOL.md 3.5, over the records as they were appended, so that a mutant of the
fold's does not change its judgement.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import UNSET

from toprope.coordinator.wire import AttemptView, Provisional
from toprope.store.log.fold import JobState
from toprope.store.log.records import Attempt, Elected, Job, Member, Metric, Pin, Ready, Record, Taint, Unpin


@dataclass(slots=True)
class Unlogged:
    """All attempts that any node ever adopted, by uid; ``records`` are those of the log.

    ``opened`` has the terms in which one was given out, ``over`` those that the log can't take any more, ``gone``
    the boot ids of memory that was lost: nothing trains there any more, and nobody need ask.
    """

    attempts: dict[str, Provisional] = field(default_factory=dict)
    adopters: dict[str, set[str]] = field(default_factory=dict)
    opened: dict[str, set[int]] = field(default_factory=dict)
    over: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    records: list[Record] = field(default_factory=list)
    worlds: dict[str, tuple[Member, ...]] = field(default_factory=dict)
    _by_disk: dict[tuple[object, int], str] = field(default_factory=dict)

    def record_of(self, uid: str) -> Attempt | None:
        """Return what is to be appended of an attempt that was opened; None: none of that uid was."""
        return self.attempts[uid].record if uid in self.opened else None

    def adopt(self, node: str, disk: object, one: Provisional, state: JobState) -> str:
        """Take in that a node has adopted an attempt; return what is wrong with that."""
        before = self._by_disk.get((disk, one.number))
        self._by_disk[disk, one.number] = one.uid
        self.attempts[one.uid] = one
        self.adopters.setdefault(one.uid, set()).add(node)
        if before is not None and before != one.uid and not self.obstacle(before, state):
            return f"node {node} adopts a second attempt {one.number}, and the first may come into the log yet"
        return ""

    def open(self, view: AttemptView, *, term: int) -> str:
        """Take in that an attempt is given out that the log does not have; return what is wrong with that."""
        one = self.attempts.get(view.uid)
        if one is None:
            return f"attempt {view.number} is not in the log, and nobody has adopted it"
        self.opened[view.uid] = {term}
        worlds = (*self.worlds.get(one.parent, ()), *self._world(one.parent), *one.facts.world)
        wanted = {place.node for place in worlds if place.boot_id not in self.gone}
        missing = sorted(wanted - self.adopters[view.uid])
        return f"attempt {view.number} is given out, and node {missing[0]} has not adopted it" if missing else ""

    def give(self, view: AttemptView, *, term: int) -> None:
        """Take in that a coordinator gives an attempt out, which another one may have opened without the log."""
        if view.uid in self.opened:
            self.opened[view.uid].add(term)

    def may_leave(self, node: str, uid: str, state: JobState) -> bool:
        """Say whether a node may go by an earlier attempt again: it is not bound to this one, or this one is over."""
        return uid in self.attempts and (node not in self.adopters[uid] or bool(self.obstacle(uid, state)))

    def follows_another(self, view: AttemptView, state: JobState) -> bool:
        """Say whether an attempt follows one that was given out and is not in the log yet."""
        parent = self.attempts[view.uid].parent
        return parent in self.opened and all(one.uid != parent for one in state.attempts)

    def appended(self, record: Record, state: JobState) -> tuple[list[str], str]:
        """Take in a record, and the log with it; return what that ends of what was given out, and what is wrong.

        Whoever has given an attempt out appends nothing that it could not follow.
        """
        self.records.append(record)
        ends = [uid for uid in sorted(self.opened) if uid not in self.over and self.obstacle(uid, state)]
        self.over.update(ends)
        own = next((uid for uid in ends if record.term in self.opened[uid]), None)
        if own is None:
            return ends, ""
        return ends, f"attempt {self.attempts[own].number} was given out in term {record.term}, which then appends this"

    def _world(self, uid: str) -> tuple[Member, ...]:
        return self.attempts[uid].facts.world if uid in self.attempts else ()

    def obstacle(self, uid: str, state: JobState) -> str:
        """Return why the log can't take an attempt that was adopted, now or later; empty if it may, or has."""
        one = self.attempts[uid]
        if any(each.uid == uid for each in state.attempts):
            return ""
        if one.number <= state.attempt_number:
            return "the log has another attempt of its number"
        if one.parent in self.attempts and (why := self.obstacle(one.parent, state)):
            return f"the one before it can't come there: {why}"
        return self._since(one.record, state)

    def _since(self, record: Attempt, state: JobState) -> str:
        """Return what came after the attempt was decided that it can't follow."""
        assert record.decided_at is not UNSET
        assert record.held is not None
        numbers = {each.uid: each.attempt for each in state.attempts}
        parent = record.attempt - 1
        for later in self.records[record.decided_at :]:
            match later:
                case Elected() | Ready() | Pin() | Unpin() | Metric():
                    continue
                case Job() if later.spec_sha256 is None and later.base is UNSET:
                    continue
                case Taint() if later.attempt <= parent and later.attempt == self._current_at(later):
                    continue
                case Attempt() if later.decided_at is not UNSET:
                    continue
                case _:
                    return f"{type(later).__name__.upper()} came first"
        number = numbers.get(record.held.attempt_uid)
        tainted = number is not None and state.is_tainted(attempt=number, step=record.held.step)
        return "its source is tainted" if tainted else ""

    def _current_at(self, taint: Taint) -> int:
        """Return the number of the attempt that was the current one when this was appended."""
        before = self.records[: next(at for at, one in enumerate(self.records) if one is taint)]
        return sum(isinstance(one, Attempt) for one in before)

    def enter(self, record: Attempt, state: JobState) -> str:
        """Return what is wrong with an attempt of those that is about to be in the log; ``state`` is before it."""
        one = self.attempts.get(record.uid)
        if one is None:  # it was proposed only, and the log was back before anybody had adopted it
            return self._since(record, state)
        if state.attempt is None or state.attempt.uid != one.parent:
            return "it follows another attempt than it was decided on"
        return self._since(record, state)
