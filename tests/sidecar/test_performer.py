"""In which order the sidecar's shell does what the core wants done."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

from tests.sidecar.test_config import config
from tests.sidecar.test_draining import alone, left
from tests.support.core_driver import Driver, shard

from toprope.coordinator.wire import Desired
from toprope.sidecar import effects as do
from toprope.sidecar import events as on
from toprope.sidecar.performer import Sidecar
from toprope.sidecar.ports import CoordinatorError
from toprope.sidecar.values import Shard
from toprope.trainer_hooks.link.slot import Page, SlotPaths, slot_paths


class SlowMemory:
    """A memory in which emptying a slot takes longer than lending it, unless lending waits its turn."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self._lent = threading.Event()

    def empty(self, slot: int, page: Page) -> None:
        """Empty a slot, after it was lent if that comes."""
        self._lent.wait(0.2)
        self.done.append(f"emptied {slot} at {page.seq}")

    def lend(self, slot: int, page: Page, *, check_lock: bool) -> str | None:
        """Lend a slot."""
        assert not check_lock
        self.done.append(f"lent {slot} at {page.seq}")
        self._lent.set()
        return None

    def slot(self, _rank: int, number: int) -> SlotPaths:
        """Return the files of a slot."""
        return slot_paths(config().memory_dir, number)


class LendingCore:
    """Wants a slot emptied and lent at once."""

    def handle(self, _event: object) -> tuple[do.Effect, ...]:
        """Want both."""
        return (
            do.EmptySlot(slot=4, page=Page(seq=1)),
            do.GrantSlot(connection=1, slot=4, page=Page(seq=2), capacity=100, check_lock=False),
        )


def parts_of(core: object, memory: object = None) -> Any:  # noqa: ANN401 - a fake of Parts
    """Return the parts of a sidecar of which only some are ever used."""
    ports = SimpleNamespace(peers=None, objects=None, coordinator=None, broker=None)
    return SimpleNamespace(core=core, memory=memory, ports=ports)


def test_a_slot_is_lent_after_its_page_was_emptied_and_not_before() -> None:
    memory = SlowMemory()

    async def serve() -> None:
        async with asyncio.timeout(5.0), asyncio.TaskGroup() as tasks:
            parts = parts_of(LendingCore(), memory)
            sidecar = Sidecar(config(), parts, tasks)
            sidecar.post(on.Tick(now_s=0.0))

    asyncio.run(serve())
    assert memory.done == ["emptied 4 at 1", "lent 4 at 2"], "else EMPTY is written over what the trainer writes"


class FullMemory:
    """A memory in which what is given up goes slowly, unless slots are made meanwhile."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self._made = threading.Event()

    def _free(self, what: str) -> None:
        self._made.wait(0.1)
        self.done.append(what)

    def drop_staged(self, *, keep: str) -> None:
        """Delete staged files."""
        self._free(f"staged but for {keep!r}")

    def remove_slots(self, rank: int, _numbers: tuple[int, ...]) -> None:
        """Delete slots."""
        self._free(f"slots of {rank}")

    def remove_spares(self, rank: int, _numbers: tuple[int, ...]) -> None:
        """Delete spares."""
        self._free(f"spares of {rank}")

    def make_slots(self, rank: int, _numbers: tuple[int, ...], _size: int) -> None:
        """Make slots."""
        self.done.append(f"made for {rank}")
        self._made.set()

    def look(self, _rank: int, *, known: tuple[int, ...]) -> tuple[()]:
        """Look at slots."""
        assert not known
        return ()


class GivingUpCore:
    """Wants all that can be given up, and slots in its room."""

    def handle(self, event: object) -> tuple[do.Effect, ...]:
        """Want it at the first tick."""
        if not isinstance(event, on.Tick):
            return ()
        return (
            do.DropStage(keep=""),
            do.RemoveSpares(rank=1, spares=(0,)),
            do.RemoveSlots(rank=0, slots=(0, 1, 2)),
            do.MakeSlots(rank=0, slots=(3, 4, 5), bytes=100),
        )


def test_slots_are_made_once_all_that_is_given_up_for_them_is_gone() -> None:
    memory = FullMemory()

    async def serve() -> None:
        async with asyncio.timeout(5.0), asyncio.TaskGroup() as tasks:
            Sidecar(config(), parts_of(GivingUpCore(), memory), tasks).post(on.Tick(now_s=0.0))

    asyncio.run(serve())
    assert memory.done == ["staged but for ''", "spares of 1", "slots of 0", "made for 0"], "else there is no room yet"


class Leftovers:
    """Two peer copies in memory that take long to read, and the coordinator; says what was turned to in which order."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.asked = threading.Event()

    def drop_staged(self, *, keep: str) -> None:
        """Delete staged files: there are none."""

    def slot_ranks(self) -> tuple[int, ...]:
        """Return the ranks that have slots: none."""
        return ()

    def spares(self) -> tuple[tuple[int, int], ...]:
        """Return the spares of rank 1."""
        return ((1, 0), (1, 1))

    def check_spare(self, rank: int, number: int) -> Shard:
        """Read a copy, unless the coordinator is asked meanwhile."""
        self.asked.wait(0.1)
        self.done.append(f"spare {number}")
        return shard(number + 1, rank=rank)

    async def get_desired(self, *, newer_than: Desired | None) -> Desired:
        """Have no answer."""
        assert newer_than is None
        self.done.append("asked")
        self.asked.set()
        raise CoordinatorError("no coordinator")


def test_the_coordinator_is_asked_once_all_peer_copies_were_read_and_not_before() -> None:
    leftovers = Leftovers()

    async def serve() -> None:
        async with asyncio.timeout(5.0), asyncio.TaskGroup() as tasks:
            parts = parts_of(Driver().core, leftovers)
            parts.ports.coordinator = leftovers
            parts.local = SimpleNamespace(sweep=list, scan=lambda: iter(()))
            parts.adoptions = SimpleNamespace(read=on.AdoptionsRead)
            sidecar = Sidecar(config(), parts, tasks)
            await sidecar.adopt()
            sidecar.post(on.Tick(now_s=0.0))
            await asyncio.to_thread(leftovers.asked.wait, 2.0)

    asyncio.run(serve())
    assert leftovers.done == ["spare 0", "spare 1", "asked"], "else a copy that was not read yet is pulled over"


def test_a_sidecar_that_is_told_to_end_serves_until_what_it_holds_was_heard() -> None:
    driver = alone()
    assert left(driver) == "", "there is nothing else to see to"

    async def serve() -> None:
        async with asyncio.TaskGroup() as tasks:
            sidecar = Sidecar(config(grace_s=20.0), parts_of(driver.core), tasks)
            sidecar.drain()
            soon_s = asyncio.get_running_loop().time() + 5.0
            sidecar._look_at_grace(soon_s)
            assert not sidecar.stop.is_set()
            sidecar.documents._told = driver.core.published
            sidecar._look_at_grace(soon_s)
            assert sidecar.stop.is_set()

    asyncio.run(serve())
