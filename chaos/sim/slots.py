"""The slots of one simulated sidecar: made, lent out and hashed, in two halves with time between them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from toprope.chaos.sim.copies import WrongError, check_header
from toprope.chaos.sim.memory import File, slot_path
from toprope.sidecar import effects as do
from toprope.sidecar import events as on
from toprope.sidecar.values import Shard, shard_of_page
from toprope.store.digest import digest
from toprope.trainer_hooks.link import wire
from toprope.trainer_hooks.link.slot import Page, SlotState

if TYPE_CHECKING:
    from toprope.chaos.sim.sidecar import SimSidecar


class Slots:
    """What a sidecar does with slots."""

    def __init__(self, car: SimSidecar) -> None:
        self._car, self._world, self._node, self._memory = car, car.world, car.node, car.node.memory

    async def make(self, effect: do.MakeSlots) -> None:
        """Make slots, and see what is there then."""
        await self._car.pause(0.05)
        if self._node.no_room:
            self._car.post(on.SlotsRefused(rank=effect.rank, reason="simulated: no room", room=0))
            return
        for number in effect.slots:
            self._memory.slots[effect.rank, number] = File(bytearray(effect.bytes), page=Page(rank=effect.rank))
        await self.look(effect.rank, made=True)

    async def look(self, rank: int, *, made: bool = False) -> None:
        """Tell the core of a rank's slots."""
        await self._car.pause(0.002)
        self._car.post(on.SlotsSeen(rank=rank, sights=self._memory.look(rank), made=made))

    async def grant(self, effect: do.GrantSlot) -> None:
        """Lend a slot out, unless somebody may still write to it."""
        await self._car.pause(0.005)
        page = effect.page
        file = self._memory.slots.get((page.rank, effect.slot))
        if file is None:
            return
        if effect.check_lock and file.holder() is not None:
            self._world.trace.sometimes("a slot was found locked")
            self._car.post(on.SlotHeld(rank=page.rank, slot=effect.slot, seq=page.seq, launch_id=file.page.launch_id))
            return
        file.page, file.flipped = page, False
        path = slot_path(page.rank, effect.slot)
        frame = wire.Slot(
            slot=effect.slot, seq=page.seq, path=path, page_path=path, lock_path=path, bytes=effect.capacity
        )
        self._car.send(effect.connection, frame)

    async def hash(self, effect: do.HashSlot) -> None:
        """Hash a slot, or check it."""
        try:
            shard = await self._hashed(effect)
        except WrongError as error:
            self._world.trace.sometimes("a slot was dropped")
            self._car.post(on.SlotDropped(rank=effect.rank, slot=effect.slot, seq=effect.seq, reason=str(error)))
            return
        self._car.post(on.SlotHashed(slot=effect.slot, seq=effect.seq, shard=shard))

    async def _hashed(self, effect: do.HashSlot) -> Shard:
        file = self._memory.slots.get((effect.rank, effect.slot))
        if file is None:
            raise WrongError("it is gone")
        page, wanted = file.page, SlotState.HASHED if effect.digest else SlotState.SEALED
        if (page.seq, page.state) != (effect.seq, wanted):
            raise WrongError(f"its page says {page.state} of seq {page.seq}")
        half = page.bytes // 2
        with self._world.trace.phase("hashing", (page.attempt_uid, page.step, page.rank)):
            first = bytes(file.data[:half])
            self._world.at("hash")
            await self._car.pause(0.05)
            image = first + bytes(file.data[half : page.bytes])
            check_header(image, shard_of_page(page))
            found = digest(image)
            if effect.digest and found != effect.digest:
                raise WrongError(f"its digest is {found}; it was {effect.digest}")
            if file.page != page:
                raise WrongError("it was written to while it was hashed")
            if not effect.digest:
                file.page = replace(page, state=SlotState.HASHED, digest=found)
            return shard_of_page(replace(page, digest=found))

    def digest(self, file: File) -> str:
        """Return the digest of what a file holds.

        Raises:
            WrongError: it is another snapshot than its page says.
        """
        image = bytes(file.data[: file.page.bytes])
        check_header(image, shard_of_page(file.page))
        return digest(image)
