"""What the coordinator knows of the job log: its fold, and the objects that the current records name. A value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toprope.coordinator.restore_choice import Offer, Question, Stretch, Tainted
from toprope.store.fold import JobState
from toprope.store.records import AttemptFacts

_NO_LIMIT = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """The log as far as decisions rest on it.

    ``spec`` is the job's once it is set, ``facts`` those of the current attempt, ``offer`` its source if that is READY.
    """

    state: JobState
    spec: Mapping[str, Any] | None = None
    facts: AttemptFacts | None = None
    offer: Offer | None = None

    @property
    def ready_step(self) -> int:
        """Return the step of head, 0 when nothing on the lineage is READY."""
        return 0 if self.state.head is None else self.state.readies[self.state.head].step

    @property
    def source(self) -> tuple[str, int] | None:
        """Return the snapshot, as attempt uid and step, that the current attempt began with; None: none."""
        attempt = self.state.attempt
        return None if attempt is None else self.state.source_of(attempt)

    @property
    def source_digests(self) -> tuple[str, ...]:
        """Return the digests by rank that the log has for the current attempt's source."""
        if self.offer is not None:
            return tuple(stored.digest for stored in self.offer.shards)
        return self.facts.held_digests if self.facts is not None else ()

    def launches(self) -> frozenset[str]:
        """Return the launch ids that were ever given an attempt."""
        return frozenset(attempt.launch_id for attempt in self.state.attempts)

    def lineage(self) -> tuple[Stretch, ...]:
        """Return the attempts that led to where the job is, current first, with their steps that did."""
        by_uid = {attempt.uid: attempt for attempt in self.state.attempts}
        stretches: list[Stretch] = []
        current, upto = self.state.attempt, _NO_LIMIT
        while current is not None:
            stretches.append(Stretch(attempt_uid=current.uid, after=current.from_step, upto=upto))
            source = self.state.source_of(current)
            current, upto = (by_uid[source[0]], source[1]) if source is not None else (None, 0)
        return tuple(stretches)

    def question(self, *, world: int, offers: tuple[Offer, ...], striking: Mapping[tuple[str, int], str]) -> Question:
        """Return what the log says of where the next attempt may begin, with ``striking`` struck off as well."""
        struck = {
            (struck.attempt_uid, struck.step): struck.why
            for attempt in self.state.attempts
            for struck in attempt.struck
        }
        source = self.source
        attempt = self.state.attempt
        held = attempt is not None and attempt.held is not None
        return Question(
            world=world,
            lineage=self.lineage(),
            offers=offers,
            struck={**struck, **striking},
            tainted=tuple(
                Tainted(attempt=taint.attempt, from_step=taint.from_step, to_step=taint.to_step, reason=taint.reason)
                for taint in self.state.taints
            ),
            readies=len(self.state.readies),
            sworn={source: self.source_digests} if source is not None and held else {},
        )
