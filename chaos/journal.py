"""What the ranks of ``examples/gpt`` wrote about themselves: journals while they run, digests at the end."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a rank's journal. ``step`` is 0 where the event has none."""

    event: str
    rank: int
    pid: int
    monotonic_s: float
    step: int = 0
    loss: float | None = 0.0
    """None: it was no finite number."""
    error: str = ""
    world: int = 0
    restored: tuple[dict[str, Any], ...] = ()
    took_s: float = 0.0
    """Of a step: how long its ``end_step`` took."""
    queued_s: float = 0.0
    """Of that: how long its thread was ready to run and no processor was free."""
    saved: bool = False
    """Of a step: whether a snapshot of it was taken."""


class Final(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a rank at its last step, as SHA-256 of weights, optimizer, RNG streams and position."""

    rank: int
    world: int
    step: int
    digests: dict[str, str]


class JournalReader:
    """Follows the journals of all ranks in a directory."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._offsets: dict[Path, int] = {}
        self._newest = 0
        self.events: list[Event] = []

    def read(self) -> list[Event]:
        """Return the events that are new since the last call, in order of time; ``events`` holds all."""
        new = [event for path in sorted(self._out.glob("rank-*.jsonl")) for event in self._read(path)]
        new.sort(key=lambda event: event.monotonic_s)
        self.events += new
        self._newest = max([self._newest, *(event.step for event in new if event.event == "step")])
        return new

    def newest_step(self) -> int:
        """Return the newest step that any rank has ended."""
        return self._newest

    def _read(self, path: Path) -> list[Event]:
        with path.open("rb") as stream:
            stream.seek(self._offsets.get(path, 0))
            whole, newline, _ = stream.read().rpartition(b"\n")
        self._offsets[path] = self._offsets.get(path, 0) + len(whole) + len(newline)
        return [msgspec.json.decode(line, type=Event) for line in whole.splitlines() if line]


def read_finals(out: Path) -> tuple[Final, ...]:
    """Return the final digests that the ranks left, in order of rank."""
    finals = [msgspec.json.decode(path.read_bytes(), type=Final) for path in out.glob("final-rank-*.json")]
    return tuple(sorted(finals, key=lambda final: final.rank))


def intervals_s(events: Iterable[Event]) -> list[float]:
    """Return the times between the ends of any two successive steps of a process."""
    ended: dict[int, list[float]] = {}
    for event in events:
        if event.event == "step":
            ended.setdefault(event.pid, []).append(event.monotonic_s)
    return [after - before for times in ended.values() for before, after in pairwise(times)]
