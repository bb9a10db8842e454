"""The coordinator's way from receipts to READY, and back from READY to an offer, over a store that can lose and lie."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import pytest
from tests.support.fake_store import FakeStore
from tests.support.receipts import expected_indexes
from tests.support.reigns import JOB, SPEC, FakeNode, copy_of
from tests.support.stores import JobBuilder, adapter_image

from toprope.coordinator.adapters.objects import IndexBodies, ThreadedStore
from toprope.coordinator.config import Config
from toprope.coordinator.intents import CommitStep, make_ready
from toprope.coordinator.log import Log
from toprope.coordinator.ports import Ports
from toprope.coordinator.readiness import Receipt
from toprope.coordinator.serving import NotLeadingError
from toprope.coordinator.settings import Address
from toprope.coordinator.terms import Terms
from toprope.coordinator.wire import (
    AttemptView,
    Cadence,
    Copy,
    Desired,
    Inventory,
    Member,
    OpenAnswer,
    OpenRequest,
    Provisional,
)
from toprope.sidecar.object_tier import ObjectTier
from toprope.sidecar.values import Shard
from toprope.store.checkpoint import manifest
from toprope.store.checkpoint.manifest import File, Head, Index, Manifest
from toprope.store.checkpoint.ready import read_index_at
from toprope.store.digest import digest
from toprope.store.log.chain import read_log
from toprope.store.log.records import Elected, Retire
from toprope.store.look.verify import verify_checkpoint
from toprope.store.names import Key, index_key, manifest_key, shard_key

PATIENCE_S = 20.0


@dataclass
class FakeNodes:
    """Answers for sidecars."""

    nodes: dict[str, FakeNode] = field(default_factory=dict)

    async def inventory(self, url: str) -> Inventory | None:
        node = self.nodes.get(url.removeprefix("http://"))
        return node.inventory() if node is not None and node.up else None

    async def adopted(self, url: str) -> tuple[Provisional, ...] | None:
        node = self.nodes.get(url.removeprefix("http://"))
        return tuple(node.adopted) if node is not None and node.up else None

    async def health(self, url: str, *, standby: str) -> Literal["silent"]:
        return "silent"


@dataclass
class Live:
    """A coordinator that reigns in this event loop, over one node with one rank."""

    coordinator: Terms
    store: FakeStore
    nodes: FakeNodes
    node: FakeNode

    async def open(self, launch_id: str = "1a" * 16) -> OpenAnswer:
        world = (Member(rank=0, node=self.node.name, boot_id=self.node.boot_id),)
        return await self.coordinator.open(
            OpenRequest(job=JOB, launch_id=launch_id, round=0, world=world, spec=SPEC, versions={})
        )

    def say(self) -> None:
        self.coordinator.heard(self.node.say())

    def upload(self, view: AttemptView, step: int, *, change: Callable[[Index], Index] = lambda index: index) -> Copy:
        """Write a shard and its index as a sidecar would, and let the node list it."""
        name: dict[str, Any] = {"attempt": view.number, "step": step, "rank": 0, "world": 1}
        body = f"shard of step {step}".encode()
        key = shard_key(JOB, **name, nonce="0a")
        index = change(
            Index(
                job_uid=self.node.job_uid,
                attempt=view.number,
                attempt_uid=view.uid,
                step=step,
                rank=0,
                world=1,
                bytes=len(body),
                digest=digest(body),
                head=Head(file=0, begin=0, end=len(body), digest=""),
                files=(File(key=key, bytes=len(body), digest=digest(body)),),
                tensors=(),
            )
        )
        encoded = manifest.encode(index)
        named = index_key(JOB, **name, sha256=manifest.sha256(encoded))
        self.store.objects[key], self.store.objects[named] = body, encoded
        copy = msgspec.structs.replace(
            copy_of(view.uid, step, 0, "object", world=1, attempt=view.number, digest_is=digest(body)),
            key=key,
            bytes=len(body),
            index_key=named,
            index_sha256=manifest.sha256(encoded),
            stored_bytes=len(body),
        )
        self.node.copies.append(copy)
        return copy

    def upload_image(self, view: AttemptView, step: int) -> Copy:
        """Store an image as a real sidecar does, most of which is the same at each step, and let the node list it."""
        uid, number = view.uid, view.number
        image = adapter_image(step=step, rank=0, world=1, number=number, job_uid=self.node.job_uid, attempt_uid=uid)
        size, found = len(image), digest(image)
        shard = Shard(attempt=number, attempt_uid=uid, step=step, rank=0, world=1, bytes=size, digest=found)
        copy = ObjectTier(self.store, JOB, codec="none").put(shard, memoryview(image), nonce=f"{step:02x}")
        self.node.copies.append(copy)
        return copy

    async def until(self, done: Callable[[Desired], bool]) -> Desired:
        """Wait for a Desired of which ``done`` is true."""
        seen = (0, 0)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                await self.coordinator.desired_after(*seen)
                desired = self.coordinator.desired()
                assert desired is not None
                if done(desired):
                    return desired
                seen = desired.term, desired.version

    async def failed_commits(self, count: int) -> None:
        """Wait until as many commits have come to nothing."""
        async with asyncio.timeout(PATIENCE_S):
            while self.failures < count:  # noqa: ASYNC110 - a metric tells nobody
                await asyncio.sleep(0.01)

    @property
    def failures(self) -> float:
        return self.coordinator.registry.get_sample_value("toprope_commits_failed_total") or 0.0


@asynccontextmanager
async def reigning(store: FakeStore | None = None, node: FakeNode | None = None) -> AsyncIterator[Live]:
    """Run a coordinator while the context lasts."""
    store = store or FakeStore()
    config = Config(
        job=JOB,
        store="",
        listen=Address(host="127.0.0.1", port=0),
        broker=None,
        embedded_broker=None,
        cadence=Cadence(from_step=0, every=1, local_every=1, object_every=1),
        token="",
        ready_file=None,
        heartbeat_s=0.05,
        patience_s=0.1,
        tick_s=0.02,
    )
    coordinator = Terms(config)
    nodes, stop = FakeNodes(), asyncio.Event()
    ports = Ports(store=ThreadedStore(store), nodes=nodes, coordinators=nodes, connect=lambda *_, **__: None)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(coordinator.run(ports, url="http://c", stop=stop, on_serving=lambda: None))
        async with asyncio.timeout(PATIENCE_S):
            while (reign := coordinator.reign) is None or reign.core is None:  # noqa: ASYNC110 - it begins when it was elected
                await asyncio.sleep(0.01)
        node = node or FakeNode(name="a", job_uid=reign.core.log_view.state.job_uid)
        nodes.nodes[node.name] = node
        live = Live(coordinator, store, nodes, node)
        live.say()
        yield live
        stop.set()


async def opened(live: Live) -> AttemptView:
    answer = await live.open()
    assert answer.attempt is not None, answer
    return answer.attempt


async def test_a_step_becomes_ready_once_its_object_was_read_back_and_its_index_agrees() -> None:
    async with reigning() as live:
        view = await opened(live)
        copy = live.upload(view, 3)
        live.say()
        await live.until(lambda desired: desired.ready_step == 3)
    state = read_log(live.store, JOB)
    (ready,) = state.readies.values()
    key = manifest_key(JOB, attempt=1, step=3, sha256=ready.manifest_sha256)
    made = manifest.decode(live.store.objects[key], Manifest, key=key, expected_sha256=ready.manifest_sha256)
    assert [(shard.rank, shard.index_key, shard.digest) for shard in made.shards] == [(0, copy.index_key, copy.digest)]


@pytest.mark.parametrize("field_name", ["step", "attempt_uid", "job_uid", "rank", "world", "attempt", "files"])
async def test_an_index_that_says_something_else_than_its_receipt_makes_nothing_ready(field_name: str) -> None:
    def change(index: Index) -> Index:
        wrong = {"attempt_uid": "77" * 16, "job_uid": "77" * 16, "files": ()}.get(field_name, 9)
        return msgspec.structs.replace(index, **{field_name: wrong})

    async with reigning() as live:
        live.upload(await opened(live), 3, change=change)
        live.say()
        await live.failed_commits(1)
    assert not read_log(live.store, JOB).readies


async def test_a_step_that_points_into_an_older_ready_is_ready_when_only_what_is_new_was_read_back() -> None:
    async with reigning() as live:
        view = await opened(live)
        old = live.upload_image(view, 3)
        live.say()
        await live.until(lambda desired: desired.ready_step == 3)
        new = live.upload_image(view, 5)
        live.say()
        await live.until(lambda desired: desired.ready_step == 5)
    state = read_log(live.store, JOB)
    index = read_index_at(live.store, Key(new.index_key))
    assert [file.key for file in index.files] == [new.key, old.key]
    assert index.base == min(state.live)
    assert [verify_checkpoint(live.store, state, seq).damages for seq in state.live] == [(), ()]


async def test_the_indexes_of_a_base_are_not_fetched_again_for_each_step() -> None:
    class Counting(FakeStore):
        indexes = 0

        def read(self, key: Key, *, start: int = 0, length: int | None = None, uncached: bool = False) -> bytes:
            self.indexes += ".index." in key
            return super().read(key, start=start, length=length, uncached=uncached)

    store = Counting()
    builder = JobBuilder(store, image=adapter_image, codec="none").begin()
    seq = builder.checkpoint(10)
    threaded = ThreadedStore(store)
    store.indexes = 0
    first = await threaded.indexes(builder.log.state, seq)
    asked = store.indexes
    assert asked >= len(first) == 2
    assert await threaded.indexes(builder.log.state, seq) == first
    assert store.indexes == asked


async def test_what_was_read_to_make_a_step_ready_is_known_when_it_is_the_base() -> None:
    store = FakeStore()
    builder = JobBuilder(store, image=adapter_image, codec="none").begin()
    threaded = ThreadedStore(store)
    seq = builder.checkpoint(10)
    for one in expected_indexes(builder, seq):
        assert await threaded.read_indexes([one]) == [None]
        store.objects[one.key] = b"lost"
    assert [index.rank for index in await threaded.indexes(builder.log.state, seq)] == [0, 1]


def test_no_more_of_the_indexes_is_kept_than_the_limit_and_the_last_ones_stay() -> None:
    bodies = IndexBodies(most_bytes=250)
    made = [bytes([number]) * 100 for number in range(4)]
    for body in made:
        bodies.keep(manifest.sha256(body), body)
        assert bodies.get(manifest.sha256(made[0])) in {made[0], None}
    kept = [bodies.get(manifest.sha256(body)) for body in made]
    assert kept == [made[0], None, None, made[3]]
    bodies.keep(manifest.sha256(bytes(251)), bytes(251))
    assert bodies.get(manifest.sha256(bytes(251))) is None


@pytest.mark.parametrize("lie", ["bytes", "base", "unknown", "own"])
async def test_a_step_that_points_to_what_its_base_does_not_have_never_becomes_ready(lie: str) -> None:
    async with reigning() as live:
        view = await opened(live)
        live.upload_image(view, 3)
        live.say()
        await live.until(lambda desired: desired.ready_step == 3)
        copy = live.upload_image(view, 5)
        index = read_index_at(live.store, Key(copy.index_key))
        tensor = next(one for one in index.tensors if one.file == 1)
        others = tuple(one for one in index.tensors if one is not tensor)
        changes: dict[str, dict[str, object]] = {
            "bytes": {"tensors": (*others, msgspec.structs.replace(tensor, digest="0" * 32))},
            "base": {"base": None},
            "unknown": {"base": 1},
            "own": {"files": (index.files[0], msgspec.structs.replace(index.files[1], key=f"{index.files[0].key}"))},
        }
        body = manifest.encode(msgspec.structs.replace(index, **changes[lie]))
        named = index_key(JOB, attempt=1, step=5, rank=0, world=1, sha256=manifest.sha256(body))
        live.store.objects[named] = body
        live.node.copies[-1] = msgspec.structs.replace(copy, index_key=named, index_sha256=manifest.sha256(body))
        live.say()
        await live.failed_commits(1)
        live.upload_image(view, 7)
        live.say()
        await live.until(lambda desired: desired.ready_step == 7)
    assert [ready.step for ready in read_log(live.store, JOB).readies.values()] == [3, 7]


def test_a_ready_is_made_only_while_what_it_points_into_is_live() -> None:
    builder = JobBuilder(FakeStore(), world=1).begin()
    first = builder.checkpoint(10)
    for step in (20, 30):
        builder.checkpoint(step)
    current = builder.log.state.attempt
    assert current is not None
    receipt = Receipt(node="a", copy=copy_of(current.uid, 40, 0, "object", world=1))
    intent = CommitStep(attempt=1, attempt_uid=current.uid, step=40, receipts=(receipt,))
    assert make_ready(builder.log.state, intent, manifest_sha256="3a" * 32, bases=[first]) is not None
    builder.log.add(Retire(seqs=(first,)))
    assert make_ready(builder.log.state, intent, manifest_sha256="3a" * 32, bases=[first]) is None
    assert make_ready(builder.log.state, intent, manifest_sha256="3a" * 32, bases=[first + 1]) is not None


async def test_an_index_of_other_bytes_than_its_name_makes_nothing_ready() -> None:
    async with reigning() as live:
        copy = live.upload(await opened(live), 3)
        live.store.objects[Key(copy.index_key)] += b" "
        live.say()
        await live.failed_commits(1)
    assert not read_log(live.store, JOB).readies


@pytest.mark.parametrize("lie", ["another key", "no key", "another digest", "no digest"])
async def test_an_index_is_read_only_where_its_name_says_that_it_lies(lie: str) -> None:
    class Watched(FakeStore):
        def read(self, key: Key, *, start: int = 0, length: int | None = None, uncached: bool = False) -> bytes:
            assert ".index." not in key, f"{key} was read because a node named it"
            return super().read(key, start=start, length=length)

    async with reigning(Watched()) as live:
        copy = live.upload(await opened(live), 3)
        other = Key(copy.index_key.replace("rank-00000-of-00001", "rank-00000-of-00002"))
        live.store.objects[other] = live.store.objects[Key(copy.index_key)]
        changes: dict[str, dict[str, str]] = {
            "another key": {"index_key": other},
            "no key": {"index_key": "../../etc/passwd"},
            "another digest": {"index_sha256": "77" * 32},
            "no digest": {"index_sha256": "../../etc/passwd"},
        }
        live.node.copies[-1] = msgspec.structs.replace(copy, **changes[lie])
        live.say()
        await live.failed_commits(1)
    assert not read_log(live.store, JOB).readies


async def test_an_index_that_is_too_long_makes_nothing_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toprope.coordinator.adapters.looking.MAX_INDEX_BYTES", 100)
    async with reigning() as live:
        live.upload(await opened(live), 3)
        live.say()
        await live.failed_commits(1)
    assert not read_log(live.store, JOB).readies


async def test_an_index_that_only_a_cache_has_right_makes_nothing_ready() -> None:
    class Cached(FakeStore):
        def read(self, key: Key, *, start: int = 0, length: int | None = None, uncached: bool = False) -> bytes:
            body = super().read(key, start=start, length=length)
            return b"lost" if uncached and ".index." in key else body

    async with reigning(Cached()) as live:
        live.upload(await opened(live), 3)
        live.say()
        await live.failed_commits(1)
    assert not read_log(live.store, JOB).readies


async def test_an_object_of_other_bytes_than_its_receipt_makes_nothing_ready() -> None:
    async with reigning() as live:
        view = await opened(live)
        copy = live.upload(view, 3)
        live.store.objects[Key(copy.key)] = b"shard of step 4"
        live.say()
        live.upload(view, 5)
        live.say()
        await live.until(lambda desired: desired.ready_step == 5)
    assert [ready.step for ready in read_log(live.store, JOB).readies.values()] == [5]


async def test_a_store_that_loses_requests_and_replies_still_gets_each_record_once() -> None:
    async with reigning() as live:
        live.store.faults.extend(["reply lost", "none", "request lost", "reply lost"])
        answer = await live.open()
        while answer.code == "unavailable":
            answer = await live.open()
        assert answer.attempt is not None
        live.store.faults.extend(["none", "reply lost"])
        live.upload(answer.attempt, 3)
        live.say()
        await live.until(lambda desired: desired.ready_step == 3)
    state = read_log(live.store, JOB)
    assert (state.attempt_number, len(state.readies)) == (1, 1)


async def test_a_coordinator_that_finds_a_later_term_stands_by_and_leads_again_when_that_one_is_silent() -> None:
    async with reigning() as live:
        waiting = asyncio.ensure_future(live.coordinator.desired_after(99, 0))
        other = Log(ThreadedStore(live.store), JOB, writer_id="other", url="http://other")
        await other.elect(lambda _: Elected(url="http://other"), job_uid="0b" * 16)
        async with asyncio.timeout(PATIENCE_S):
            await waiting  # nobody waits for what will never come
            while live.coordinator.health().role != "follower":  # noqa: ASYNC110 - it finds out at its heartbeat
                await asyncio.sleep(0.01)
        with pytest.raises(NotLeadingError) as caught:
            live.coordinator.desired()
        assert caught.value.leader == "http://other"
        async with asyncio.timeout(PATIENCE_S):
            while live.coordinator.health().role != "leader":  # noqa: ASYNC110 - the other one never says a word
                await asyncio.sleep(0.01)
            while live.coordinator.reign is None or live.coordinator.reign.core is None:  # noqa: ASYNC110 - it begins
                await asyncio.sleep(0.01)
        assert live.coordinator.health().term == 3, "it was elected once"


async def test_the_next_term_offers_the_newest_ready_that_is_whole() -> None:
    async with reigning() as live:
        view = await opened(live)
        copies = []
        for step in (3, 5):
            copies.append(live.upload(view, step))
            live.say()
            await live.until(lambda desired, step=step: desired.ready_step == step)  # type: ignore[misc] # bound now
    live.store.objects[Key(copies[1].index_key)] += b" "
    live.node.copies = []
    async with reigning(live.store, live.node) as after:
        answer = await after.open("2b" * 16)
        assert answer.attempt is not None
        assert (answer.attempt.source, answer.attempt.from_step) == ("ready", 3)
        (shard,) = answer.attempt.restore
        assert [(source.tier, source.key) for source in shard.sources] == [("object", copies[0].index_key)]
        state = read_log(live.store, JOB)
        assert state.attempt is not None
        assert "SHA-256" in state.attempt.why
