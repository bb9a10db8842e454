"""One node of a fleet: what its sidecar would list, and the lines of shards that do not exist."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from pathlib import Path

from toprope.coordinator.wire import (
    AttemptView,
    Copy,
    Desired,
    Inventory,
    RankState,
    RankVerdict,
    ReadBack,
    Tier,
)
from toprope.sidecar.peer_book import SPARES_PER_RANK
from toprope.sidecar.slot_book import SLOTS_PER_RANK
from toprope.sidecar.tier_book import LOCAL_STEPS_KEPT, RECEIPTS_KEPT
from toprope.store.checkpoint import manifest
from toprope.store.checkpoint.manifest import File, Head, Index, Tensor
from toprope.store.names import index_key, shard_key

KEPT: dict[Tier, int] = {
    "memory": SLOTS_PER_RANK,
    "peer": SPARES_PER_RANK,
    "local": LOCAL_STEPS_KEPT,
    "object": RECEIPTS_KEPT,
}
"""So many steps of a rank a sidecar lists in each tier."""
SHARD_BYTES = 10 * 10**9
LAUNCH = "1a" * 16


@dataclass(slots=True, kw_only=True)
class Node:
    """One node of the fleet: what it would list."""

    job: str
    world: int
    name: str
    url: str
    ranks: range
    domain: dict[str, str]
    client: int
    desired: Desired | None = None
    states: dict[int, RankState] = field(default_factory=dict)
    copies: dict[tuple[Tier, int, int], Copy] = field(default_factory=dict)
    read_backs: dict[str, ReadBack] = field(default_factory=dict)
    reading: set[str] = field(default_factory=set)
    news: list[tuple[str, int, int]] = field(default_factory=list)
    """What it has come to hold or has read back, the rank and the step, since it has told of it."""
    version: int = 0
    queued: bool = False
    published_s: float = 0.0
    _steps: dict[tuple[Tier, int], list[int]] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """Return what stands for its boot id and its incarnation."""
        return manifest.sha256(self.name.encode())[:32]

    @property
    def job_uid(self) -> str:
        """Return the job's uid, as far as it has been told."""
        return "" if self.desired is None else self.desired.job_uid

    @property
    def attempt(self) -> AttemptView:
        """Return the attempt, of which it has been told."""
        assert self.desired is not None
        assert self.desired.attempt is not None
        return self.desired.attempt

    def inventory(self) -> Inventory:
        """Return what it says now."""
        return Inventory(
            job=self.job,
            job_uid=self.job_uid,
            node=self.name,
            boot_id=self.identity,
            incarnation=self.identity,
            version=self.version,
            url=self.url,
            domain=self.domain,
            ranks=tuple(self.states.values()),
            copies=tuple(self.copies.values()),
            read_backs=tuple(self.read_backs.values()),
        )

    def hold(self, copy: Copy) -> None:
        """List a copy, and no longer what gives way to it."""
        self.copies[copy.tier, copy.rank, copy.step] = copy
        self.news.append((copy.tier, copy.rank, copy.step))
        steps = self._steps.setdefault((copy.tier, copy.rank), [])
        if copy.step not in steps:
            bisect.insort(steps, copy.step)
        for old in steps[: -KEPT[copy.tier]]:
            del self.copies[copy.tier, copy.rank, old]
        del steps[: -KEPT[copy.tier]]

    def stand(self, rank: int, step: int, verdict: RankVerdict | None) -> None:
        """Let a rank have come to a step; without a verdict it keeps the one that it had."""
        before = self.states.get(rank)
        self.states[rank] = RankState(
            rank=rank,
            world=self.world,
            launch_id=LAUNCH,
            attempt_uid=self.attempt.uid,
            step=step,
            lock_held=True,
            state_bytes=SHARD_BYTES,
            verdict=verdict or (before.verdict if before is not None else None),
        )

    def copy(self, step: int, rank: int, tier: Tier) -> Copy:
        """Return a line of a copy of a rank's shard."""
        attempt = self.attempt
        return Copy(
            attempt=attempt.number,
            attempt_uid=attempt.uid,
            step=step,
            rank=rank,
            world=self.world,
            tier=tier,
            bytes=SHARD_BYTES,
            digest=_digest(step, rank),
            key=f"/var/lib/toprope/{self.job}/local/{attempt.uid}/s{step}/rank-{rank}" if tier == "local" else "",
        )

    def stored(self, step: int, rank: int, *, store: Path) -> Copy:
        """Write the index of a rank's shard, and return its receipt."""
        attempt, digest = self.attempt, _digest(step, rank)
        key = shard_key(self.job, attempt=attempt.number, step=step, rank=rank, world=self.world, nonce="0a" * 8)
        tensor = Tensor(
            name="model.layers.0.weight",
            dtype="F32",
            shape=(SHARD_BYTES // 4 - 16,),
            global_shape=(SHARD_BYTES // 4 - 16,),
            offsets=(0,),
            file=0,
            begin=64,
            end=SHARD_BYTES,
            digest=digest,
        )
        index = Index(
            job_uid=self.job_uid,
            attempt=attempt.number,
            attempt_uid=attempt.uid,
            step=step,
            rank=rank,
            world=self.world,
            bytes=SHARD_BYTES,
            digest=digest,
            head=Head(file=0, begin=0, end=64, digest=digest),
            files=(File(key=key, bytes=SHARD_BYTES, digest=digest),),
            tensors=(tensor,),
        )
        body = manifest.encode(index)
        sha256 = manifest.sha256(body)
        at = index_key(self.job, attempt=attempt.number, step=step, rank=rank, world=self.world, sha256=sha256)
        path = store / at
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
        return Copy(
            attempt=attempt.number,
            attempt_uid=attempt.uid,
            step=step,
            rank=rank,
            world=self.world,
            tier="object",
            bytes=SHARD_BYTES,
            digest=digest,
            key=key,
            nonce="0a" * 8,
            index_key=at,
            index_sha256=sha256,
            stored_bytes=SHARD_BYTES,
            stored_digest=digest,
        )


def _digest(step: int, rank: int) -> str:
    return f"{step:016x}{rank:016x}"
