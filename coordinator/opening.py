"""Opening an attempt: who gets one, who must wait, who is refused, and what is put into the log. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from toprope.coordinator import phases, spec
from toprope.coordinator.intents import OpenAttempt, basis_of
from toprope.coordinator.log_view import LogView
from toprope.coordinator.restore_choice import Choice, NothingLeft, Offer, choose
from toprope.coordinator.roll import Node
from toprope.coordinator.wire import AttemptView, Copy, OpenAnswer, OpenRequest
from toprope.store.errors import UsageError
from toprope.store.keep.gc import is_dead
from toprope.store.log.fold import JobState
from toprope.store.log.records import AttemptFacts, Held, Member, Struck
from toprope.store.names import checked_hex, checked_id

_WHY_CHARS_MAX = 4000
_ROUND_MAX = 1_000_000
_STRUCK_WHY_CHARS_MAX = 500


def key_of(request: OpenRequest) -> tuple[str, int]:
    """Return what makes two requests the same."""
    return request.launch_id, request.round


def known(request: OpenRequest, log_view: LogView, view: AttemptView | None) -> OpenAnswer | None:
    """Return the answer to a launch that was given an attempt before, unless it asks for another round."""
    if view is None:
        return None
    if request.launch_id == view.launch_id:
        if request.round == view.round:
            return OpenAnswer(attempt=view)
        if request.round > view.round:
            return None
    elif request.launch_id not in log_view.launches():
        return None
    text = f"launch {request.launch_id[:8]} round {request.round} was superseded by attempt {view.number}"
    return OpenAnswer(code="superseded", text=text)


def misfit(request: OpenRequest, log_view: LogView, progress: phases.Progress) -> OpenAnswer | None:
    """Return the refusal of another round to a launch whose ranks are another trainer than the one that was saved.

    No source would fit it better, and none is struck off for its sake.
    """
    attempt = log_view.state.attempt
    if attempt is None or not progress.misfit or request.launch_id != attempt.launch_id:
        return None
    return OpenAnswer(code="refused", text=f"{progress.reason}; start it as the one that was saved")


def refusal(request: OpenRequest, log_view: LogView) -> OpenAnswer | None:
    """Return why a request can't be met, as far as the log and the request tell."""
    job = log_view.state.job
    if request.job != job:
        return OpenAnswer(code="refused", text=f"this coordinator serves job {job}, not {request.job}")
    if text := _malformed(request):
        return OpenAnswer(code="refused", text=text)
    ranks = [member.rank for member in request.world]
    if not ranks or ranks != list(range(len(ranks))):
        text = f"the world has ranks {ranks}; expected each of 0, 1, 2 and so on once, in order"
        return OpenAnswer(code="refused", text=text)
    if log_view.spec is not None and spec.name(request.spec) != log_view.state.spec_sha256:
        changed = spec.diff(log_view.spec, request.spec)
        text = f"job {job} was started with another spec (- job, + this trainer, ~ job -> this trainer): {changed}"
        text += f". If that is wanted: ckpt job accept-spec ROOT {spec.name(request.spec)} --job {job}"
        return OpenAnswer(code="spec-mismatch", text=text)
    return None


def _malformed(request: OpenRequest) -> str:
    """Return which of the ids and names, which go into the log and into paths, is not one."""
    try:
        checked_hex(request.launch_id)
        for member in request.world:
            checked_id(member.node, what="node")
            checked_hex(member.boot_id)
    except UsageError as error:
        return str(error)
    return "" if 0 <= request.round <= _ROUND_MAX else f"round {request.round} is not one of 0 to {_ROUND_MAX}"


def hindrance(
    request: OpenRequest, log_view: LogView, nodes: Mapping[str, Node], answered: Sequence[Node]
) -> OpenAnswer | None:
    """Return why a launch must wait: a node of it did not answer, another world lives, or a node may hold more."""
    text = phases.misplaced(request.world, nodes, answered={node.name for node in answered})
    if text:
        return OpenAnswer(code="unavailable", text=text)
    attempt = log_view.state.attempt
    if attempt is None:
        return None
    for node in answered:
        for state in node.inventory.ranks:
            current = state.attempt_uid == attempt.uid or state.launch_id == attempt.launch_id
            if state.lock_held and current and state.launch_id != request.launch_id:
                text = f"rank {state.rank} on node {node.name} still lives in attempt {attempt.attempt}"
                return OpenAnswer(code="busy", text=text)
    for node in answered:
        if node.inventory.reading:
            text = f"node {node.name} is still reading what it holds: a newer step than is known may be there"
            return OpenAnswer(code="unavailable", text=text)
    return None


def striking(log_view: LogView, progress: phases.Progress) -> Mapping[tuple[str, int], str]:
    """Return the source to strike off: that of an attempt whose ranks had something to say against it.

    Ranks that went silent, that are another trainer than the one that was saved, or that got no answer from those who
    have the source, say nothing against it: another round, or the next launch, may begin from it.
    """
    attempt, source = log_view.state.attempt, log_view.source
    if attempt is None or source is None or source in log_view.state.struck:
        return {}
    return {source: progress.reason} if progress.by_verdict else {}


def _not_condemned(objects: Sequence[Copy], state: JobState) -> list[Copy]:
    """Return the objects that garbage collection does not take, READY or not."""
    ready = {(one.attempt_uid, one.step) for _, one in state.restorable()}
    steps = {(copy.attempt, copy.step) for copy in objects}
    dead = {at for at in steps if is_dead(state, attempt=at[0], step=at[1])}
    return [one for one in objects if (one.attempt_uid, one.step) in ready or (one.attempt, one.step) not in dead]


def decide(  # noqa: PLR0913 - all that a restore decision rests on
    request: OpenRequest,
    log_view: LogView,
    *,
    struck_now: Mapping[tuple[str, int], str],
    answered: Sequence[Node],
    objects: Sequence[Copy],
    offers: tuple[Offer, ...],
    uid: str,
) -> OpenAttempt | OpenAnswer:
    """Return the attempt to open, with its restore decision, or that nothing is left to begin from."""
    question = log_view.question(offers=offers, striking=struck_now)
    choice = choose(question, answered, _not_condemned(objects, log_view.state))
    if isinstance(choice, NothingLeft):
        text = "checkpoints exist and none can be restored: " + "; ".join(choice.tried)
        return OpenAnswer(code="nothing-left", text=text[:_WHY_CHARS_MAX])
    ready = held = None
    from_step = 0
    digests: tuple[str, ...] = ()
    if isinstance(choice, Choice):
        from_step, ready = choice.step, choice.ready
    if isinstance(choice, Choice) and ready is None:
        held = Held(attempt_uid=choice.attempt_uid, step=choice.step)
        digests = choice.digests
        base = log_view.state.base
        if base is not None and base.snapshot == (choice.attempt_uid, choice.step):
            from_step = base.from_step
    return OpenAttempt(
        basis=basis_of(log_view.state),
        uid=uid,
        launch_id=request.launch_id,
        round=request.round,
        ready=ready,
        held=held,
        from_step=from_step,
        struck=tuple(
            Struck(attempt_uid=source, step=step, why=why[:_STRUCK_WHY_CHARS_MAX])
            for (source, step), why in sorted(struck_now.items())
        ),
        facts=AttemptFacts(
            world=tuple(Member(rank=one.rank, node=one.node, boot_id=one.boot_id) for one in request.world),
            held_digests=digests,
            versions=dict(request.versions),
        ),
        spec=request.spec,
        why=choice.why[:_WHY_CHARS_MAX],
    )
