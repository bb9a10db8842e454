"""The slots that a sidecar has lent to this process: locked once, mapped once, used in the order in which they come."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from toprope.trainer_hooks.image.shard import MappedFile
from toprope.trainer_hooks.link import wire
from toprope.trainer_hooks.link.slot import lock_holder

_locks: dict[tuple[int, int, int], int] = {}
"""Lock files by process, device and inode, each with its only descriptor: closing any other would lose the lock."""
_locking = threading.RLock()
_LOOK_S = 0.1


class SlotLockedError(Exception):
    """Another process holds the lock of a slot that was lent to this one."""


def hold_lock(path: Path) -> None:
    """Take the record lock of a slot, for the life of the process. Taken twice, it is taken once.

    Raises:
        SlotLockedError: another process has it.
        OSError: the file can't be opened.
    """
    with _locking:
        key = _key(path)
        if key in _locks:
            return
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            os.close(descriptor)  # this process holds no lock of the file that closing could lose
            raise SlotLockedError(f"{path}: another process holds the lock of this slot") from error
        _locks[key] = descriptor


def drop_lock(path: Path) -> None:
    """Let go of the record lock of a slot that this process will write to no more.

    Raises:
        OSError: the file is gone.
    """
    with _locking:
        descriptor = _locks.pop(_key(path), None)
        if descriptor is not None:
            os.close(descriptor)


def _key(path: Path) -> tuple[int, int, int]:
    """Return what a lock of this process goes by: a forked child holds none of its parent's."""
    status = path.stat()
    return os.getpid(), status.st_dev, status.st_ino


def hold_until_taken(kept: Path) -> None:
    """Drop the lock of a slot once another process holds that of another one beside it; not if this one does again.

    A slot that the sidecar has removed is nobody's.
    """
    while kept.exists():
        with _locking:
            others = [path for path in kept.parent.glob("slot-*.lock") if path != kept]
            if any(map(_is_ours, others)):
                return  # to look at our own would lose it
            if any(map(_is_held, others)):
                with contextlib.suppress(FileNotFoundError):
                    drop_lock(kept)
                return
        time.sleep(_LOOK_S)


def _is_ours(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):  # the sidecar has removed the slot
        return _key(path) in _locks
    return False


def _is_held(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):  # as above
        return lock_holder(path) is not None
    return False


@dataclass(frozen=True, slots=True)
class Grant:
    """A slot that may be filled once, with its mapping."""

    slot: wire.Slot
    target: MappedFile


class LentSlots:
    """Grants in the order in which they came, and what was sealed and not yet known to have arrived."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._free: deque[Grant] = deque()
        self._targets: dict[str, MappedFile] = {}
        self._sealed: dict[int, wire.Sealed] = {}
        self._locked: set[Path] = set()
        self._locked_by_others: list[wire.Slot] = []

    def lend(self, slot: wire.Slot) -> None:
        """Take a grant: lock and map the slot, then make it available.

        Raises:
            SlotLockedError: another process has its lock; it is tried again when a slot is taken.
            OSError: its files can't be opened or mapped.
        """
        with self._mutex:
            self._locked_by_others = [one for one in self._locked_by_others if one.slot != slot.slot]
        try:
            hold_lock(Path(slot.lock_path))
        except SlotLockedError:
            with self._mutex:
                self._locked_by_others.append(slot)
            raise
        target = self._mapped(Path(slot.path))
        with self._mutex:
            self._locked.add(Path(slot.lock_path))
            sealed = self._sealed.get(slot.slot)
            if sealed is not None and sealed.seq != slot.seq:
                del self._sealed[slot.slot]  # the sidecar has gone on: it got that frame
            self._free = deque(grant for grant in self._free if grant.slot.slot != slot.slot)
            self._free.append(Grant(slot, target))

    def _mapped(self, path: Path) -> MappedFile:
        status = path.stat()
        known = self._targets.get(str(path))
        if known is None or (known.inode, known.bytes) != (status.st_ino, status.st_size):
            # a mapping keeps the memory of a file that was removed
            self._targets = {name: target for name, target in self._targets.items() if Path(name).exists()}
            known = self._targets[str(path)] = MappedFile(path)
        return known

    def forget(self) -> None:
        """Drop the grants of a connection that has ended; one that is being filled was taken and stays."""
        with self._mutex:
            self._free.clear()
            self._locked_by_others.clear()

    def hand_over(self) -> None:
        """Let another process of this rank have the slots: nothing is being written, nor will be from here.

        One lock is kept until the other process has one, so that at each moment a lock says that this world lives.
        """
        self.forget()
        with self._mutex:
            self._targets.clear()
            locked = sorted(path for path in self._locked if path.exists())  # the sidecar may have removed a slot
            self._locked.clear()
        for path in locked[1:]:
            with contextlib.suppress(FileNotFoundError):
                drop_lock(path)
        if locked:
            held = threading.Thread(target=hold_until_taken, args=locked[:1], name="toprope-hand-over", daemon=True)
            held.start()

    def take(self) -> Grant | None:
        """Return the oldest grant, which is now the caller's; None when there is none."""
        for slot in tuple(self._locked_by_others):
            with contextlib.suppress(SlotLockedError, OSError):
                self.lend(slot)
        with self._mutex:
            return self._free.popleft() if self._free else None

    def give_back(self, grant: Grant) -> None:
        """Return a grant that was not written to."""
        with self._mutex:
            self._free.appendleft(grant)

    def note_sealed(self, sealed: wire.Sealed) -> None:
        """Remember a sealed slot until the sidecar lends it again."""
        with self._mutex:
            self._sealed[sealed.slot] = sealed

    def unconfirmed(self) -> tuple[wire.Sealed, ...]:
        """Return what a new connection must be told again."""
        with self._mutex:
            return tuple(sorted(self._sealed.values(), key=lambda sealed: sealed.step))
