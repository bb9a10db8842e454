"""What is said of a slot that is filled: in the header of its image, on its page, and in the frame that gives it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from toprope.trainer_hooks.launch import World
from toprope.trainer_hooks.link import wire
from toprope.trainer_hooks.link.session import Session
from toprope.trainer_hooks.link.slot import Page, SlotState, read_page, write_page
from toprope.trainer_hooks.link.slots import Grant

DOCUMENT_ROOM_BYTES = 64 * 1024


@dataclass(slots=True)
class Sealer:
    """Hands over the slots that one rank fills in one attempt."""

    session: Session
    attempt: wire.Attempt
    world: World

    def announce(self, image_bytes: int, document_bytes: int) -> int:
        """Tell the sidecar how large an image is, with room for its document to grow, and return that."""
        announced = image_bytes + document_bytes // 2 + DOCUMENT_ROOM_BYTES
        self.session.size(announced)
        return announced

    def metadata(self, step: int) -> dict[str, str]:
        """Return what the header of an image says of it."""
        return {
            "job_uid": self.attempt.job_uid,
            "attempt": str(self.attempt.number),
            "attempt_uid": self.attempt.uid,
            "step": str(step),
            "rank": str(self.world.rank),
            "world": str(self.world.size),
        }

    def begin(self, grant: Grant, step: int, *, asked: bool = False) -> Page:
        """Write on the page of a slot that it is being filled, and return the page.

        Raises:
            OSError: it can't be written.
        """
        page = Page(
            state=SlotState.WRITING,
            seq=grant.slot.seq,
            launch_id=self.attempt.launch_id,
            rank=self.world.rank,
            world=self.world.size,
            attempt=self.attempt.number,
            attempt_uid=self.attempt.uid,
            step=step,
            asked=asked,
        )
        write_page(grant.slot.page_path, page)
        return page

    def seal(self, grant: Grant, page: Page, image_bytes: int) -> wire.Sealed:
        """Hand over a slot now that all of it is written.

        Raises:
            OSError: its page can't be written.
        """
        write_page(grant.slot.page_path, replace(page, state=SlotState.SEALED, bytes=image_bytes))
        return self.give_up(grant, page.step, image_bytes)

    def give_up(self, grant: Grant, step: int, image_bytes: int) -> wire.Sealed:
        """Return a slot; if its page does not say that it is sealed, the sidecar sees that it is not whole."""
        slot = grant.slot
        sealed = wire.Sealed(slot=slot.slot, seq=slot.seq, attempt_uid=self.attempt.uid, step=step, bytes=image_bytes)
        self.session.sealed(sealed)
        return sealed


def is_hashed(slot: wire.Slot, sealed: wire.Sealed) -> bool:
    """Say whether the sidecar has hashed what was sealed, or has gone on to use the slot again.

    One that it has dropped, for what it holds is not what it should be, is empty under the same number.

    Raises:
        OSError: the page can't be read.
    """
    page = read_page(Path(slot.page_path))
    return page.seq > sealed.seq or (page.seq == sealed.seq and page.state is SlotState.HASHED)
