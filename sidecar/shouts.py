"""Says loudly what costs protection: counted each time, logged at most every ten seconds for each kind."""

from __future__ import annotations

import logging
import time

from toprope.sidecar import metrics
from toprope.sidecar.values import Alarm

QUIET_S = 10.0

log = logging.getLogger("toprope.sidecar")


class Shouts:
    """Remembers what was said when."""

    def __init__(self) -> None:
        self._said_at_s: dict[str, float] = {}
        self._unsaid: dict[str, int] = {}

    def shout(self, kind: Alarm, text: str) -> None:
        """Count an event of this kind, and log it unless one of its kind was just logged."""
        metrics.SHOUTS.labels(kind=kind).inc()
        now_s = time.monotonic()
        if now_s - self._said_at_s.get(kind, -QUIET_S) < QUIET_S:
            self._unsaid[kind] = self._unsaid.get(kind, 0) + 1
            return
        self._said_at_s[kind] = now_s
        unsaid = self._unsaid.pop(kind, 0)
        log.warning("%s: %s%s", kind, text, f" (and {unsaid} more since the last)" if unsaid else "")
