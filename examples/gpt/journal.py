"""What a rank did and when: one JSON line an event, appended to ``<out>/rank-<r>.jsonl`` over all restarts."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path


class Journal:
    """Appends events; each carries the process id and the machine's monotonic clock in seconds."""

    def __init__(self, out: Path, *, rank: int) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(out / f"rank-{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        self._rank = rank

    def write(self, event: str, **values: object) -> None:
        """Append one event. One write call a line: a kill leaves whole lines, or a last line that is cut."""
        line = {"event": event, "rank": self._rank, "pid": os.getpid(), "monotonic_s": time.monotonic(), **values}
        os.write(self._descriptor, json.dumps(line).encode() + b"\n")
