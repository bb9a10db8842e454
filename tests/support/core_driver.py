"""A sidecar's core, driven by hand: what a test says happens, and what the core then wants done."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from toprope.coordinator.wire import AttemptView, Cadence, Copy, Desired, Inventory, Kept, Member, Placement
from toprope.sidecar import effects as do
from toprope.sidecar import events as on
from toprope.sidecar.core import Core
from toprope.sidecar.effects import Effect
from toprope.sidecar.events import Event
from toprope.sidecar.values import Identity, Shard, SlotSight
from toprope.trainer_hooks.link import wire
from toprope.trainer_hooks.link.slot import Page, SlotState

JOB_UID = "0b" * 16
UID = "1a" * 16
E = TypeVar("E", bound=Effect)


class Driver:
    """Node ``a`` with rank 0 of a world of one, unless a test says otherwise."""

    def __init__(self) -> None:
        identity = Identity(
            job="job",
            node="a",
            boot_id="b0",
            incarnation="c0",
            url="http://a",
            domain={"node": "a"},
            use_deadline_s=30.0,
            slot_path=lambda rank, number: f"/slots/{rank}/{number}",
            spare_path=lambda rank, number: f"/spares/{rank}/{number}",
        )
        self.core = Core(me=identity)
        self.effects: list[Effect] = []
        self.now_s = 0.0
        self.desired = Desired(
            job="job",
            job_uid=JOB_UID,
            term=1,
            version=1,
            url="http://c",
            cadence=Cadence(from_step=0, every=1, local_every=100, object_every=100),
        )

    # What happens

    def on(self, event: Event) -> list[Effect]:
        """Let it happen; return what is to be done."""
        self.effects = list(self.core.handle(event))
        return self.effects

    def frame(self, frame: wire.FromHook, *, connection: int = 1) -> list[Effect]:
        """Let a trainer send a frame."""
        return self.on(on.FrameArrived(connection=connection, frame=frame))

    def hello(self, *, connection: int = 1, launch_id: str = "aa", rank: int = 0, world: int = 1) -> list[Effect]:
        """Let a trainer say hello."""
        hello = wire.Hello(job="job", launch_id=launch_id, rank=rank, world=world, pid=1)
        return self.frame(hello, connection=connection)

    def want(self, **changes: Any) -> list[Effect]:  # noqa: ANN401 - fields of Desired
        """Let a newer document arrive."""
        version = self.desired.version + 1
        self.desired = msgspec.structs.replace(self.desired, **changes, version=version)
        return self.on(on.DesiredArrived(desired=self.desired))

    def attempt(self, *, number: int = 1, uid: str = UID, launch_id: str = "aa", **changes: Any) -> list[Effect]:  # noqa: ANN401 - fields of AttemptView
        """Let an attempt be current; fresh and applied, with rank 0 here, unless ``changes`` say otherwise."""
        values: dict[str, Any] = {
            "source": "fresh",
            "source_attempt_uid": "",
            "from_step": 0,
            "restore": (),
            "phase": "applied",
            "world": (Member(rank=0, node="a", boot_id="b0"),),
            "round": 0,
        }
        view = AttemptView(number=number, uid=uid, launch_id=launch_id, **(values | changes))
        return self.want(attempt=view)

    def tick(self, seconds: float = 0.0) -> list[Effect]:
        """Let time pass."""
        self.now_s += seconds
        return self.on(on.Tick(now_s=self.now_s))

    def see(self, *sights: SlotSight, rank: int = 0, made: bool = True) -> list[Effect]:
        """Let slots be seen, after those wanted were made."""
        return self.on(on.SlotsSeen(rank=rank, sights=sights, made=made))

    def train(self) -> None:
        """Come to where rank 0 trains in attempt 1 with three slots of 100 bytes granted."""
        self.attempt()
        self.hello()
        self.frame(wire.Size(bytes=100))
        self.see(*(sight(number) for number in range(3)))

    def seal(self, slot: int, step: int, *, seq: int = 1, connection: int = 1) -> list[Effect]:
        """Let the trainer seal a slot."""
        frame = wire.Sealed(slot=slot, seq=seq, attempt_uid=UID, step=step, bytes=50)
        return self.frame(frame, connection=connection)

    def hashed(self, slot: int, step: int, *, seq: int = 1) -> list[Effect]:
        """Let the slot be hashed."""
        return self.on(on.SlotHashed(slot=slot, seq=seq, shard=shard(step)))

    def snapshot(self, slot: int, step: int, *, seq: int = 1) -> list[Effect]:
        """Let the trainer seal a slot, and let it be hashed."""
        self.seal(slot, step, seq=seq)
        return self.hashed(slot, step, seq=seq)

    def keep(self, step: int, uid: str = UID) -> list[Effect]:
        """Let a step be kept."""
        return self.want(keep=(Kept(attempt_uid=uid, step=step),))

    def place(self, owner: str, holder: str) -> list[Effect]:
        """Let ``holder`` copy from ``owner``."""
        return self.want(placement=(Placement(owner=owner, holder=holder, url=f"http://{owner}"),))

    def owner(self, *copies: Copy, node: str = "b", version: int = 1) -> list[Effect]:
        """Let the inventory of another node be seen."""
        inventory = Inventory(
            job="job",
            job_uid=JOB_UID,
            node=node,
            boot_id="b1",
            incarnation="c1",
            version=version,
            url=f"http://{node}",
            domain={"node": node},
            copies=copies,
        )
        return self.on(on.OwnerSeen(inventory=inventory))

    # What is to be done

    def all(self, kind: type[E]) -> list[E]:
        """Return the effects of a kind."""
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def sent(self, kind: type[Any], *, connection: int = 1) -> list[Any]:
        """Return the frames of a kind that are to be sent on a connection."""
        return [e.frame for e in self.all(do.Send) if e.connection == connection and isinstance(e.frame, kind)]

    def granted(self) -> list[int]:
        """Return the slots to be lent."""
        return [effect.slot for effect in self.all(do.GrantSlot)]

    @property
    def inventory(self) -> Inventory:
        """Return the inventory as last published."""
        assert self.core.published is not None
        return self.core.published

    def copies(self, tier: str) -> list[int]:
        """Return the steps that the inventory lists in a tier."""
        return [copy.step for copy in self.inventory.copies if copy.tier == tier]


def shard(step: int, *, rank: int = 0, uid: str = UID, attempt: int = 1, digest: str = "") -> Shard:
    """Return a shard of a world of one or two."""
    digest = digest or f"{step:032x}"
    return Shard(attempt=attempt, step=step, attempt_uid=uid, rank=rank, world=rank + 1, bytes=50, digest=digest)


def sight(  # noqa: PLR0913 - what can be seen of a slot
    number: int,
    state: SlotState = SlotState.EMPTY,
    *,
    seq: int = 0,
    step: int = 0,
    launch_id: str = "",
    lock_held: bool = False,
    digest: str = "",
) -> SlotSight:
    """Return a slot of 100 bytes as it may be seen."""
    page = Page(
        state=state,
        seq=seq,
        launch_id=launch_id,
        world=1,
        attempt=1,
        attempt_uid=UID,
        step=step,
        bytes=50,
        digest=digest,
    )
    return SlotSight(slot=number, capacity=100, page=page, lock_held=lock_held)
