"""The current attempt as the document has it: the log's words, and where the shards of its source can be had. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from toprope.coordinator.log_view import LogView
from toprope.coordinator.phases import Progress
from toprope.coordinator.restore_choice import shards_of
from toprope.coordinator.roll import Node
from toprope.coordinator.wire import AttemptView, BaseView, Copy, Member, RestoreShard
from toprope.store.log.records import Attempt


def attempt_view(
    log_view: LogView,
    progress: Progress,
    *,
    world: tuple[Member, ...],
    nodes: Sequence[Node],
    objects: Sequence[Copy],
    provisional: bool = False,
) -> AttemptView | None:
    """Return the current attempt of ``world``, None before the first.

    ``nodes`` and ``objects`` are those that may have shards of its source, as long as it restores.
    """
    attempt = log_view.state.attempt
    if attempt is None or log_view.facts is None:
        return None
    source, base = log_view.source, log_view.state.base
    is_base = log_view.state.is_base(source)
    shards: tuple[RestoreShard, ...] = ()
    if source is not None and progress.phase in ("opened", "staged"):
        shards = shards_of(
            log_view.source_digests,
            attempt_uid=source[0],
            step=source[1],
            nodes=nodes,
            objects=objects,
            stored=log_view.offer.shards if log_view.offer is not None else (),
        )
    return AttemptView(
        number=attempt.attempt,
        uid=attempt.uid,
        launch_id=attempt.launch_id,
        round=attempt.round,
        world=world,
        source=_kind_of(attempt, is_base=is_base),
        source_attempt_uid=source[0] if source is not None else "",
        from_step=attempt.from_step,
        restore=shards,
        phase=progress.phase,
        reason=progress.reason,
        misfit=progress.misfit,
        base=BaseView(job_uid=base.job_uid, step=base.step, weights_only=base.take == "weights")
        if base is not None and is_base
        else None,
        provisional=provisional,
    )


def _kind_of(attempt: Attempt, *, is_base: bool) -> Literal["fresh", "ready", "held", "base"]:
    if attempt.ready is not None:
        return "ready"
    if attempt.held is None:
        return "fresh"
    return "base" if is_base else "held"
