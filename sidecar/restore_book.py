"""How far the trainers of this node have come with a restore, and what they are told: pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from toprope.coordinator.wire import AttemptView, Desired, RankVerdict, RestoreShard
from toprope.sidecar.conversation import Trainer
from toprope.sidecar.effects import Effect, Send, Stage
from toprope.sidecar.events import ShardStaged, StageFailed
from toprope.sidecar.values import Way
from toprope.trainer_hooks import wire

RETRY_S = 1.0
PATIENCE_S = 240.0
"""How long a shard is tried again for want of an answer: within the coordinator's deadline, to say what was tried."""


@dataclass(slots=True)
class RestoreBook:
    """The staging of one attempt's source on this node."""

    attempt_uid: str = ""
    staged: dict[int, wire.StagedShard] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    retry_at_s: dict[int, float] = field(default_factory=dict)
    began_s: float = 0.0

    def begin(self, attempt: AttemptView, ways: dict[int, tuple[Way, ...]], *, now_s: float) -> list[Effect]:
        """Stage each shard of the attempt's source once for all ranks of this node; begun already, do nothing."""
        if self.attempt_uid == attempt.uid:
            return []
        self.attempt_uid, self.staged, self.failed, self.retry_at_s = attempt.uid, {}, {}, {}
        self.began_s = now_s
        return [_stage(attempt, shard, ways) for shard in attempt.restore]

    def again(self, attempt: AttemptView, ways: dict[int, tuple[Way, ...]], *, now_s: float) -> list[Effect]:
        """Try those shards again that could not be had for want of an answer, by the ways that there are by now.

        A peer or a store that is away for a moment must not cost a good source.
        """
        due = {rank for rank, at_s in self.retry_at_s.items() if at_s <= now_s}
        self.retry_at_s = {rank: at_s for rank, at_s in self.retry_at_s.items() if rank not in due}
        return [_stage(attempt, shard, ways) for shard in attempt.restore if shard.rank in due]

    def on_staged(self, event: ShardStaged) -> None:
        """Take in a verified shard."""
        if event.attempt_uid == self.attempt_uid:
            self.staged[event.shard.rank] = event.shard

    def on_failed(self, event: StageFailed, *, now_s: float) -> None:
        """Take in that a shard can't be had, or not just now."""
        if event.attempt_uid != self.attempt_uid:
            return
        if event.again and now_s - self.began_s < PATIENCE_S:
            self.retry_at_s[event.rank] = now_s + RETRY_S
        else:
            self.failed[event.rank] = event.reason

    def complete(self, attempt: AttemptView) -> bool:
        """Say whether all shards of this attempt's source are here."""
        return self.attempt_uid == attempt.uid and set(self.staged) == {shard.rank for shard in attempt.restore}

    def verdict(self, attempt_uid: str) -> RankVerdict | None:
        """Return what every rank of this node has to say when a shard can't be had, else None."""
        if attempt_uid != self.attempt_uid or not self.failed:
            return None
        reason = "; ".join(f"rank {rank}: {self.failed[rank]}" for rank in sorted(self.failed))
        return RankVerdict(attempt_uid=attempt_uid, phase="staged", ok=False, reason=reason)

    def tell(self, trainer: Trainer, desired: Desired) -> list[Effect]:
        """Return the frames that a trainer is owed, given what the job has reached."""
        attempt = desired.attempt
        if attempt is None:
            return []
        frames: list[wire.FromSidecar] = [*_answer_to_open(trainer, desired, attempt)]
        if trainer.joined and trainer.attempt_uid == attempt.uid:
            trainer.seen = True
            frames += self._progress(trainer, attempt)
        elif trainer.joined and trainer.seen and not trainer.told & {"applied", "failed"}:
            reason = f"attempt {attempt.number} was opened in its place"
            frames += _once(trainer, "failed", _go(trainer, ok=False, reason=reason))
        frames += _desired_frame(trainer, desired, attempt)
        return [Send(connection=trainer.connection, frame=frame) for frame in frames]

    def _progress(self, trainer: Trainer, attempt: AttemptView) -> list[wire.FromSidecar]:
        frames: list[wire.FromSidecar] = []
        if attempt.phase == "failed":
            return _once(trainer, "failed", _go(trainer, ok=False, reason=attempt.reason))
        if self.complete(attempt):
            shards = tuple(self.staged[rank] for rank in sorted(self.staged))
            frames += _once(trainer, "STAGED", wire.Staged(attempt_uid=attempt.uid, shards=shards))
        if "STAGED" in trainer.told and attempt.phase in {"staged", "applied"}:
            frames += _once(trainer, "staged", _go(trainer, ok=True))
        if "staged" in trainer.told and attempt.phase == "applied":
            frames += _once(trainer, "applied", _go(trainer, ok=True))
        return frames


def _stage(attempt: AttemptView, shard: RestoreShard, ways: dict[int, tuple[Way, ...]]) -> Stage:
    return Stage(
        attempt_uid=attempt.uid,
        source_attempt_uid=attempt.source_attempt_uid,
        step=attempt.from_step,
        shard=shard,
        ways=ways[shard.rank],
    )


def ways_to(shard: RestoreShard, *, me: str, here: list[tuple[Way, str]], url_of_me: str) -> tuple[Way, ...]:
    """Return the ways to a shard, this node's own copies (each with its digest) first, then as the coordinator says."""
    own = [way for way, digest in here if digest == shard.digest]
    others: list[Way] = []
    for source in shard.sources:
        if source.tier == "object":
            others.append(Way(kind="object", tier="object", key=source.key))
        elif source.node != me and source.url != url_of_me:
            others.append(Way(kind="node", tier=source.tier, node=source.node, url=source.url))
    return (*own, *others)


def _answer_to_open(trainer: Trainer, desired: Desired, attempt: AttemptView) -> list[wire.FromSidecar]:
    """Answer OPEN once the document with that attempt, and so with its schedule, is here."""
    opened = trainer.opening
    if opened is None or attempt.number < opened.number:
        return []
    trainer.opening = None
    if attempt.uid != opened.uid:
        text = f"attempt {opened.number} was opened, and then attempt {attempt.number} in its place"
        return [wire.Error(code="superseded", text=text)]
    return [
        wire.Attempt(
            job_uid=desired.job_uid,
            number=attempt.number,
            uid=attempt.uid,
            launch_id=attempt.launch_id,
            round=attempt.round,
            source=attempt.source,
            from_step=attempt.from_step,
            schedule=_schedule(desired),
            why=attempt.reason,
        )
    ]


def _desired_frame(trainer: Trainer, desired: Desired, attempt: AttemptView) -> list[wire.FromSidecar]:
    frame = wire.Desired(
        attempt=attempt.number,
        attempt_uid=attempt.uid,
        schedule=_schedule(desired),
        protected_step=desired.protected_step,
        ready_step=desired.ready_step,
    )
    if frame == trainer.last_desired:
        return []
    trainer.last_desired = frame
    return [frame]


def _schedule(desired: Desired) -> wire.Schedule:
    return wire.Schedule(from_step=desired.cadence.from_step, every=desired.cadence.every)


def _go(trainer: Trainer, *, ok: bool, reason: str = "") -> wire.Go:
    """Return GO for the phase that the trainer waits for."""
    phase = "applied" if "staged" in trainer.told else "staged"
    return wire.Go(attempt_uid=trainer.attempt_uid, phase=phase, ok=ok, reason=reason)


def _once(trainer: Trainer, what: str, frame: wire.FromSidecar) -> list[wire.FromSidecar]:
    if what in trainer.told:
        return []
    trainer.told.add(what)
    return [frame]
