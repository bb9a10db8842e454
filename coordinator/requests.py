"""Requests for an attempt: the one that is being decided, and all who wait for its answer. Part of the core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from toprope.coordinator import opening, phases
from toprope.coordinator.effects import Answer, Append, Effect, Prepare
from toprope.coordinator.events import Asked, OpenFailed, Prepared
from toprope.coordinator.intents import OpenAttempt
from toprope.coordinator.log_view import LogView
from toprope.coordinator.restore_choice import Offer
from toprope.coordinator.roll import Node, Roll
from toprope.coordinator.wire import AttemptView, Copy, OpenAnswer, OpenRequest
from toprope.store.log.records import Attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a request is decided on, as it is now. ``logged_n``: the log has so many records, as far as is known.

    ``without_log``: it is away, and what can be decided without it is.
    """

    log_view: LogView
    logged_n: int
    without_log: bool
    roll: Roll
    progress: phases.Progress
    view: AttemptView | None


@dataclass(slots=True)
class Requests:
    """At most one request is decided at a time; those who ask the same wait with it, and others ask again."""

    deciding: OpenRequest | None = None
    waiters: tuple[int, ...] = ()
    appending: str = ""
    """The uid of the attempt that was decided, while it is on its way into the log; empty: none is."""
    _doubt: tuple[int, Attempt | None] = (-1, None)
    """When an append failed, how many records the log had, and the attempt then: until it has more, or that attempt is
    over without it, what was decided may be there yet."""

    def ask(self, event: Asked, known: Known) -> list[Effect]:
        """Take in a request: answer it at once, or begin to decide it."""
        request = event.request
        refusal = opening.known(request, known.log_view, known.view)
        refusal = refusal or opening.misfit(request, known.log_view, known.progress)
        refusal = refusal or opening.refusal(request, known.log_view)
        if refusal is None and (text := phases.unheard(request.world, known.roll.nodes)):
            refusal = OpenAnswer(code="unavailable", text=text)  # before thousands are asked in vain, again and again
        if refusal is not None:
            return [Answer(request_id=event.request_id, answer=refusal)]
        if self.deciding is None:
            self.deciding, self.waiters, self.appending = request, (event.request_id,), ""
            return [_prepare(known)]
        if opening.key_of(self.deciding) == opening.key_of(request):
            self.waiters = (*self.waiters, event.request_id)
            return []
        launch = f"launch {self.deciding.launch_id[:8]}"
        if self.appending and known.without_log:
            text = f"{launch} was proposed without the log, which is away, and waits for its nodes to adopt it"
            return [Answer(request_id=event.request_id, answer=OpenAnswer(code="unavailable", text=text))]
        text = f"{launch} is being given an attempt; ask again"
        return [Answer(request_id=event.request_id, answer=OpenAnswer(code="busy", text=text))]

    def decide(self, event: Prepared, known: Known, *, objects: Sequence[Copy]) -> list[Effect]:
        """Decide the request, now that all nodes were asked; ``objects`` are the shard objects that are known of.

        If a step has become READY meanwhile, or one that was offered is none to begin from any more, all is asked anew.
        """
        request = self.deciding
        assert request is not None
        assert event.offers is not None
        answered = self.answered(event, known.roll)
        hindered = opening.hindrance(request, known.log_view, known.roll.nodes, answered)
        if hindered is not None:  # before all is asked anew: a world that lives may make steps READY without end
            return self.answer(hindered)
        if not _are_all(event.offers, seqs=_ready_seqs(known)):
            return [_prepare(known)]
        decided = opening.decide(
            request,
            known.log_view,
            struck_now=opening.striking(known.log_view, known.progress),
            answered=answered,
            objects=objects,
            offers=event.offers,
            uid=event.uid,
        )
        if isinstance(decided, OpenAttempt):
            self.appending = decided.uid
            return [Append(intent=decided)]
        return self.answer(decided)

    def may_be_next(self, logged_n: int, attempt: Attempt) -> bool:
        """Say whether one that was decided may follow this attempt in the log, which has so many records now."""
        return self.appending != "" or self._doubt == (logged_n, attempt)

    @staticmethod
    def answered(event: Prepared, roll: Roll) -> tuple[Node, ...]:
        """Return the nodes that answered when they were asked."""
        lives = {answer.incarnation for answer in event.answers.values() if answer is not None}
        return tuple(node for node in roll.all() if node.inventory.incarnation in lives)

    def failed(self, event: OpenFailed, known: Known) -> list[Effect]:
        """Take in that the attempt could not be appended: decide anew if the log has moved on, else say so."""
        request = self.deciding
        if request is None or event.uid != self.appending:  # of an attempt that is there all the same
            return []
        if not event.again:
            self._doubt = known.logged_n, known.log_view.state.attempt
            return self.answer(OpenAnswer(code="unavailable", text=event.text))
        refused = opening.refusal(request, known.log_view)  # another spec may be the job's by now
        if refused is not None:
            return self.answer(refused)
        self.appending = ""
        return [_prepare(known)]

    def opened(self, view: AttemptView | None) -> list[Effect]:
        """Answer those who wait, if this is the attempt that they asked for."""
        request = self.deciding
        if request is None or view is None or opening.key_of(request) != (view.launch_id, view.round):
            return []
        return self.answer(OpenAnswer(attempt=view))

    def fenced(self, record: Attempt) -> list[Effect]:
        """Answer those who wait for an attempt that was proposed without the log, which can't take it any more."""
        request = self.deciding
        if request is None or opening.key_of(request) != (record.launch_id, record.round):
            return []
        return self.answer(
            OpenAnswer(code="unavailable", text="the log has gone on without what was proposed; ask again")
        )

    def answer(self, answer: OpenAnswer) -> list[Effect]:
        """Answer all who wait, and decide no more."""
        effects: list[Effect] = [Answer(request_id=one, answer=answer) for one in self.waiters]
        self.deciding, self.waiters, self.appending = None, (), ""
        return effects


def _prepare(known: Known) -> Prepare:
    return Prepare(
        nodes=tuple((node.name, node.url) for node in known.roll.all()),
        ready_seqs=None if known.without_log else _ready_seqs(known),
    )


def _ready_seqs(known: Known) -> tuple[int, ...]:
    """Return the READYs that an attempt may begin from, newest first."""
    state = known.log_view.state
    struck = {*state.struck, *opening.striking(known.log_view, known.progress)}
    return tuple(seq for seq, ready in state.restorable() if (ready.attempt_uid, ready.step) not in struck)


def _are_all(offers: Sequence[Offer], *, seqs: tuple[int, ...]) -> bool:
    """Say whether offers are what there is of these READYs: all, newest first, down to the first that is whole."""
    offered = tuple(offer.seq for offer in offers if offer.seq is not None)
    whole = any(offer.seq is not None and not offer.damage for offer in offers)
    return offered == (seqs[: len(offered)] if whole else seqs)
