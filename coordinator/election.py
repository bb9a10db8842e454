"""When a coordinator that follows claims a term of its own. Pure.

Who leads is in the log: the coordinator that was elected last, commands in passing aside. A follower reads the log to
its end, asks that one how it is, and hears its presence; it claims a term when there is nobody to wait for, or when
neither has answered for a while. That a leader answers counts only while it reads the log itself, or one that is cut
off from the store would keep all others from taking its place; and silence counts only while this one reads the log.
Two who claim at once cost a slot of the log: the second finds another term than it claimed on, and follows.
"""

from __future__ import annotations

from dataclasses import dataclass

from toprope.coordinator.wire import Health
from toprope.store.log.fold import JobState
from toprope.store.log.records import Elected

PATIENCE_S = 5.0
JITTER = 0.4
"""So much of its patience, at most, one waits longer than another."""
REFUSED = 0.2
"""So much of its patience one waits where the leader's host says that nobody serves at its address."""
SHORT_REIGN_S = 60.0
PATIENCE_S_MAX = 60.0
UNREAD_S = 20.0
"""A leader that has not read the log for so long is as good as silent."""


def patience_after(before_s: float, *, reigned_s: float, at_first_s: float) -> float:
    """Return the patience of one that was fenced: two that can't hear each other must not take turns for ever."""
    return min(before_s * 2, PATIENCE_S_MAX) if reigned_s < SHORT_REIGN_S else at_first_s


@dataclass(slots=True, kw_only=True)
class Election:
    """What a follower knows of the leader. ``url`` is its own; it waits ``patience_s``, its own jitter included."""

    url: str
    patience_s: float
    state: JobState
    heard_s: float
    refused_s: float | None = None

    @property
    def asks(self) -> bool:
        """Say whether there is a leader to ask."""
        return self.state.url not in ("", self.url)

    def read(self, state: JobState, *, now_s: float) -> None:
        """Take in the log as it is now: that somebody was elected is word of him."""
        if state.term != self.state.term and not state.passing:
            self._heard(now_s)
        self.state = state

    def unread(self, *, now_s: float) -> None:
        """Take in that the log could not be read: nobody could be elected, and the leader may be as badly off."""
        self._heard(now_s)

    def answered(self, health: Health, *, now_s: float) -> None:
        """Take in what a coordinator says of itself."""
        leads = health.role == "leader" and (health.job_uid, health.url) == (self.state.job_uid, self.state.url)
        if leads and health.log_s < UNREAD_S:
            self._heard(now_s)

    def refused(self, *, now_s: float) -> None:
        """Take in that nobody serves at the leader's address."""
        self.refused_s = now_s if self.refused_s is None else self.refused_s

    def silent(self) -> None:
        """Take in that the leader did not answer."""
        self.refused_s = None

    def _heard(self, now_s: float) -> None:
        self.heard_s, self.refused_s = now_s, None

    def reason(self, *, now_s: float) -> str:
        """Return why a term is to be claimed now; empty: it is not."""
        state = self.state
        if not state.url:
            return "no coordinator leads this job"
        if state.url == self.url:
            return f"the coordinator of term {state.term} served here, and it is gone"
        if self.refused_s is not None and now_s - self.refused_s >= REFUSED * self.patience_s:
            return f"nobody serves at {state.url} any more, where the coordinator of term {state.term} did"
        silent_s = now_s - self.heard_s
        if silent_s < self.patience_s:
            return ""
        return f"the coordinator of term {state.term} at {state.url} has given no sign of life for {silent_s:.1f} s"

    def claim(self, now: JobState) -> Elected | None:
        """Return the record that claims a term in this log; None when another was elected since the log was read."""
        return Elected(url=self.url) if now.term == self.state.term else None
