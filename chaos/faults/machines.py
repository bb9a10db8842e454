"""Faults of whole machines: power that fails, and memory that somebody else has filled. Both take root."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from toprope.chaos.faults.injector import Base, NotFiredError
from toprope.chaos.live.processes import LiveError, wait_until
from toprope.store.errors import UsageError

_READY_S = 30.0
_CANARY = "not-synced"
_SLOTS = 3


class Power(Base):
    """Lets the power of all fail as soon as a step was said to be READY: disks forget what was not synced.

    All processes die and all memory is gone. Takes ``topology.disk_mib``.
    """

    _said = ""

    def strike(self) -> None:
        """Wait for a step to become READY, kill all, and let disks forget."""
        site, topology = self.site, self.site.scenario.topology
        if topology.launcher != "own":
            raise UsageError(
                f"power: who starts the ranks again must outlive it: not with launcher = {topology.launcher!r}"
            )
        if not topology.disk_mib or topology.store != "directory":
            raise UsageError(
                "power: the disks must be a scenario's own: give topology.disk_mib, with store = 'directory'"
            )
        before = site.ready_step()
        try:
            wait_until(lambda: site.ready_step() > before, what="a step becomes READY", timeout_s=_READY_S)
        except LiveError as error:
            raise NotFiredError("no step became READY, so there was no moment for it") from error
        disks = {name: site.cluster.nodes[name].local_dir for name in sorted(site.cluster.nodes)}
        disks["the store"] = site.cluster.store
        for target in ("coordinator", "broker"):
            running = site.service(target)
            assert running is not None
            running.kill()
            site.down.add(target)
        killed = 2 + sum(len(site.kill_node(name, keep_disk=True)) for name in sorted(site.cluster.nodes))
        forgotten = [self._forget(name, disk) for name, disk in disks.items()]
        self._said = f"{killed} processes were killed; {'; '.join(forgotten)}" * all(forgotten)

    def _forget(self, name: str, disk: Path) -> str:
        """Let a disk forget; return what shows that it did, or nothing."""
        before = _files(disk)
        (disk / _CANARY).write_bytes(bytes(4096))
        self.site.cluster.mounts.cut_power(disk)
        after = _files(disk)
        if _CANARY in after:
            return ""
        return f"{name}: of {len(before)} files {len(before & after)} are left, and none of one that was not synced"

    def mend(self) -> None:
        """Start all services again; ranks come back with their world."""
        self.site.start_all()
        self.site.down -= {f"node {name}" for name in self.site.scenario.topology.nodes}

    def witness(self) -> str:
        """Return what was killed, and how many files were forgotten."""
        return self._said


def _files(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


class Fill(Base):
    """Kills a node and fills the memory of the one that takes its place: a shard can be restored there, none saved.

    Takes ``topology.memory_mib``.
    """

    _said = ""
    _filler: Path | None = None

    def strike(self) -> None:
        """Kill it, start it again, and take its memory but for one shard and a half."""
        site = self.site
        kind, _, name = self.fault.target.partition(" ")
        if kind != "node" or not site.scenario.topology.memory_mib:
            raise UsageError("fill: give a node as target, and topology.memory_mib: its memory must be its own")
        if name not in site.cluster.nodes:
            raise NotFiredError(f"{self.fault.target} is not there")
        memory = site.cluster.nodes[name].memory_dir
        size = max((path.stat().st_size for path in memory.glob(f"{site.job}/slots/rank-*/*.data")), default=0)
        if not size:
            raise NotFiredError(f"{self.fault.target} has no slots, so it is not known what would not fit")
        killed = site.kill_node(name)
        site.start(self.fault.target)
        self._filler = memory / "of-somebody-else"
        room = _free(memory) - size * _SLOTS // 2
        if room <= 0:
            raise NotFiredError("its memory is too small")
        taken = _take(self._filler, room)
        refused = _refusal(memory / "more", size * _SLOTS)
        statuses = ", ".join(f"{what} ended with status {status}" for what, status in killed.items())
        self._said = f"{statuses}; {taken} bytes of its memory are taken, {size * _SLOTS} more: {refused}" * bool(
            refused
        )

    def mend(self) -> None:
        """Give the memory back."""
        if self._filler is not None:
            self._filler.unlink(missing_ok=True)

    def witness(self) -> str:
        """Return how the node ended, what was taken, and how the system refuses what slots would take."""
        return self._said


def _free(directory: Path) -> int:
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize


def _take(path: Path, size: int) -> int:
    with path.open("wb") as stream:
        os.posix_fallocate(stream.fileno(), 0, size)
    return size


def _refusal(path: Path, size: int) -> str:
    """Return why so many bytes can't be had; empty if they can."""
    try:
        _take(path, size)
    except OSError as error:
        return os.strerror(error.errno or 0) if error.errno == errno.ENOSPC else ""
    else:
        return ""
    finally:
        path.unlink()
