"""Faults of a link, done by the proxy that stands before it."""

from __future__ import annotations

import time

from toprope.chaos.faults.injector import Base
from toprope.chaos.live.proxy import MODES, done, tell
from toprope.store.errors import UsageError

LINKS = ("broker", "store")


class Network(Base):
    """Lets the proxy before the ``broker`` or the ``store`` misbehave: ``how.mode`` and, for some, ``how.amount``."""

    def strike(self) -> None:
        """Tell the proxy."""
        mode = self.word("mode", "cut")
        if self.fault.target not in LINKS or self.fault.target not in self.site.proxies:
            raise UsageError(f"network: target {self.fault.target!r}: give broker, or store with topology.store = 's3'")
        if mode not in MODES:
            raise UsageError(f"network: mode {mode!r}: give one of {', '.join(MODES)}")
        self._file = self.site.proxies[self.fault.target]
        self._since_s = time.monotonic()
        tell(self._file, " ".join(filter(None, (mode, self.word("amount"), self.word("way")))))

    def mend(self) -> None:
        """Let it carry all again."""
        tell(self._file, "pass")

    def witness(self) -> str:
        """Return what the proxy did first, and how much."""
        seen = [text for at_s, text in done(self._file.with_suffix(".log")) if at_s >= self._since_s]
        return f"{seen[0]}, {len(seen)} times in all" if seen else ""
