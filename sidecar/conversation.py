"""What the trainers of this node say, and what is remembered of it: HELLO, OPEN, JOIN, VERDICT. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, assert_never

from toprope.coordinator.wire import AttemptView, Desired, Member, OpenRequest, RankVerdict, Skip, StepAsk
from toprope.sidecar import effects as do
from toprope.sidecar import events as on
from toprope.sidecar.effects import Effect
from toprope.sidecar.slot_book import SlotBook
from toprope.sidecar.values import Identity
from toprope.trainer_hooks.link import wire

LAUNCH_ID_CHARS_MAX = 64
FromTrainer: TypeAlias = (
    wire.Open | wire.Join | wire.Verdict | wire.Size | wire.Sealed | wire.Skipped | wire.Ask | wire.Bye
)
"""What a trainer may say once it has said HELLO."""
MISSES = 3
"""An attempt is named before it is answered; so many times not named, asked at intervals, it has been replaced."""


@dataclass(slots=True, kw_only=True)
class Trainer:
    """A connected trainer. ``told`` are the frames of its restore that it has been sent.

    ``image_bytes``: how large a slot it needs, as its own process has said (0: not yet); an earlier launch of the rank
    may have needed another, as one of another world does.
    ``seen``: the attempt that it joined has been the current one; ``misses``: how often the coordinator named another.
    """

    connection: int
    rank: int
    world: int
    launch_id: str
    image_bytes: int = 0
    attempt_uid: str = ""
    ask: int = 0
    wants: tuple[wire.Want, ...] = ()
    joined: bool = False
    seen: bool = False
    misses: int = 0
    told: set[str] = field(default_factory=set)
    last_desired: wire.Desired | None = None
    opening: AttemptView | None = None

    def miss(self, desired: Desired) -> None:
        """Take in that the coordinator was asked: an attempt that it does not name, time and again, is over."""
        current = desired.attempt.uid if desired.attempt is not None else ""
        if self.joined and not self.seen and self.attempt_uid != current:
            self.misses += 1
            self.seen = self.misses >= MISSES


@dataclass(slots=True)
class RankNotes:
    """What is remembered of a rank between its frames. ``ask`` is about its attempt."""

    world: int = 0
    launch_id: str = ""
    attempt_uid: str = ""
    step: int = 0
    verdict: RankVerdict | None = None
    ask: StepAsk | None = None


@dataclass(slots=True, kw_only=True)
class Conversation:
    """The trainers that are connected, by connection, and what each rank has said."""

    me: Identity
    trainers: dict[int, Trainer] = field(default_factory=dict)
    notes: dict[int, RankNotes] = field(default_factory=dict)

    def in_order(self) -> Iterator[Trainer]:
        """Yield the trainers that are connected, the one that came first first."""
        return (self.trainers[connection] for connection in sorted(self.trainers))

    def is_superseded(self, trainer: Trainer) -> bool:
        """Say whether its process has connected once more. Who else says to be this rank does not speak for it."""
        return any(
            other.rank == trainer.rank
            and other.launch_id == trainer.launch_id
            and other.connection > trainer.connection
            for other in self.trainers.values()
        )

    def on_frame(self, event: on.FrameArrived, slots: SlotBook) -> list[Effect]:
        """Take in a frame; what it says of slots is told to ``slots``."""
        frame = event.frame
        if isinstance(frame, wire.Hello):
            return self._on_hello(event.connection, frame)
        trainer = self.trainers.get(event.connection)
        if trainer is None:
            return _refusal(event.connection, f"the first frame was {frame.kind}; expected HELLO")
        return self._on_trainer_frame(trainer, frame, slots)

    def _on_hello(self, connection: int, frame: wire.Hello) -> list[Effect]:
        if frame.version != wire.VERSION:
            return _refusal(connection, f"frames of version {frame.version}; this sidecar speaks {wire.VERSION}")
        if frame.job != self.me.job:
            mixed_up = f"this is the sidecar of job {self.me.job}, not of job {frame.job}"
            return _refusal(connection, f"{mixed_up}: name that job's own socket in CKPT_SOCKET")
        if not 0 <= frame.rank < frame.world or not frame.launch_id or len(frame.launch_id) > LAUNCH_ID_CHARS_MAX:
            return _refusal(connection, f"rank {frame.rank} of {frame.world}, launch {frame.launch_id!r:.80}")
        trainer = Trainer(connection=connection, rank=frame.rank, world=frame.world, launch_id=frame.launch_id)
        in_attempt = any(other.rank == frame.rank and other.joined for other in self.trainers.values())
        self.trainers[connection] = trainer
        if not in_attempt:  # else it may be a stray: its launch is heard of once it joins an attempt
            self._note(trainer)
        welcome = do.Send(connection=connection, frame=wire.Welcome(node=self.me.node, boot_id=self.me.boot_id))
        return [welcome, do.LookAtSlots(rank=frame.rank)]

    def _note(self, trainer: Trainer) -> None:
        """Have what is remembered of a rank be of this trainer's launch."""
        notes = self.notes.setdefault(trainer.rank, RankNotes())
        if notes.launch_id != trainer.launch_id:
            notes = self.notes[trainer.rank] = RankNotes(launch_id=trainer.launch_id)
        notes.world = trainer.world

    def _on_trainer_frame(  # noqa: C901 - one case for each kind of frame
        self, trainer: Trainer, frame: FromTrainer, slots: SlotBook
    ) -> list[Effect]:
        notes = self.notes[trainer.rank]
        match frame:
            case wire.Open():
                return self._on_open(trainer, frame)
            case wire.Join():
                self._on_join(trainer, frame)
            case wire.Verdict():
                if frame.phase in {"staged", "applied"}:
                    notes.verdict = _verdict(frame)
            case wire.Size():
                if frame.bytes > 0:
                    slots.wanted_bytes[trainer.rank] = trainer.image_bytes = frame.bytes
            case wire.Sealed():
                notes.attempt_uid, notes.step = frame.attempt_uid, max(frame.step, notes.step)
                return slots.seal(trainer.rank, trainer.launch_id, frame)
            case wire.Skipped():
                notes.attempt_uid, notes.step = frame.attempt_uid, max(frame.step, notes.step)
                slots.skip(
                    Skip(attempt_uid=frame.attempt_uid, step=frame.step, rank=trainer.rank, reason=frame.reason[:200])
                )
            case wire.Ask():
                self._on_ask(trainer, frame, slots)
            case wire.Bye():
                return [do.Hangup(connection=trainer.connection)]
            case _:
                assert_never(frame)
        return []

    def _on_open(self, trainer: Trainer, frame: wire.Open) -> list[Effect]:
        world = tuple(Member(rank=member.rank, node=member.node, boot_id=member.boot_id) for member in frame.world)
        request = OpenRequest(
            job=self.me.job,
            launch_id=frame.launch_id,
            round=frame.round,
            world=world,
            spec=frame.spec,
            versions=frame.versions,
        )
        return [do.OpenAttempt(connection=trainer.connection, request=request)]

    def _on_join(self, trainer: Trainer, frame: wire.Join) -> None:
        self._note(trainer)
        notes = self.notes[trainer.rank]
        trainer.attempt_uid, trainer.joined, trainer.seen, trainer.misses = frame.attempt_uid, True, False, 0
        trainer.ask, trainer.wants = frame.ask, frame.wants
        trainer.told.clear()
        if notes.attempt_uid != frame.attempt_uid:
            notes.attempt_uid, notes.step, notes.verdict, notes.ask = frame.attempt_uid, 0, None, None

    def _on_ask(self, trainer: Trainer, frame: wire.Ask, slots: SlotBook) -> None:
        notes = self.notes[trainer.rank]
        if frame.attempt_uid != notes.attempt_uid or not 0 <= frame.after <= frame.step:
            return
        if frame.step > frame.after:
            notes.ask = StepAsk(after=frame.after, step=frame.step)
        else:
            slots.ask(trainer.rank, frame.attempt_uid, frame.step)

    def on_closed(self, event: on.ConnectionClosed) -> list[Effect]:
        """Forget a trainer whose connection is gone."""
        trainer = self.trainers.pop(event.connection, None)
        return [] if trainer is None else [do.LookAtSlots(rank=trainer.rank)]

    def on_confirmed(self, desired: Desired) -> None:
        """Take in that the coordinator itself was asked, and that this is what it said."""
        for trainer in self.in_order():
            trainer.miss(desired)

    def on_open_answered(self, event: on.OpenAnswered) -> list[Effect]:
        """Note the attempt that a trainer was given, or pass on why it has none."""
        trainer = self.trainers.get(event.connection)
        if trainer is None:
            return []
        if event.answer.attempt is None:
            frame = wire.Error(code=event.answer.code or "unavailable", text=event.answer.text)
            return [do.Send(connection=event.connection, frame=frame)]
        trainer.opening = event.answer.attempt
        return []


def _refusal(connection: int, text: str) -> list[Effect]:
    error = do.Send(connection=connection, frame=wire.Error(code="refused", text=text))
    return [error, do.Hangup(connection=connection), do.Shout(what="refused", text=f"trainer refused: {text}")]


def _verdict(frame: wire.Verdict) -> RankVerdict:
    phase: Literal["staged", "applied"] = "applied" if frame.phase == "applied" else "staged"
    return RankVerdict(
        attempt_uid=frame.attempt_uid,
        phase=phase,
        ok=frame.ok,
        reason=frame.reason[:2000],
        misfit=frame.misfit and not frame.ok,
    )
