"""Restoring: all ranks come to the same attempt, check what they are given, and apply it, or all of them raise."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from toprope.trainer_hooks import rng, wire
from toprope.trainer_hooks.apply import apply
from toprope.trainer_hooks.errors import (
    HookError,
    RestoreError,
    SidecarUnavailableError,
    SpecMismatchError,
    StateMismatchError,
    SupersededError,
    UnsupportedLeafError,
    UsageError,
    WorldMismatchError,
)
from toprope.trainer_hooks.fitting import Fit, fit
from toprope.trainer_hooks.launch import World, next_round, versions
from toprope.trainer_hooks.session import Session
from toprope.trainer_hooks.source import SourceError, StagedSource
from toprope.trainer_hooks.state import Parts, devices_of

logger = logging.getLogger("toprope")
RETRY_FOR_S = 120.0
RETRY_EVERY_S = 1.0
REMIND_EVERY_S = 15.0
PHASE_TIMEOUT_S = 330.0
"""Longer than the coordinator's own deadline of 300 s, which can say who was missing."""
MAX_ROUNDS = 64

_BY_CODE: dict[str, type[HookError]] = {
    "spec-mismatch": SpecMismatchError,
    "nothing-left": RestoreError,
    "superseded": SupersededError,
    "busy": RestoreError,
    "unavailable": SidecarUnavailableError,
    "refused": UsageError,
}
_BY_NAME = {
    kind.__name__: kind for kind in (*_BY_CODE.values(), StateMismatchError, UnsupportedLeafError, WorldMismatchError)
}


class _NextRound(Exception):  # noqa: N818 - not an error: the way to the next round
    """The attempt is over before it began; another round may be opened."""


def agree(world: World, step: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what ``step`` gave on each rank; if it raised on one of them, raise on all.

    Raises:
        HookError: that of the lowest rank on which it raised, or this rank's own.
    """
    try:
        mine: dict[str, Any] = {"ok": step()}
        own_error: HookError | None = None
    except HookError as error:
        own_error = error
        mine = {"error": type(error).__name__, "text": str(error)}
    answers = world.gather(mine)
    if own_error is not None:
        raise own_error
    for rank, answer in enumerate(answers):
        if "error" in answer:
            raise _BY_NAME.get(answer["error"], RestoreError)(f"rank {rank}: {answer['text']}")
    return [answer["ok"] for answer in answers]


@dataclass(slots=True)
class Restorer:
    """Brings this process into an attempt."""

    session: Session
    parts: Parts
    world: World
    launch_id: str
    spec: dict[str, Any]
    """Of all ranks together, as ``names`` is."""
    names: Mapping[str, frozenset[str]]
    retry_for_s: float = RETRY_FOR_S
    phase_timeout_s: float = PHASE_TIMEOUT_S
    staged: tuple[wire.StagedShard, ...] = ()
    """The shards that the attempt began from, each with the tier and node that it came from."""

    def restore(self, members: tuple[wire.Member, ...]) -> wire.Attempt:
        """Return the attempt that this process is now in, its source applied.

        Raises:
            HookError: nothing could be restored, and why.
        """
        for _ in range(MAX_ROUNDS):
            attempt = self._opened(members)
            try:
                self._enter(attempt)
            except _NextRound as reason:
                logger.warning("attempt %d could not begin: %s; asking for another", attempt.number, reason)
                continue
            logger.info("attempt %d begins after step %d (%s)", attempt.number, attempt.from_step, attempt.source)
            return attempt
        raise RestoreError(f"no attempt could begin in {MAX_ROUNDS} rounds")

    def _opened(self, members: tuple[wire.Member, ...]) -> wire.Attempt:
        """Return the attempt of this round: rank 0 asks, all get the same answer."""
        answer: dict[str, Any] = {}
        if self.world.rank == 0:
            answered = self._ask(
                wire.Open(
                    launch_id=self.launch_id, round=next_round(), world=members, spec=self.spec, versions=versions()
                )
            )
            answer = {"kind": answered.kind, **asdict(answered)}
        answer = self.world.broadcast(answer)
        if answer.pop("kind") == wire.Error.kind:
            raise _BY_CODE.get(answer["code"], RestoreError)(answer["text"])
        return wire.Attempt(**{**answer, "schedule": wire.Schedule(**answer["schedule"])})

    def _ask(self, request: wire.Open) -> wire.Attempt | wire.Error:
        """Ask until there is an answer, or an error that asking again will not change."""
        end = time.monotonic() + self.retry_for_s
        refused = wire.Error(code="unavailable", text="the sidecar gave no answer")
        said_at = -REMIND_EVERY_S
        while True:
            left_s = end - time.monotonic()
            if left_s <= 0:
                return wire.Error(code=refused.code, text=self._given_up(refused))
            try:
                self.session.open(request)
            except wire.WireError as error:
                return wire.Error(code="refused", text=f"the model's spec is too large to send: {error}")
            answer = self.session.wait_for(wire.Attempt, uid=self.launch_id, phase="", timeout_s=left_s)
            if isinstance(answer, wire.Attempt) and answer.round == request.round:
                return answer
            if isinstance(answer, wire.Error):
                if answer.code not in {"busy", "unavailable"}:
                    return answer
                if answer != refused or time.monotonic() - said_at >= REMIND_EVERY_S:
                    said_at = time.monotonic()
                    logger.warning("%s: %s; asking again for %.0f s", answer.code, answer.text, left_s)
                refused = answer
                time.sleep(min(RETRY_EVERY_S, left_s))

    def _given_up(self, last: wire.Error) -> str:
        cure = (
            "end the other launch of this job, or wait until its processes are gone"
            if last.code == "busy"
            else "see that the coordinator runs ('ckpt status') and can write the store, then start again"
        )
        return f"no attempt was opened within {self.retry_for_s:g} s: {last.text}; {cure}"

    def _enter(self, attempt: wire.Attempt) -> None:
        source = StagedSource(attempt=attempt, ask=lambda number, wants: self._stage(attempt, number, wants))
        found = self._checked(attempt, source)
        self.staged = tuple(source.shards[rank] for rank in sorted(source.shards))
        self._agree(attempt, "staged")
        try:
            if found is not None:
                self._apply(attempt, found)
        except Exception as error:
            self._say(attempt, "applied", ok=False, reason=repr(error), misfit=True)
            raise RestoreError(f"applying step {attempt.from_step} failed: {error!r}; this process must end") from error
        with suppress(_NextRound):
            self._agree(attempt, "applied")
            return
        raise RestoreError(f"attempt {attempt.number} failed while it was applied; this process must end")

    def _stage(self, attempt: wire.Attempt, number: int, wants: tuple[wire.Want, ...]) -> tuple[wire.StagedShard, ...]:
        """Return what the sidecar has staged of the attempt's source for this rank."""
        self.session.join(wire.Join(attempt_uid=attempt.uid, ask=number, wants=wants))
        staged = self.session.wait_for(wire.Staged, uid=attempt.uid, phase=str(number), timeout_s=self.phase_timeout_s)
        if not isinstance(staged, wire.Staged):
            raise self._end(attempt, staged, "staging the shards")
        return staged.shards

    def _checked(self, attempt: wire.Attempt, source: StagedSource) -> Fit | None:
        """Return the checked state, None for a fresh start."""
        if attempt.source == "fresh":
            source.join()
            return None
        try:
            return fit(self.parts, source, self.names, rank=self.world.rank, world=self.world.size)
        except SourceError as error:  # the source's fault: another one may do
            self._say(attempt, "staged", ok=False, reason=str(error))
            raise _NextRound(str(error)) from error
        except UsageError as error:  # the trainer's fault: no other source would fit
            self._say(attempt, "staged", ok=False, reason=str(error), misfit=True)
            raise

    def _apply(self, attempt: wire.Attempt, found: Fit) -> None:
        apply(found.loaded)
        for note in found.notes:
            logger.warning("step %d was saved in another layout: %s", attempt.from_step, note)
        if "rng" in found.loaded.left:
            # No rank of the checkpoint had this rank's streams: they begin anew, each rank's different from all others.
            devices = devices_of(found.loaded.model)
            rng.derive_streams(attempt.job_uid, step=attempt.from_step, rank=self.world.rank, devices=devices)
            logger.warning(
                "step %d was saved by %d ranks, not %d: random streams are derived from job, step and rank",
                attempt.from_step,
                attempt.source_world,
                self.world.size,
            )

    def _agree(self, attempt: wire.Attempt, phase: str) -> None:
        """Say that this rank has finished a phase and wait until all have."""
        self._say(attempt, phase, ok=True)
        answer = self.session.wait_for(wire.Go, uid=attempt.uid, phase=phase, timeout_s=self.phase_timeout_s)
        if not isinstance(answer, wire.Go) or not answer.ok:
            raise self._end(attempt, answer, f"waiting until all ranks have {phase}")

    def _say(self, attempt: wire.Attempt, phase: str, *, ok: bool, reason: str = "", misfit: bool = False) -> None:
        verdict = wire.Verdict(attempt_uid=attempt.uid, phase=phase, ok=ok, reason=reason[:4096], misfit=misfit)
        self.session.verdict(verdict)

    def _end(self, attempt: wire.Attempt, answer: wire.Go | wire.Error | None, doing: str) -> Exception:
        match answer:
            case wire.Go(ok=False):
                return _NextRound(answer.reason)
            case wire.Error():
                return _BY_CODE.get(answer.code, RestoreError)(answer.text)
            case _:
                return SidecarUnavailableError(
                    f"the sidecar said nothing for {self.phase_timeout_s:g} s while {doing} "
                    f"(attempt {attempt.number}; {self.session.trouble})"
                )
