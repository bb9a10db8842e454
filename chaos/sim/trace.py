"""What happened, in order: a digest of all of it, and the last of it as a story for people."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

from toprope.chaos.sim.loop import PROCESS

Edge: TypeAlias = Literal["begins", "ends", "fails"]
STORY_LINES = 25
_KEPT = 4000


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that happened; ``step`` is that of the checkpoint that it touched, 0 for none."""

    at_s: float
    who: str
    text: str
    step: int

    def __str__(self) -> str:
        return f"{self.at_s:9.3f}  {self.who:<12} {self.text}"


@dataclass(frozen=True, slots=True)
class Mark:
    """A process enters a phase of the way of a shard, or leaves it. ``about``: attempt uid, step and rank."""

    at_s: float
    who: str
    phase: str
    edge: Edge
    about: tuple[str, int, int]


class Trace:
    """Takes notes. ``counts`` are the things that must happen sometimes, or the search is worth little.

    ``on_mark`` hears when a phase begins and ends; a process that dies in it ends none.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.counts: Counter[str] = Counter()
        self.on_mark: Callable[[Mark], None] = lambda _: None
        self.now_s = now_s
        self._hash = hashlib.sha256()
        self._lines: deque[Line] = deque(maxlen=_KEPT)

    def note(self, who: str, text: str, *, step: int = 0) -> None:
        """Note what happened."""
        line = Line(self.now_s(), who, text, step)
        self._hash.update(f"{line.at_s:.6f} {who} {text}\n".encode())
        self._lines.append(line)

    def sometimes(self, what: str) -> None:
        """Count something that a good search reaches."""
        self.counts[what] += 1

    @contextmanager
    def phase(self, phase: str, about: tuple[str, int, int]) -> Iterator[None]:
        """Mark what happens in the context as a phase."""
        self.mark(phase, "begins", about)
        try:
            yield
        except BaseException:
            self.mark(phase, "fails", about)
            raise
        self.mark(phase, "ends", about)

    def mark(self, phase: str, edge: Edge, about: tuple[str, int, int]) -> None:
        """Mark an edge of a phase."""
        process = PROCESS.get()
        self.on_mark(Mark(self.now_s(), process.name if process is not None else "", phase, edge, about))

    def digest(self) -> str:
        """Return a digest of all notes."""
        return self._hash.hexdigest()

    def story(self, step: int) -> list[str]:
        """Return the last things that touched a step, or that happened at all when nothing did."""
        about = [line for line in self._lines if line.step in {step, 0}] if step else list(self._lines)
        return [str(line) for line in about[-STORY_LINES:]]
