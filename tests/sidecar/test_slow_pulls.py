"""Two sidecars and a coordinator, all real cores, and pulls that take several times as long as the cadence."""

from __future__ import annotations

from collections import defaultdict

import msgspec
import pytest
from tests.support.core_driver import sight
from tests.support.reigns import JOB, Reign, training

from toprope.coordinator.aim import Aim
from toprope.coordinator.events import Heard, Ticked
from toprope.sidecar import effects as do
from toprope.sidecar import events as on
from toprope.sidecar.core import Core
from toprope.sidecar.events import Event
from toprope.sidecar.values import Identity, Shard, SlowTier
from toprope.trainer_hooks.link import wire

NODES = ("a", "b")
LATER = 1000
BYTES = 2_000_000_000
SECONDS = 320


class World:
    """Node a serves rank 0, node b rank 1; each pulls the other's snapshots, of rank r in ``pull_s[r]`` seconds."""

    def __init__(self, pull_s: tuple[int, int]) -> None:
        self.pull_s = pull_s
        self.reign: Reign = training()
        attempt = self.reign.desired.attempt
        assert attempt is not None
        self.uid, self.launch_id = attempt.uid, attempt.launch_id
        self.cores = {name: self._core(name) for name in NODES}
        self.slots: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        self.coming: list[tuple[float, str, Event]] = []
        self.protected: list[int] = []
        for rank, name in enumerate(NODES):
            self.tell(name, on.DesiredArrived(desired=self.reign.desired))
            hello = wire.Hello(job=JOB, launch_id=self.launch_id, rank=rank, world=2, pid=1)
            for frame in (hello, wire.Size(bytes=50)):
                self.tell(name, on.FrameArrived(connection=1, frame=frame))

    def _core(self, name: str) -> Core:
        node = self.reign.nodes[name]
        return Core(
            me=Identity(
                job=JOB,
                node=name,
                boot_id=node.boot_id,
                incarnation=node.incarnation,
                url=f"http://{name}",
                domain={"node": name},
                use_deadline_s=30.0,
                slot_path=lambda rank, number: f"/{rank}/{number}",
                spare_path=lambda rank, number: f"/{rank}/{number}",
            )
        )

    def tell(self, name: str, event: Event) -> None:
        """Let something happen to a sidecar, and all that follows at once."""
        for effect in self.cores[name].handle(event):
            self._do(name, effect)

    def _do(self, name: str, effect: do.Effect) -> None:
        rank = NODES.index(name)
        match effect:
            case do.MakeSlots():
                self.tell(name, on.SlotsSeen(rank=rank, sights=tuple(map(sight, effect.slots)), made=True))
            case do.GrantSlot():
                self.slots[name].append((effect.slot, effect.page.seq))
            case do.Pull():
                pulled = on.Pulled(shard=effect.shard, spare=effect.spare)
                self.coming.append((self.reign.now_s + self.pull_s[effect.shard.rank], name, pulled))
            case do.StoreLocal() | do.StoreObject():
                tier: SlowTier = "local" if isinstance(effect, do.StoreLocal) else "object"
                failed = on.StoreFailed(tier=tier, shard=effect.shard, slot=effect.slot, reason="away")
                self.coming.append((self.reign.now_s, name, failed))
            case do.Publish():
                other = NODES[1 - rank]
                inventory = msgspec.structs.replace(effect.inventory, version=effect.inventory.version + LATER)
                self.reign.do(Heard(inventory=inventory, live=True, now_s=self.reign.now_s))
                self.coming.append((self.reign.now_s, other, on.OwnerSeen(inventory=inventory)))
            case _:
                pass

    def snapshot(self, name: str, step: int) -> None:
        """Let a trainer save a step, or skip it."""
        rank = NODES.index(name)
        if not self.slots[name]:
            skipped = wire.Skipped(attempt_uid=self.uid, step=step, reason="no free slot")
            self.tell(name, on.FrameArrived(connection=1, frame=skipped))
            return
        slot, seq = self.slots[name].pop(0)
        sealed = wire.Sealed(slot=slot, seq=seq, attempt_uid=self.uid, step=step, bytes=50)
        self.tell(name, on.FrameArrived(connection=1, frame=sealed))
        shard = Shard(
            attempt=1,
            step=step,
            attempt_uid=self.uid,
            rank=rank,
            world=2,
            bytes=BYTES,
            digest=f"{step:016x}{rank:016x}",
        )
        self.tell(name, on.SlotHashed(slot=slot, seq=seq, shard=shard))

    def second(self) -> None:
        """Let a second pass."""
        self.reign.now_s += 1.0
        self.reign.do(Ticked(now_s=self.reign.now_s))
        for name in NODES:
            inventory = self.cores[name].published
            if inventory is not None and self.reign.now_s % 2 == 0:
                later = msgspec.structs.replace(inventory, version=inventory.version + LATER)
                self.reign.do(Heard(inventory=later, live=True, now_s=self.reign.now_s))
            self.tell(name, on.DesiredArrived(desired=self.reign.desired))
            self.tell(name, on.Tick(now_s=self.reign.now_s))
        due = [one for one in self.coming if one[0] <= self.reign.now_s]
        self.coming = [one for one in self.coming if one[0] > self.reign.now_s]
        for _, name, event in due:
            self.tell(name, event)
            if isinstance(event, on.Pulled):
                acked = on.Acked(
                    holder=name,
                    attempt_uid=self.uid,
                    step=event.shard.step,
                    rank=event.shard.rank,
                    digest=event.shard.digest,
                )
                self.tell(NODES[event.shard.rank], acked)
        self.protected.append(self.reign.desired.protected_step)

    def run(self, seconds: int, *, every_s: int = 10) -> None:
        """Train, with a snapshot each so many seconds; one trainer is a little behind the other."""
        for second in range(1, seconds + 1):
            for late_s, name in enumerate(NODES):
                if second % every_s == late_s:
                    self.snapshot(name, 2 * (second // every_s))
            self.second()


def advances(world: World) -> int:
    """Return how often protection has moved on."""
    return len(set(world.protected) - {0})


@pytest.mark.parametrize("pull_s", [(45, 75), (100, 35)])
def test_pulls_that_are_slower_than_the_cadence_meet_at_the_same_steps(pull_s: tuple[int, int]) -> None:
    world = World(pull_s)
    world.run(SECONDS)
    assert advances(world) >= SECONDS // (2 * max(pull_s))


def test_pulls_that_are_quick_protect_each_step() -> None:
    world = World((2, 3))
    world.run(60)
    assert advances(world) == 5


def test_without_an_aim_they_miss_each_other_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Aim, "steer", lambda *_, **__: None)
    world = World((45, 75))
    world.run(SECONDS)
    assert advances(world) == 0
