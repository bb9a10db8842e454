"""A node's shared memory: slots, spares and staged files as byte arrays, with pages and locks. Lost with the node.

It stands for ``toprope.sidecar.memory`` (files in a tmpfs, mapped), which is tied to the kernel. Its rules are the
same: a slot's page is re-read after hashing, a removed file lives on in who has it mapped, a lock dies with its
process. Hashing and copying take two halves with time between them, so that whoever writes meanwhile is seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from toprope.chaos.sim.loop import Process
from toprope.sidecar.values import SlotSight
from toprope.trainer_hooks.link.slot import Page


@dataclass(slots=True, eq=False)
class File:
    """Bytes with a control page. ``lock`` is the process that may write; ``flipped``: a bit was changed on purpose."""

    data: bytearray
    page: Page = field(default_factory=Page)
    lock: Process | None = None
    flipped: bool = False

    def holder(self) -> Process | None:
        """Return the living process that holds the lock."""
        return self.lock if self.lock is not None and self.lock.alive else None


class SimMemory:
    """The memory of one node in one life of its machine; ``boot_id`` names it."""

    def __init__(self, boot_id: str) -> None:
        self.boot_id = boot_id
        self.slots: dict[tuple[int, int], File] = {}
        self.spares: dict[tuple[int, int], File] = {}
        self.staged: dict[tuple[str, int], File] = {}

    def look(self, rank: int) -> tuple[SlotSight, ...]:
        """Return a rank's slots as they lie there."""
        return tuple(
            SlotSight(slot=number, capacity=len(file.data), page=file.page, lock_held=file.holder() is not None)
            for (of_rank, number), file in sorted(self.slots.items())
            if of_rank == rank
        )

    def ranks(self) -> list[int]:
        """Return the ranks that have slots."""
        return sorted({rank for rank, _ in self.slots})

    def at(self, path: str) -> File | None:
        """Return the file that a path names."""
        kind, _, rest = path.partition(":")
        first, _, second = rest.rpartition(":")
        match kind:
            case "slot":
                return self.slots.get((int(first), int(second)))
            case "spare":
                return self.spares.get((int(first), int(second)))
            case "stage":
                return self.staged.get((first, int(second)))
            case _:
                return None

    def files(self) -> Iterator[File]:
        """Yield all files that hold verified copies."""
        yield from (file for _, file in sorted(self.slots.items()))
        yield from (file for _, file in sorted(self.spares.items()))


def slot_path(rank: int, number: int) -> str:
    """Return the name of a slot's data."""
    return f"slot:{rank}:{number}"


def spare_path(rank: int, number: int) -> str:
    """Return the name of a spare's data."""
    return f"spare:{rank}:{number}"


def stage_path(attempt_uid: str, rank: int) -> str:
    """Return the name of a staged shard."""
    return f"stage:{attempt_uid}:{rank}"
