"""How far the trainers of this node have come with a restore, and what they are told: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from msgspec import structs

from toprope.coordinator.wire import AttemptView, Desired, RankVerdict, RestoreShard
from toprope.sidecar.conversation import Trainer
from toprope.sidecar.effects import Effect, Send, Stage
from toprope.sidecar.events import ShardStaged, StageFailed
from toprope.sidecar.values import Lying, Way
from toprope.trainer_hooks.link import wire

RETRY_S = 1.0

Reach: TypeAlias = tuple[RestoreShard, tuple[Way, ...]]
"""What is to be staged, and the ways to it."""


@dataclass(slots=True)
class RestoreBook:
    """The staging of one attempt's source on this node: of each shard what the ranks here want, together and once.

    ``tensors`` says which of a shard are here with ``staged``, ``fetching`` which are on their way. ``failed`` are the
    shards that can't be had, each with the reason; ``unanswered`` are those of them for which it is want of an answer.
    """

    attempt_uid: str = ""
    staged: dict[int, wire.StagedShard] = field(default_factory=dict)
    tensors: dict[int, frozenset[str]] = field(default_factory=dict)
    fetching: dict[int, frozenset[str]] = field(default_factory=dict)
    parts: dict[int, int] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    unanswered: set[int] = field(default_factory=set)
    retry_at_s: dict[int, float] = field(default_factory=dict)
    began_s: float = 0.0

    def plan(
        self, attempt: AttemptView, trainers: Sequence[Trainer], reaches: Mapping[int, Reach], *, now_s: float
    ) -> list[Effect]:
        """Stage what these trainers want and what is not here or on its way, by the ways that there are by now.

        ``reaches`` has each shard of the attempt's source by its rank. What could not be had for want of an answer is
        tried again after a while: a peer or a store that is away for a moment must not cost a good source.
        """
        if self.attempt_uid != attempt.uid:
            self.attempt_uid, self.began_s = attempt.uid, now_s
            for book in (self.staged, self.tensors, self.fetching, self.parts, self.failed, self.retry_at_s):
                book.clear()
            self.unanswered.clear()
        wanted: dict[int, frozenset[str]] = {}
        for want in (want for trainer in trainers for want in trainer.wants):
            wanted[want.rank] = wanted.get(want.rank, frozenset()) | frozenset(want.tensors)
        effects: list[Effect] = []
        for rank, reach in reaches.items():
            if rank not in wanted or rank in self.fetching or rank in self.failed or self._has(rank, wanted[rank]):
                continue
            if self.retry_at_s.get(rank, now_s) <= now_s:
                self.retry_at_s.pop(rank, None)
                effects.append(self._stage(attempt, reach, wanted[rank]))
        return effects

    def _stage(self, attempt: AttemptView, reach: Reach, tensors: frozenset[str]) -> Stage:
        shard, ways = reach
        tensors |= self.tensors.get(shard.rank, frozenset())
        self.fetching[shard.rank] = tensors
        self.parts[shard.rank] = self.parts.get(shard.rank, 0) + 1
        return Stage(
            attempt_uid=attempt.uid,
            source_attempt_uid=attempt.source_attempt_uid,
            step=attempt.from_step,
            shard=shard,
            ways=ways,
            tensors=frozenset({wire.ALL}) if wire.ALL in tensors else tensors,
            part=self.parts[shard.rank],
        )

    def _has(self, rank: int, tensors: frozenset[str]) -> bool:
        here = self.tensors.get(rank)
        return here is not None and (wire.ALL in here or tensors <= here)

    def on_staged(self, event: ShardStaged) -> None:
        """Take in a verified shard."""
        if event.attempt_uid == self.attempt_uid:
            rank = event.shard.rank
            self.fetching.pop(rank, None)
            self.staged[rank], self.tensors[rank] = event.shard, event.tensors

    def on_failed(self, event: StageFailed, *, now_s: float, patience_s: float) -> None:
        """Take in that a shard can't be had, or not just now: then it is tried again for so many seconds in all."""
        if event.attempt_uid != self.attempt_uid:
            return
        self.fetching.pop(event.rank, None)
        if event.again and now_s - self.began_s < patience_s:
            self.retry_at_s[event.rank] = now_s + RETRY_S
            return
        self.failed[event.rank] = event.reason
        if event.again:
            self.unanswered.add(event.rank)

    def complete(self, attempt: AttemptView, trainer: Trainer) -> bool:
        """Say whether all is here that a trainer wants of this attempt's source."""
        there = {shard.rank for shard in attempt.restore}
        return self.attempt_uid == attempt.uid and all(
            want.rank not in there or self._has(want.rank, frozenset(want.tensors)) for want in trainer.wants
        )

    def verdict(self, attempt_uid: str) -> RankVerdict | None:
        """Return what every rank of this node has to say when a shard can't be had, else None."""
        if attempt_uid != self.attempt_uid or not self.failed:
            return None
        reason = "; ".join(f"rank {rank}: {self.failed[rank]}" for rank in sorted(self.failed))
        unanswered = self.unanswered == set(self.failed)
        return RankVerdict(attempt_uid=attempt_uid, phase="staged", ok=False, reason=reason, unanswered=unanswered)

    def tell(self, trainer: Trainer, desired: Desired, *, no_slots: str = "", trouble: str = "") -> list[Effect]:
        """Return the frames that a trainer is owed, given what the job has reached, and what is wrong here."""
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
        frames += _desired_frame(trainer, desired, attempt, no_slots=no_slots, trouble=trouble)
        return [Send(connection=trainer.connection, frame=frame) for frame in frames]

    def end(self, trainer: Trainer, why: str) -> list[Effect]:
        """Tell a trainer, once, that its attempt is over."""
        frames = _once(trainer, "superseded", wire.Error(code="superseded", text=why))
        return [Send(connection=trainer.connection, frame=frame) for frame in frames]

    def _progress(self, trainer: Trainer, attempt: AttemptView) -> list[wire.FromSidecar]:
        frames: list[wire.FromSidecar] = []
        if attempt.phase == "failed":
            return _once(trainer, "failed", _go(trainer, ok=False, reason=attempt.reason, misfit=attempt.misfit))
        if self.complete(attempt, trainer):
            ranks = {want.rank for want in trainer.wants}
            shards = tuple(self.staged[rank] for rank in sorted(ranks & set(self.staged)))
            staged = wire.Staged(attempt_uid=attempt.uid, ask=trainer.ask, shards=shards)
            frames += _once(trainer, "STAGED", staged)
        if "STAGED" in trainer.told and attempt.phase in {"staged", "applied"}:
            frames += _once(trainer, "staged", _go(trainer, ok=True))
        if "staged" in trainer.told and attempt.phase == "applied":
            frames += _once(trainer, "applied", _go(trainer, ok=True))
        return frames


def reach_of(shard: RestoreShard, *, me: str, here: Sequence[Lying], url_of_me: str) -> Reach:
    """Return a shard with the ways to it: this node's own copies first, then as the coordinator says.

    A coordinator that has heard of no copy does not know how long it is. Its length is that of a copy here, since a
    digest is that of a whole image.
    """
    own = [one for one in here if one.shard.digest == shard.digest]
    others: list[Way] = []
    for source in shard.sources:
        if source.tier == "object":
            others.append(Way(kind="object", tier="object", key=source.key))
        elif source.node != me and source.url != url_of_me:
            others.append(Way(kind="node", tier=source.tier, node=source.node, url=source.url))
    known = structs.replace(shard, bytes=own[0].shard.bytes) if own else shard
    return known, (*(one.way for one in own), *others)


def _answer_to_open(trainer: Trainer, desired: Desired, attempt: AttemptView) -> list[wire.FromSidecar]:
    """Answer OPEN once the document with that attempt, and so with its schedule, is here."""
    opened = trainer.opening
    if opened is None or attempt.number < opened.number:
        return []
    trainer.opening = None
    if attempt.uid != opened.uid:
        text = f"attempt {opened.number} was opened, and then attempt {attempt.number} in its place"
        return [wire.Error(code="superseded", text=text)]
    base = attempt.base
    return [
        wire.Attempt(
            job_uid=desired.job_uid,
            number=attempt.number,
            uid=attempt.uid,
            launch_id=attempt.launch_id,
            round=attempt.round,
            source=attempt.source,
            source_world=len(attempt.restore),
            from_step=attempt.from_step,
            schedule=_schedule(desired),
            why=attempt.reason,
            base_job_uid="" if base is None else base.job_uid,
            base_step=0 if base is None else base.step,
            weights_only=base is not None and base.weights_only,
        )
    ]


def _desired_frame(
    trainer: Trainer, desired: Desired, attempt: AttemptView, *, no_slots: str, trouble: str
) -> list[wire.FromSidecar]:
    frame = wire.Desired(
        attempt=attempt.number,
        attempt_uid=attempt.uid,
        schedule=_schedule(desired),
        protected_step=desired.protected_step,
        ready_step=desired.ready_step,
        extra_step=desired.extra_step,
        no_slots=no_slots,
        trouble=trouble,
    )
    if frame == trainer.last_desired:
        return []
    trainer.last_desired = frame
    return [frame]


def _schedule(desired: Desired) -> wire.Schedule:
    return wire.Schedule(from_step=desired.cadence.from_step, every=desired.cadence.every)


def _go(trainer: Trainer, *, ok: bool, reason: str = "", misfit: bool = False) -> wire.Go:
    """Return GO for the phase that the trainer waits for."""
    phase = "applied" if "staged" in trainer.told else "staged"
    return wire.Go(attempt_uid=trainer.attempt_uid, phase=phase, ok=ok, reason=reason, misfit=misfit)


def _once(trainer: Trainer, what: str, frame: wire.FromSidecar) -> list[wire.FromSidecar]:
    if what in trainer.told:
        return []
    trainer.told.add(what)
    return [frame]
