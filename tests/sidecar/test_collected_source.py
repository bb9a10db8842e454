"""An attempt that begins from shards that never became READY and that the collector has taken meanwhile.

It is chosen by receipts, which outlive what they tell of. It ends in a strike-off and never in wrong bytes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.sidecar.test_fetching import FakePeers
from tests.support.fake_store import FakeStore
from tests.support.logs import uid
from tests.support.reigns import training
from tests.support.stores import JobBuilder, shard_image, small_store

from toprope.coordinator.wire import RestoreShard
from toprope.sidecar.adapters.files import Pages
from toprope.sidecar.effects import Stage
from toprope.sidecar.events import ShardStaged
from toprope.sidecar.memory import Memory
from toprope.sidecar.staging import Stager, StagingError
from toprope.sidecar.values import Way
from toprope.store.checkpoint.manifest import Shard
from toprope.store.keep.gc import execute, survey
from toprope.store.log.records import Held
from toprope.store.names import Key
from toprope.trainer_hooks.link.wire import ALL

NEW = "4a" * 16


def begun_from_it_once(store: FakeStore) -> tuple[JobBuilder, tuple[Shard, ...]]:
    """Return a job whose attempt 2 began from step 20 of attempt 1, which was not READY, and went on to READY 30."""
    job = small_store(store, steps=(10,))
    shards = tuple(job.put_shard(step=20, rank=rank) for rank in range(2))
    job.open_attempt(held=Held(attempt_uid=uid(1), step=20), from_step=20)
    job.checkpoint(30)
    return job, shards


def staged(store: FakeStore, memory: Memory, shard: Shard, *tensors: str) -> ShardStaged:
    request = Stage(
        attempt_uid=NEW,
        source_attempt_uid=uid(1),
        step=20,
        shard=RestoreShard(rank=shard.rank, bytes=shard.bytes, digest=shard.digest, sources=()),
        ways=(Way(kind="object", tier="object", key=shard.index_key),),
        tensors=frozenset(tensors),
        part=1,
    )
    return Stager(memory=memory, peers=FakePeers(), objects=store, doubt=lambda *_: None).stage(request)


@pytest.fixture
def memory(memory_dir: Path) -> Memory:
    memory = Memory(memory_dir / "job", Pages(), limit_bytes=None)
    memory.make_directories()
    return memory


@pytest.mark.parametrize("tensors", [(ALL,), ("model.weight",)], ids=["whole", "a part"])
@pytest.mark.parametrize("taken", ["all", "index", "shard"])
def test_what_the_collector_took_is_not_staged_and_named(memory: Memory, taken: str, tensors: tuple[str, ...]) -> None:
    store = FakeStore()
    job, (first, second) = begun_from_it_once(store)
    there = staged(store, memory, first, ALL).shard
    assert Path(there.path).read_bytes()[: there.bytes] == shard_image(step=20, rank=0), (
        "the source of the attempt stays"
    )
    job.open_attempt(ready=job.log.state.head, from_step=30)
    plan = survey(store, job.log.state)
    gone = [one.key for one in plan.condemned]
    assert len(gone) == 4
    if taken == "all":
        execute(store, plan)
    else:  # the collector was cut off
        store.delete([Key(key) for key in gone if key.endswith("json") == (taken == "index")])
    with pytest.raises(StagingError, match="rank-00001-of-00002") as raised:
        staged(store, memory, second, *tensors)
    assert not raised.value.again, "it is not asked for again and again"


def test_a_source_that_nobody_has_just_now_is_asked_for_again(memory: Memory) -> None:
    request = Stage(
        attempt_uid=NEW,
        source_attempt_uid=uid(1),
        step=20,
        shard=RestoreShard(rank=0, bytes=8, digest="00" * 16, sources=()),
        ways=(),
        tensors=frozenset({ALL}),
        part=1,
    )
    with pytest.raises(StagingError, match="nobody has it just now") as raised:
        Stager(memory=memory, peers=FakePeers(), objects=FakeStore(), doubt=lambda *_: None).stage(request)
    assert raised.value.again


def test_the_next_round_strikes_it_off_and_begins_from_what_is_there() -> None:
    reign = training()
    reign.hold(8, tiers=("object",))
    reign.read_back()
    assert reign.ready_steps == [8]
    reign.hold(12, tiers=("object",), ranks=(0, 1))  # all uploaded, and never read back: not READY
    reign.end_trainers()
    answer = reign.ask("a", "b", launch_id="2b" * 16)
    assert answer is not None
    assert answer.attempt is not None
    assert (answer.attempt.source, answer.attempt.from_step) == ("held", 12)
    reign.verdict("staged", ranks=(1,), ok=False, reason="object job/shards/a1/s12/rank-1.index: missing")
    answer = reign.ask("a", "b", launch_id="2b" * 16, round_number=1)
    assert answer is not None
    assert answer.attempt is not None
    assert (answer.attempt.source, answer.attempt.from_step) == ("ready", 8)
    assert reign.state.attempt is not None
    assert [(one.step, "missing" in one.why) for one in reign.state.attempt.struck] == [(12, True)]
