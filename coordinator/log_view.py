"""What the coordinator knows of the job log: its fold, and the objects that the current records name. A value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toprope.coordinator.restore_choice import Offer, Question
from toprope.store.log.fold import JobState
from toprope.store.log.records import AttemptFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class LogView:
    """The log as far as decisions rest on it.

    ``spec`` is the job's once it is set, ``facts`` those of the current attempt, ``offer`` its source if that is READY
    or the job's base.
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
        if self.offer is not None and self.offer.seq is not None:
            return tuple(stored.digest for stored in self.offer.shards)
        return self.facts.held_digests if self.facts is not None else ()

    def launches(self) -> frozenset[str]:
        """Return the launch ids that were ever given an attempt."""
        return frozenset(attempt.launch_id for attempt in self.state.attempts)

    def question(self, *, offers: tuple[Offer, ...], striking: Mapping[tuple[str, int], str]) -> Question:
        """Return what the log says of where the next attempt may begin, with ``striking`` struck off as well."""
        struck = {
            (struck.attempt_uid, struck.step): struck.why
            for attempt in self.state.attempts
            for struck in attempt.struck
        }
        source = self.source
        attempt = self.state.attempt
        held = attempt is not None and attempt.held is not None
        base = self.state.base
        return Question(
            worlds={
                **({} if base is None else {base.attempt_uid: base.world}),
                **{attempt.uid: attempt.world_size for attempt in self.state.attempts},
            },
            lineage=tuple(self.state.lineage()),
            offers=offers,
            struck={**struck, **striking},
            taints=self.state.taints,
            readies=len(self.state.readies),
            sworn={source: self.source_digests} if source is not None and held else {},
        )
