"""While the log can't be reached: what is opened without it, and how that gets into it. A state machine in the core.

An attempt is decided from what living nodes hold in memory or on disk, proposed to all nodes of the old and the new
world, and opened when each has adopted it. When the log is back it is appended as it was decided, by whoever leads
then: a successor learns of it from the nodes that adopted it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from toprope.coordinator import opening
from toprope.coordinator.events import Learned, Prepared
from toprope.coordinator.intents import OpenAttempt
from toprope.coordinator.log_view import LogView
from toprope.coordinator.provisional import concerned, outlook
from toprope.coordinator.requests import Known
from toprope.coordinator.roll import Node
from toprope.coordinator.wire import Adopted, Inventory, OpenAnswer, OpenRequest, Provisional
from toprope.store.checkpoint import manifest
from toprope.store.log.records import Attempt, AttemptFacts

CHAIN_BYTES_MAX = 4 * 1024 * 1024
"""A proposal carries all that must come into the log before it, in a document that has a limit."""

UNHEARD_MAX = 60
"""So often a node that lists an adoption may give no answer when it is asked for it, before nothing waits for it."""


@dataclass(slots=True, kw_only=True)
class Outage:
    """What is known of attempts that are not in the log. ``proceeds``: attempts may be opened without it.

    ``away_since_s``: since when the log could not be reached (None: it can). ``why``: the reason (empty: it can).
    ``pending``: the attempts that are not in the log, by uid, opened or proposed; ``opened`` those that all have
    adopted. ``fenced``: those that the log can't take, each with the reason. ``dead``: the boot ids of nodes that an
    operator has declared dead, while the current attempt is placed on them and they do not answer. ``entering``: one of
    ``pending`` is being appended, and what came of it is not known yet. ``learning``: the nodes that were asked since
    the last tick for what they have adopted. ``adopted``: by node the attempts that it has adopted.
    ``unheard``: by node how often it gave no answer when it was asked for them, since it last did.
    """

    proceeds: bool
    away_since_s: float | None = None
    why: str = ""
    pending: dict[str, Provisional] = field(default_factory=dict)
    opened: set[str] = field(default_factory=set)
    fenced: dict[str, str] = field(default_factory=dict)
    dead: dict[str, str] = field(default_factory=dict)
    entering: bool = False
    learning: set[str] = field(default_factory=set)
    adopted: dict[str, tuple[Adopted, ...]] = field(default_factory=dict)
    unheard: dict[str, int] = field(default_factory=dict)

    def note(self, inventory: Inventory) -> None:
        """Take in what a node has adopted."""
        if inventory.adopted:
            self.adopted[inventory.node] = inventory.adopted
        else:
            self.adopted.pop(inventory.node, None)
            self.unheard.pop(inventory.node, None)

    def reached(self, *, why: str, now_s: float) -> None:
        """Take in whether the log could be reached just now; ``why`` it could not, else empty."""
        if not why:
            self.away_since_s = None
        elif self.away_since_s is None:
            self.away_since_s = now_s
        self.why = why

    def declare(self, node: str, boot_id: str) -> None:
        """Take in that an operator says that a life of a node is over."""
        self.dead[node] = boot_id

    def lives(self, node: str, boot_id: str) -> None:
        """Take in that a node is there with this memory: whoever declared it dead was wrong."""
        if self.dead.get(node) == boot_id:
            del self.dead[node]

    def placed(self, facts: AttemptFacts | None) -> None:
        """Take in where the ranks of the current attempt sit: of other lives nobody asks any more."""
        placed = {(one.node, one.boot_id) for one in facts.world} if facts is not None else set()
        self.dead = {node: boot_id for node, boot_id in self.dead.items() if (node, boot_id) in placed}

    def away_s(self, now_s: float) -> float:
        """Return for how long the log could not be reached, 0 if it can."""
        return 0.0 if self.away_since_s is None else now_s - self.away_since_s

    # --- what the log comes to -------------------------------------------------------------------------------------

    def look_ahead(self, logged: LogView) -> LogView:
        """Return the log with what was opened without it; what can't come there any more is fenced off."""
        there = {attempt.uid for attempt in logged.state.attempts}
        self.pending = {uid: one for uid, one in self.pending.items() if uid not in there}
        fenced = outlook(logged, self._in_order()).fenced
        self.fenced.update(fenced)
        self.pending = {uid: one for uid, one in self.pending.items() if uid not in fenced}
        return outlook(logged, [one for one in self._in_order() if one.uid in self.opened]).view

    def fate(self, uid: str) -> str:
        """Return what to say of an attempt that is fenced off, opened or only proposed."""
        why = self.fenced[uid]
        return f"attempt uid {uid[:8]}, decided without the log, can't come into it: anything it saved is lost: {why}"

    def _in_order(self) -> list[Provisional]:
        """Return the pending ones by number; of one number what was opened, then what more nodes have adopted."""
        adopters = [one.uid for adopted in self.adopted.values() for one in adopted]
        return sorted(
            self.pending.values(),
            key=lambda one: (one.number, one.uid not in self.opened, -adopters.count(one.uid), one.uid),
        )

    def next_to_open(self, view: LogView) -> Provisional | None:
        """Return the pending attempt that follows what is opened, if there is one; all it concerns are to adopt it."""
        return next(iter(outlook(view, self._in_order()).chain), None)

    def proposal(self, view: LogView) -> Provisional | None:
        """Return the next attempt to open with all that must come into the log before it: whoever has it has them."""
        one = self.next_to_open(view) if self.pending else None
        return None if one is None else msgspec.structs.replace(one, before=self._chain())

    def _chain(self) -> tuple[Provisional, ...]:
        """Return what is opened and not in the log, in order."""
        return tuple(msgspec.structs.replace(one, before=()) for one in self._in_order() if one.uid in self.opened)

    def missing(self, one: Provisional, view: LogView) -> tuple[str, ...]:
        """Return which nodes have not adopted an attempt that is to follow this log, as far as is known."""
        old = view.facts.world if view.facts is not None else ()
        return tuple(
            name
            for name in concerned(old, one.facts.world, self.dead)
            if all(adopted.uid != one.uid for adopted in self.adopted.get(name, ()))
        )

    # --- what is to be done ----------------------------------------------------------------------------------------

    def to_learn(self, logged: LogView, nodes: Mapping[str, Node]) -> str:
        """Return a node that has adopted an attempt which is neither known here nor in the log; empty: none has."""
        return next((node for node, _ in self._unknown(logged, nodes) if node not in self.learning), "")

    def _unknown(self, view: LogView, nodes: Mapping[str, Node]) -> Iterator[tuple[str, Adopted]]:
        """Yield what living nodes have adopted that is to follow this log and is not known here.

        One that is gone has no say: all others would wait for it for ever, and the log has the word if it comes back.
        """
        for node, adopted in sorted(self.adopted.items()):
            if nodes[node].alive:
                number = view.state.attempt_number
                yield from ((node, one) for one in adopted if one.number > number and not self._knows(one.uid))

    def _awaited(self, view: LogView, nodes: Mapping[str, Node]) -> Iterator[tuple[str, Adopted]]:
        """Yield those of the unknown ones that their nodes may tell of yet.

        A node whose reports come and whose port can't be reached is like one that is gone: it is asked again and again,
        and what it tells then is taken in, but nothing waits for it.
        """
        yield from ((node, one) for node, one in self._unknown(view, nodes) if not self._mute(node))

    def untold(self, logged: LogView, nodes: Mapping[str, Node]) -> dict[str, str]:
        """Return what to say of the nodes that nothing waits for any more, by node."""
        return {
            node: f"node {node} has adopted attempt {one.number} (uid {one.uid[:8]}), decided without the log, and "
            f"does not answer at {nodes[node].url} when asked for it: nothing waits for it any more, and once another "
            f"attempt {one.number} is opened what it saved is lost; mend the way from the coordinator to that address"
            for node, one in self._unknown(logged, nodes)
            if self._mute(node)
        }

    def _mute(self, node: str) -> bool:
        return self.unheard.get(node, 0) >= UNHEARD_MAX

    def _knows(self, uid: str) -> bool:
        return uid in self.pending or uid in self.fenced

    def holds_up(self, logged: LogView, nodes: Mapping[str, Node]) -> bool:
        """Say whether there is, or may be, an attempt that must come into the log before all else.

        One that follows an attempt which nobody knows can't come there: nothing waits for it.
        """
        return self.next_to_open(logged) is not None or any(True for _ in self._awaited(logged, nodes))

    def learned(self, event: Learned) -> None:
        """Take in what a node has adopted, all of it; whoever did not say is asked again at the next tick."""
        self.unheard[event.node] = self.unheard.get(event.node, 0) + 1 if event.adopted is None else 0
        for one in (each for last in event.adopted or () for each in (*last.before, last)):
            if not self._knows(one.uid):
                self.pending[one.uid] = msgspec.structs.replace(one, before=())

    def tick(self) -> None:
        """Take in that time has passed: who was asked may be asked again."""
        self.learning.clear()

    def to_enter(self, logged: LogView) -> Provisional | None:
        """Return the attempt that is to be appended to the log now, if there is one."""
        if self.entering or self.away_since_s is not None:
            return None
        return self.next_to_open(logged)

    def to_open(self, view: LogView) -> Provisional | None:
        """Return the attempt that is open from now on, since all have adopted it; None: there is none."""
        if self.away_since_s is None:
            return None
        one = self.next_to_open(view)
        return None if one is None or self.missing(one, view) else one

    # --- deciding --------------------------------------------------------------------------------------------------

    def decide(
        self, request: OpenRequest, event: Prepared, known: Known, answered: Sequence[Node]
    ) -> OpenAnswer | None:
        """Decide a request without the log: None when the attempt is proposed, else why it must wait."""
        waits = f"the job log can't be reached: {event.why or self.why}"
        if not self.proceeds:
            return OpenAnswer(code="unavailable", text=f"{waits} (--on-log-outage is wait)")
        one = self.next_to_open(known.log_view)
        if one is not None and (one.record.launch_id, one.record.round) == opening.key_of(request):
            return None
        text = self._not_now(event, known) or self._hindrance(request, known, answered)
        decided = text or self._decided(request, event, known, answered)
        if isinstance(decided, Provisional):
            self.pending[decided.uid] = decided
            return None
        return OpenAnswer(code="unavailable", text=f"{waits}; and {decided}")

    def _not_now(self, event: Prepared, known: Known) -> str:
        """Return why nothing may be decided beside or after what is on its way."""
        if event.unsure:
            return "a record that was being appended when it went away may be there yet"
        if unknown := {node for node, _ in self._awaited(known.log_view, known.roll.nodes)}:
            return f"these nodes have adopted what is not known here yet: {', '.join(sorted(unknown))}"
        if len(msgspec.json.encode(self._chain())) > CHAIN_BYTES_MAX:
            return f"it must take the {len(self._chain())} attempts first that were opened without it"
        if (one := self.next_to_open(known.log_view)) is not None:
            nodes = ", ".join(self.missing(one, known.log_view)) or "none"
            return f"attempt {one.number} of another launch is still to be adopted by: {nodes}"
        return ""

    def _hindrance(self, request: OpenRequest, known: Known, answered: Sequence[Node]) -> str:
        hindered = opening.hindrance(request, known.log_view, known.roll.nodes, answered)
        if hindered is not None:
            return hindered.text
        facts = known.log_view.facts
        if facts is None:
            return "no attempt was opened before: the first one needs the log"
        there = {node.name for node in answered}
        silent = [name for name in concerned(facts.world, request.world, self.dead) if name not in there]
        if silent:
            return (
                f"these nodes of attempt {known.log_view.state.attempt_number} do not answer, and may be in another "
                f"attempt by now: {', '.join(silent)}; of each that is off, say so: "
                f"ckpt declare-dead NODE --coordinator URL"
            )
        return ""

    def _decided(
        self, request: OpenRequest, event: Prepared, known: Known, answered: Sequence[Node]
    ) -> Provisional | str:
        """Return the attempt, which begins with what nodes hold, or why none can be opened."""
        log_view = known.log_view
        decided = opening.decide(
            request,
            log_view,
            struck_now=opening.striking(log_view, known.progress),
            answered=answered,
            objects=(),
            offers=(),
            uid=event.uid,
        )
        if isinstance(decided, OpenAnswer):
            return decided.text
        if decided.held is None:
            return "no step of all ranks is held by the nodes"
        struck = {*log_view.state.struck, *((one.attempt_uid, one.step) for one in decided.struck)}
        ready = max(
            (ready.step for _, ready in log_view.state.restorable() if (ready.attempt_uid, ready.step) not in struck),
            default=0,
        )
        if decided.from_step < ready:
            return f"the nodes hold step {decided.from_step} only, and step {ready} is READY"
        return _provisional(decided, known)


def _provisional(decided: OpenAttempt, known: Known) -> Provisional:
    state = known.log_view.state
    parent = state.attempt
    assert parent is not None
    assert decided.held is not None
    return Provisional(
        job_uid=state.job_uid,
        parent=parent.uid,
        record=Attempt(
            attempt=state.attempt_number + 1,
            uid=decided.uid,
            launch_id=decided.launch_id,
            round=decided.round,
            ready=None,
            held=decided.held,
            from_step=decided.from_step,
            struck=decided.struck,
            world_size=len(decided.facts.world),
            facts_sha256=manifest.sha256(manifest.encode(decided.facts)),
            spec_sha256=state.spec_sha256 or "",
            why=decided.why,
            decided_at=known.logged_n,
        ),
        facts=decided.facts,
    )
