"""How far a restore has come: verdicts of the ranks add up to the phase of the attempt. Pure."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from toprope.coordinator.roll import Node
from toprope.coordinator.wire import Member, RankVerdict

Phase: TypeAlias = Literal["opened", "staged", "applied", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A phase and, for ``failed``, why. ``by_verdict``: a rank had something to say against the source.

    ``misfit``: ranks failed only since they are another trainer than the one that was saved. With neither, ranks said
    nothing at all.
    """

    phase: Phase
    reason: str = ""
    by_verdict: bool = False
    misfit: bool = False


def verdicts(nodes: Sequence[Node], attempt_uid: str) -> dict[int, tuple[str, RankVerdict]]:
    """Return the verdict of each rank that has one for this attempt, with the node that tells it."""
    return {
        state.rank: (node.name, state.verdict)
        for node in nodes
        for state in node.inventory.ranks
        if state.verdict is not None and state.verdict.attempt_uid == attempt_uid
    }


def trains(nodes: Sequence[Node], attempt_uid: str, from_step: int) -> bool:
    """Say whether a rank has gone beyond the attempt's first step, which none does before all have applied it."""
    return any(
        state.step > from_step for node in nodes for state in node.inventory.ranks if state.attempt_uid == attempt_uid
    ) or any(copy.step > from_step for node in nodes for copy in node.copies(attempt_uid))


def advance(
    now: Progress, said: Mapping[int, tuple[str, RankVerdict]], *, world: int, trains: bool, overdue_s: float
) -> Progress:
    """Return the phase after these verdicts: it never goes back, and ``applied`` is final.

    ``failed`` is final too, unless ranks are seen to train, since none does before all have applied: a coordinator that
    began after that has not heard all verdicts, and must not take an attempt for failed that lives. What is said
    against the source later than that is heard still.

    ``overdue_s``: the deadline of the phase when it has passed, else 0.
    """
    if trains or now.phase == "applied":
        return Progress(phase="applied")
    failed = _failed(now, said)
    if failed is not None:
        return failed
    applied = [rank for rank, (_, verdict) in said.items() if verdict.phase == "applied"]
    if len(applied) == world:
        return Progress(phase="applied")
    if len(said) == world or applied:
        now = Progress(phase="staged")
    if overdue_s:
        wanted = "staged" if now.phase == "opened" else "applied"
        there = said if now.phase == "opened" else applied
        missing = ", ".join(str(rank) for rank in range(world) if rank not in there)
        return Progress(phase="failed", reason=f"not {wanted} after {overdue_s:.0f} s: no word from rank {missing}")
    return now


def _failed(now: Progress, said: Mapping[int, tuple[str, RankVerdict]]) -> Progress | None:
    """Return how the attempt failed, if it did: what is said against the source outweighs all else."""
    bad = {rank: (node, verdict) for rank, (node, verdict) in sorted(said.items()) if not verdict.ok}
    misfit = all(verdict.misfit for _, verdict in bad.values())
    against = any(not verdict.misfit and not verdict.unanswered for _, verdict in bad.values())
    if now.by_verdict or (now.phase == "failed" and not against):
        return now
    if not bad:
        return None
    reason = "; ".join(
        f"rank {rank} on node {node} could not be {verdict.phase}: {verdict.reason or 'no reason given'}"
        for rank, (node, verdict) in bad.items()
    )
    return Progress(phase="failed", reason=reason, by_verdict=against, misfit=misfit)


def unheard(world: Sequence[Member], nodes: Mapping[str, Node]) -> str:
    """Return why a world can't be served yet: a node of it is not known."""
    for member in world:
        if member.node not in nodes:
            return f"node {member.node} of rank {member.rank} has not been heard by the coordinator yet"
    return ""


def misplaced(world: Sequence[Member], nodes: Mapping[str, Node], *, answered: Container[str]) -> str:
    """Return why a world of known nodes can't be served yet: one did not answer, or has other memory now."""
    for member in world:
        node = nodes[member.node]
        if member.node not in answered:
            return f"node {member.node} of rank {member.rank} does not answer the coordinator at {node.url}"
        if node.inventory.boot_id != member.boot_id:
            return (
                f"rank {member.rank} says that node {member.node} has boot id {member.boot_id}; "
                f"the coordinator knows it with {node.inventory.boot_id}"
            )
    return ""
