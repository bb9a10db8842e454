"""What a process takes of the machine, seen from outside."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

_LOOKS = 7
_BETWEEN_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Memory of its own (no shared memory, no mapped file), open files and threads."""

    own_bytes: int
    files: int
    threads: int


def footprint(pid: int) -> Footprint:
    """Return the least of a few looks, so that what is open for a moment does not count."""
    looks = []
    for _ in range(_LOOKS):
        looks.append(_look(Path("/proc") / str(pid)))
        time.sleep(_BETWEEN_S)
    return Footprint(
        own_bytes=min(one.own_bytes for one in looks),
        files=min(one.files for one in looks),
        threads=min(one.threads for one in looks),
    )


def _look(process: Path) -> Footprint:
    fields = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines() if ":" in line)
    return Footprint(
        own_bytes=int(fields["RssAnon"].split()[0]) * 1024,
        files=len(list((process / "fd").iterdir())),
        threads=int(fields["Threads"]),
    )


def used_bytes(directory: Path) -> int:
    """Return what all files under a directory take."""
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())
