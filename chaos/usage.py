"""What services use while they live: open files and memory, when warm and last, of the longest life of each."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from toprope.chaos.evidence import Use

WARM_AFTER_S = 300.0
"""A service is warm after so long, once it has done all that it does for the first time: sidecars grow by a MiB in
their fifth minute, once, when Python's table of interned strings, such as parts of paths, becomes twice as large.
In a shorter run one that was there at the first READY is warm then."""


@dataclass(frozen=True, slots=True)
class Used:
    """How many files a process has open, and its resident bytes without the shared memory that it maps: snapshots."""

    open_files: int
    resident_bytes: int


def used_by(pid: int) -> Used | None:
    """Return what a process uses now, or None when it is gone."""
    try:
        open_files = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - only their number is asked for
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    kb = {name: int(rest.split()[0]) for name, _, rest in _fields(status) if name in {"RssAnon", "RssFile"}}
    return Used(open_files, 1024 * sum(kb.values()))


def _fields(status: str) -> Iterable[tuple[str, str, str]]:
    return (line.partition(":") for line in status.splitlines())


@dataclass(slots=True)
class _Life:
    """One process: since when it is known, what it used when warm, and what it used when it was seen last."""

    since_s: float
    is_old: bool = False
    warm_s: float = 0.0
    last_s: float = 0.0
    warm: Used | None = None
    last: Used | None = None


@dataclass(slots=True)
class Usage:
    """Follows what services use; each process that stands in for another is a life of its own."""

    _lives: dict[tuple[str, int], _Life] = field(default_factory=dict)
    _is_first_ready: bool = True

    def look(self, pids: Mapping[str, int], *, now_s: float, is_ready: bool) -> None:
        """Note what these processes use now; ``is_ready``: some step is READY."""
        for target, pid in pids.items():
            used = used_by(pid)
            if used is None:
                continue
            life = self._lives.setdefault((target, pid), _Life(now_s))
            is_old = now_s - life.since_s >= WARM_AFTER_S
            if is_ready and ((is_old and not life.is_old) or self._is_first_ready):
                life.warm, life.warm_s, life.is_old = used, now_s, is_old
            life.last, life.last_s = used, now_s
        self._is_first_ready = self._is_first_ready and not is_ready

    def of_the_longest(self) -> tuple[Use, ...]:
        """Return, for each service that was warm once, what its longest warm life used at its beginning and end."""
        longest: dict[str, _Life] = {}
        for (target, _), life in self._lives.items():
            known = longest.get(target)
            if life.warm is not None and (known is None or life.last_s - life.warm_s > known.last_s - known.warm_s):
                longest[target] = life
        return tuple(
            Use(
                process=target,
                seconds=round(life.last_s - life.warm_s, 1),
                open_files=(life.warm.open_files, life.last.open_files),
                resident_bytes=(life.warm.resident_bytes, life.last.resident_bytes),
            )
            for target, life in longest.items()
            if life.warm is not None and life.last is not None
        )
