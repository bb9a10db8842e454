"""How much memory slots and peer copies need, how much there is, and what to say when it does not fit."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from toprope.sidecar.peer_book import SPARES_PER_RANK
from toprope.sidecar.slot_book import SLOTS_PER_RANK
from toprope.store.sizes import KIBI, size_text

CONTAINER_SHM_BYTES = 64 * 1024 * 1024
_UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What there is: free in the file system of the memory directory, in the cgroup, and in the machine."""

    directory: Path
    directory_total: int
    directory_free: int
    cgroup_free: int
    machine_free: int

    @property
    def available(self) -> int:
        """Return what can be used: the least of the three."""
        return min(self.directory_free, self.cgroup_free, self.machine_free)


def needed_bytes(*, state_size: int, ranks: int, copies: int) -> int:
    """Return what a node needs for its own slots and for as many copies of other nodes' ranks."""
    return state_size * ranks * (SLOTS_PER_RANK + SPARES_PER_RANK * copies)


def why_too_little(room: Room, needed: int, *, what: str) -> str | None:
    """Return one line that says what is needed and what there is, or None when it fits."""
    if needed <= room.available:
        return None
    limits = {
        f"free in {room.directory}": room.directory_free,
        "left of the cgroup's memory limit": room.cgroup_free,
        "available on the machine": room.machine_free,
    }
    least = min(limits, key=lambda name: limits[name])
    return f"{what}: {_exactly(needed)} of memory needed, {_exactly(limits[least])} {least}. {_advice(room)}"


def _advice(room: Room) -> str:
    """Return what to do about too little room."""
    if room.directory_total <= CONTAINER_SHM_BYTES:
        return (
            f"{room.directory} holds {_exactly(room.directory_total)} in all "
            "(containers get 64 MiB unless told otherwise): "
            "give it more with --shm-size, or an emptyDir with medium: Memory"
        )
    if room.available == room.directory_free:
        return "Give a --memory-dir in a larger tmpfs"
    if room.available == room.cgroup_free:
        return "Raise the memory limit of the container"
    return "Run fewer ranks on this machine, or end what else uses its memory"


def measure(directory: Path, *, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> Room:
    """Return the room there is now; where the directory is not made yet, the room that it would have."""
    stat = os.statvfs(_existing(directory))
    return Room(
        directory=directory,
        directory_total=stat.f_blocks * stat.f_frsize,
        directory_free=stat.f_bavail * stat.f_frsize,
        cgroup_free=_cgroup_free(cgroup),
        machine_free=_machine_free(proc),
    )


def _existing(directory: Path) -> Path:
    """Return the directory, or the nearest above it that is there."""
    for path in (directory, *directory.parents):
        with contextlib.suppress(OSError):
            path.stat()
            return path
    return Path("/")


def _cgroup_free(cgroup: Path) -> int:
    """Return what is left of the memory limit of this container (cgroup v2, then v1); file cache counts as free."""
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            text = (cgroup / limit).read_text().strip()
            used = int((cgroup / usage).read_text())
            cache = _inactive_file(cgroup / Path(limit).parent / "memory.stat")
        except OSError:
            continue
        return _UNLIMITED if text == "max" or int(text) >= _UNLIMITED else max(0, int(text) - used + cache)
    return _UNLIMITED


def _inactive_file(stat: Path) -> int:
    rows = dict(line.split() for line in stat.read_text().splitlines())
    return int(rows.get("total_inactive_file", rows.get("inactive_file", "0")))


def _machine_free(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _UNLIMITED


def _exactly(count: int) -> str:
    return f"{count} bytes" if count < KIBI else f"{size_text(count)} ({count} bytes)"
