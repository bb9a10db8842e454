"""Entering an attempt: all ranks come to the same one, and hear of each other how far they have come with it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

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
from toprope.trainer_hooks.launch import World, next_round, versions
from toprope.trainer_hooks.link import wire
from toprope.trainer_hooks.link.session import Session

logger = logging.getLogger("toprope")
RETRY_FOR_S = 120.0
RETRY_EVERY_S = 1.0
REMIND_EVERY_S = 15.0
PHASE_TIMEOUT_S = 330.0
"""Longer than the coordinator's own deadline of 300 s, which can say who was missing."""
MAX_ROUNDS = 64
_T = TypeVar("_T")

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


class NextRound(Exception):  # noqa: N818 - not an error: the way to the next round
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


def located(world: World, greet: Callable[[], wire.Welcome | None]) -> tuple[wire.Member, ...] | None:
    """Return where all ranks sit, as ``greet`` learns it from each one's sidecar; None if one is to go on without.

    Raises:
        HookError: as ``agree`` does.
    """

    def place() -> dict[str, Any]:
        welcome = greet()
        return {} if welcome is None else {"node": welcome.node, "boot_id": welcome.boot_id}

    places = agree(world, place)
    return tuple(wire.Member(rank=rank, **one) for rank, one in enumerate(places)) if all(places) else None


@dataclass(slots=True)
class Entry:
    """Brings this rank into an attempt, with all others. ``spec`` is that of all ranks together."""

    session: Session
    world: World
    launch_id: str
    spec: dict[str, Any]
    retry_for_s: float = RETRY_FOR_S
    phase_timeout_s: float = PHASE_TIMEOUT_S

    def enter(self, members: tuple[wire.Member, ...], begin: Callable[[wire.Attempt], _T]) -> tuple[wire.Attempt, _T]:
        """Return the attempt that this process is now in, and what ``begin`` made of it.

        Raises:
            HookError: none could be entered, and why.
        """
        for _ in range(MAX_ROUNDS):
            attempt = self._opened(members)
            try:
                return attempt, begin(attempt)
            except NextRound as reason:
                logger.warning("attempt %d could not begin: %s; asking for another", attempt.number, reason)
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

    def stage(self, attempt: wire.Attempt, number: int, wants: tuple[wire.Want, ...]) -> tuple[wire.StagedShard, ...]:
        """Return what the sidecar has staged of the attempt's source for this rank."""
        self.session.join(wire.Join(attempt_uid=attempt.uid, ask=number, wants=wants))
        staged = self.session.wait_for(wire.Staged, uid=attempt.uid, phase=str(number), timeout_s=self.phase_timeout_s)
        if not isinstance(staged, wire.Staged):
            raise self._ended(attempt, staged, "staging the shards")
        return staged.shards

    def agree(self, attempt: wire.Attempt, phase: str) -> None:
        """Say that this rank has finished a phase and wait until all have."""
        self.say(attempt, phase, ok=True)
        answer = self.session.wait_for(wire.Go, uid=attempt.uid, phase=phase, timeout_s=self.phase_timeout_s)
        if not isinstance(answer, wire.Go) or not answer.ok:
            raise self._ended(attempt, answer, f"waiting until all ranks have {phase}")

    def say(self, attempt: wire.Attempt, phase: str, *, ok: bool, reason: str = "", misfit: bool = False) -> None:
        """Say what came of a phase on this rank."""
        verdict = wire.Verdict(attempt_uid=attempt.uid, phase=phase, ok=ok, reason=reason[:4096], misfit=misfit)
        self.session.verdict(verdict)

    def _ended(self, attempt: wire.Attempt, answer: wire.Go | wire.Error | None, doing: str) -> Exception:
        match answer:
            case wire.Go(ok=False, misfit=True, phase="staged"):  # who found it has ended: no collective would
                return UsageError(answer.reason)
            case wire.Go(ok=False):
                return NextRound(answer.reason)
            case wire.Error():
                return _BY_CODE.get(answer.code, RestoreError)(answer.text)
            case _:
                return SidecarUnavailableError(
                    f"the sidecar said nothing for {self.phase_timeout_s:g} s while {doing} "
                    f"(attempt {attempt.number}; {self.session.trouble})"
                )
