"""Which attempts this node has adopted while the log could not be reached, and what follows from it. Pure.

An attempt that is adopted here stands until the log says otherwise: no document takes it back by naming an earlier
one, and no other attempt of its number is adopted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from toprope.coordinator.wire import Adopted, Desired, Provisional
from toprope.sidecar.effects import Adopt, Effect, Shout
from toprope.sidecar.events import AdoptionsRead

RETRY_S = 2.0


@dataclass(slots=True)
class AdoptionBook:
    """The adoptions by number. ``writing``: one that is on its way to the disk; nothing is, before ``retry_at_s``.

    ``lost`` are the numbers that were given to an attempt which can't be read any more: no other one gets them.
    ``unread``: which those are can't be told, so that none is given away.
    """

    adopted: dict[int, Provisional] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    unread: bool = False
    writing: Provisional | None = None
    retry_at_s: float = 0.0

    def plan(self, desired: Desired, *, now_s: float) -> list[Effect]:
        """Adopt what is proposed, if nothing here speaks against it."""
        proposed = desired.proposed
        if proposed is None or self.writing is not None or now_s < self.retry_at_s:
            return []
        if not self.may_adopt(proposed, desired):
            return []
        self.writing = self._with_what_is_new(proposed)
        over = min(desired.logged, proposed.number)
        old = tuple(number for number in sorted({*self.adopted, *self.lost}) if number < over)
        return [Adopt(proposed=self.writing, forget=old)]

    def _with_what_is_new(self, proposed: Provisional) -> Provisional:
        """Return it without those before it that are written down here already, and stay so.

        What is written down takes the place of another one of its number, with those before that.
        """
        staying = [one for number, one in self.adopted.items() if number != proposed.number]
        known = {each.uid for one in staying for each in (*one.before, one)}
        return msgspec.structs.replace(proposed, before=tuple(one for one in proposed.before if one.uid not in known))

    def may_adopt(self, proposed: Provisional, desired: Desired) -> bool:
        """Say whether an attempt may be adopted: it follows the current one, and its number is not given away."""
        current = desired.attempt
        if proposed.job_uid != desired.job_uid or proposed.number <= desired.logged:
            return False
        if self.unread or proposed.number in self.lost:
            return False
        if current is None or (current.uid, current.number + 1) != (proposed.parent, proposed.number):
            return False
        before = self.adopted.get(proposed.number)
        return before is None or before.job_uid != proposed.job_uid or before.uid in desired.fenced

    def on_read(self, event: AdoptionsRead) -> list[Effect]:
        """Take in what an earlier life has adopted."""
        self.adopted.update((one.number, one) for one in event.found)
        self.lost, self.unread = set(event.lost), bool(event.unread)
        texts = [
            f"{why}. This node agrees to no attempt {number} without the job log, which may have given it away"
            for number, why in sorted(event.lost.items())
        ]
        if event.unread:
            texts.append(f"{event.unread}. This node agrees to no attempt without the job log until it starts anew")
        return [Shout(what="adoption-lost", text=text) for text in texts]

    def on_adopted(self, adopted: Provisional, *, forgotten: tuple[int, ...]) -> None:
        """Take in that an adoption is durable."""
        self.writing = None
        for number in forgotten:
            self.adopted.pop(number, None)
            self.lost.discard(number)
        self.adopted[adopted.number] = adopted

    def on_failed(self, *, now_s: float) -> None:
        """Take in that it is not."""
        self.writing, self.retry_at_s = None, now_s + RETRY_S

    def standing(self, desired: Desired) -> tuple[Provisional, ...]:
        """Return the adoptions about which the log has not spoken yet, as far as this document tells."""
        return tuple(
            one
            for number, one in sorted(self.adopted.items())
            if number > desired.logged and one.job_uid == desired.job_uid and one.uid not in desired.fenced
        )

    def listed(self, desired: Desired) -> tuple[Adopted, ...]:
        """Return their names."""
        return tuple(Adopted(number=one.number, uid=one.uid) for one in self.standing(desired))

    def held_to(self, new: Desired, old: Desired | None) -> Desired:
        """Return a document with the attempt that it may not take back, and what was kept for its sake."""
        standing = self.standing(new)
        number = new.attempt.number if new.attempt is not None else 0
        if not standing or old is None or old.attempt is None:
            return new if number >= max((one.number for one in standing), default=0) else _of_none(new)
        if old.attempt.uid not in {one.uid for one in standing} or number >= old.attempt.number:
            return new
        keep = tuple(dict.fromkeys((*old.keep, *new.keep)))
        return msgspec.structs.replace(new, attempt=old.attempt, keep=keep, dropped=(), aim=old.aim)

    def end_of(self, attempt_uid: str, desired: Desired) -> str:
        """Return why an adopted attempt is over although no later one was opened; empty if it is not so."""
        number = next((one.number for one in self.adopted.values() if one.uid == attempt_uid), 0)
        current = desired.attempt
        if not number or current is None or current.uid == attempt_uid or current.number > number:
            return ""
        if attempt_uid in desired.fenced or (current.number == number and desired.logged >= number):
            return (
                f"attempt {number} was opened while the job log could not be reached, and the log has gone on without "
                "it: what it saved is lost; start again"
            )
        return ""


def _of_none(desired: Desired) -> Desired:
    """Return a document as it is while the attempt that stands here is not known to its coordinator yet."""
    return msgspec.structs.replace(desired, attempt=None, dropped=(), aim=0)
