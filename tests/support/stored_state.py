"""Trainers' states as a job in a store: what each rank captured, verified and written out again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.support.fake_store import FakeStore
from tests.support.logs import uid
from tests.support.stores import JobBuilder
from tests.support.tiny_trainer import open_image, snapshot_file

from toprope.store.log.chain import read_log
from toprope.store.look.verify import plan, verify_checkpoint
from toprope.store.transfer.restore import restore
from toprope.trainer_hooks.capture.state import Parts, capture
from toprope.trainer_hooks.image.shard import Image
from toprope.trainer_hooks.restore.apply import apply, check

STEP = 10


def stored(ranks: Sequence[Parts], directory: Path) -> FakeStore:
    """Put a READY step into a store, each rank's shard made of its own state."""

    def image(*, step: int, rank: int, world: int, number: int, job_uid: str) -> bytes:
        metadata = {
            "job_uid": job_uid,
            "attempt": str(number),
            "attempt_uid": uid(number),
            "step": str(step),
            "rank": str(rank),
            "world": str(world),
        }
        snapshot = capture(ranks[rank], rank=rank, world=world)
        path = directory / f"captured-{rank}"
        return snapshot_file(path, snapshot.tensors, snapshot.document, metadata, snapshot.pieces).read_bytes()

    store = FakeStore()
    JobBuilder(store, world=len(ranks), image=image).begin().checkpoint(STEP)
    return store


def verified_images(store: FakeStore, directory: Path, *, world: int) -> dict[int, Image]:
    """Verify the job's newest checkpoint, write it to a directory, and return its shards."""
    state = read_log(store, "job")
    (seq,) = plan(state)
    assert verify_checkpoint(store, state, seq).damages == ()
    restore(store, state, to=directory / "out", force=True)
    return {rank: open_image(directory / "out" / f"rank-{rank:05}-of-{world:05}.safetensors") for rank in range(world)}


def restored(ranks: Sequence[Parts], images: dict[int, Image]) -> None:
    """Check and apply the shards on each rank."""
    for rank, parts in enumerate(ranks):
        apply(check(parts, images, rank=rank, world=len(ranks)))
