"""What ranks of a node have alike is stored by one of them, and whatever becomes of that one, no READY misses it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random

import msgspec
import pytest
from tests.support.fake_store import FakeStore
from tests.support.stores import JobBuilder, safetensors_image, shard_image

from toprope.coordinator.commits import Commits
from toprope.coordinator.effects import Commit, ReadAhead
from toprope.coordinator.events import ReadHere
from toprope.coordinator.index_checks import checked, expected_of
from toprope.coordinator.intents import CommitStep, make_manifest
from toprope.coordinator.readiness import Receipt
from toprope.coordinator.wire import Copy, Inventory, ReadBack, ReadBackTask
from toprope.sidecar.object_tier import ObjectTier
from toprope.sidecar.packing import Codec
from toprope.sidecar.siblings import Siblings
from toprope.sidecar.values import Shard
from toprope.store.checkpoint.files import image_chunks
from toprope.store.checkpoint.incremental import HEAD, Placed
from toprope.store.checkpoint.manifest import File, Index, Manifest, encode, sha256
from toprope.store.checkpoint.ready import read_index, read_index_at, read_manifest
from toprope.store.checkpoint.shard import parse_header
from toprope.store.digest import digest
from toprope.store.errors import CorruptObjectError, UnavailableError
from toprope.store.look.verify import verify_checkpoint
from toprope.store.names import Key

WORLD = 4
OWN, RUNNING, TABLE = 120_000, 100_000, 80_000
LITTLE = 4_000
"""Of each file: its header, and the document."""


def replica(*, step: int, rank: int, attempt_uid: str = "", **of: int | str) -> bytes:
    """A rank of DDP: its own part of the parameters, buffers that all have, and a table that never changes."""
    plain = shard_image(step=step, rank=rank, **of)  # type: ignore[arg-type] # as put_shard gives them
    header = parse_header(plain, size=len(plain), name="plain")
    last = header.extents[-1]
    document = plain[last.begin : last.end]
    tensors = {
        "model.weight": ("U8", [OWN], Random(f"{step} {rank}").randbytes(OWN)),
        "model.running": ("U8", [RUNNING], Random(step).randbytes(RUNNING)),
        "model.table": ("U8", [TABLE], Random(-1).randbytes(TABLE)),
        "__document__": ("U8", [len(document)], document),
    }
    return safetensors_image(tensors, header.metadata | ({"attempt_uid": attempt_uid} if attempt_uid else {}))


def built(codec: Codec = "none", store: FakeStore | None = None) -> JobBuilder:
    return JobBuilder(store or FakeStore(), image=replica, codec=codec, world=WORLD).begin()


def shard_of(image: bytes, builder: JobBuilder, *, step: int, rank: int) -> Shard:
    current = builder.log.state.attempt
    assert current is not None
    size, found = len(image), digest(image)
    return Shard(attempt=1, attempt_uid=current.uid, step=step, rank=rank, world=WORLD, bytes=size, digest=found)


def put(tier: ObjectTier, builder: JobBuilder, *, step: int, rank: int, nonce: str) -> Copy:
    image = replica(step=step, rank=rank, world=WORLD, job_uid=builder.log.state.job_uid)
    return tier.put(shard_of(image, builder, step=step, rank=rank), memoryview(image), nonce=nonce)


def stored_bytes(store: FakeStore, step: int) -> int:
    return sum(len(body) for key, body in store.objects.items() if f"/s{step:09d}/" in key and ".index." not in key)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_what_four_ranks_have_alike_is_stored_once_and_what_has_not_changed_never_again(codec: Codec) -> None:
    store = FakeStore()
    builder = built(codec, store)
    seqs = [builder.checkpoint(step) for step in (10, 20, 30)]
    assert stored_bytes(store, 10) <= WORLD * (OWN + LITTLE) + RUNNING + TABLE
    for step in (20, 30):
        assert stored_bytes(store, step) <= WORLD * (OWN + LITTLE) + RUNNING
    for step, seq in zip((10, 20, 30), seqs, strict=True):
        assert verify_checkpoint(store, builder.log.state, seq).damages == ()
        manifest, _ = read_manifest(store, builder.log.state, seq)
        for shard in manifest.shards:
            image = b"".join(image_chunks(store, read_index(store, manifest, shard)))
            assert image == replica(step=step, rank=shard.rank, world=WORLD, job_uid=builder.log.state.job_uid)


def test_a_rank_uploads_while_the_one_that_it_rests_on_does_and_its_index_comes_after() -> None:
    first_began, second_came = threading.Event(), threading.Event()
    written: list[str] = []

    class Slow(FakeStore):
        def create(self, key: Key, body: bytes | memoryview) -> None:
            if "rank-00000" in key and ".index." not in key:
                first_began.set()
                assert second_came.wait(20)
            super().create(key, body)
            written.append(key)
            if "rank-00001" in key and ".index." not in key:
                second_came.set()

    builder = built(store=Slow())
    tier = ObjectTier(builder.store, "job", codec="none")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(put, tier, builder, step=10, rank=0, nonce="0a")
        assert first_began.wait(20)
        second = pool.submit(put, tier, builder, step=10, rank=1, nonce="1a")
        receipts = [first.result(30), second.result(30)]
    mine = [key for key in written if "rank-0000" in key]
    assert mine == [receipts[1].key, receipts[0].key, receipts[0].index_key, receipts[1].index_key]
    assert [receipt.rests_on for receipt in receipts] == [(), (receipts[0].key,)]


def test_a_rank_whose_elder_was_not_stored_says_so_and_stores_all_by_itself_the_next_time() -> None:
    began, go = threading.Event(), threading.Event()

    class Failing(FakeStore):
        def create(self, key: Key, body: bytes | memoryview) -> None:
            if "rank-00000" in key:
                began.set()
                assert go.wait(20)
                raise UnavailableError(f"{key}: no answer")
            super().create(key, body)
            go.set()

    builder = JobBuilder(Failing(), image=replica, codec="none", world=WORLD).begin()
    go.clear()
    tier = ObjectTier(builder.store, "job", codec="none")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(put, tier, builder, step=10, rank=0, nonce="0a")
        assert began.wait(20)
        second = pool.submit(put, tier, builder, step=10, rank=1, nonce="1a")
        with pytest.raises(UnavailableError, match="no answer"):
            first.result(30)
        with pytest.raises(UnavailableError, match="rank 0, which has tensors that this shard has too"):
            second.result(30)
    again = put(tier, builder, step=10, rank=1, nonce="1b")
    assert again.rests_on == ()
    assert b"".join(image_chunks(builder.store, read_index_at(builder.store, Key(again.index_key)))) == replica(
        step=10, rank=1, world=WORLD, job_uid=builder.log.state.job_uid
    )


def test_what_is_alike_but_little_is_stored_by_each() -> None:
    builder = built()
    tier = ObjectTier(builder.store, "job", codec="none", siblings=Siblings(shared_bytes=RUNNING + TABLE + 1))
    assert [put(tier, builder, step=10, rank=rank, nonce="0a").rests_on for rank in range(2)] == [(), ()]


def test_a_tensor_of_our_name_is_left_to_nobody() -> None:
    builder = built()
    plain = replica(step=10, rank=1, world=WORLD, job_uid=builder.log.state.job_uid)
    header = parse_header(plain, size=len(plain), name="plain")
    tensors = {one.name: (one.dtype, list(one.shape), plain[one.begin : one.end]) for one in header.extents}
    odd = safetensors_image({HEAD: ("U8", [3], b"abc"), **tensors}, header.metadata)
    tier = ObjectTier(builder.store, "job", codec="none")
    put(tier, builder, step=10, rank=0, nonce="0a")
    receipt = tier.put(shard_of(odd, builder, step=10, rank=1), memoryview(odd), nonce="1a")
    assert (receipt.rests_on, builder.store.read(Key(receipt.key))) == ((), odd)


def test_a_rank_does_not_rest_on_what_it_stored_itself_before() -> None:
    builder = built()
    tier = ObjectTier(builder.store, "job", codec="none")
    assert [put(tier, builder, step=10, rank=0, nonce=nonce).rests_on for nonce in ("0a", "0b")] == [(), ()]


def test_what_another_rank_has_of_an_older_step_is_named_only_on_the_same_base(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = built()
    seq = builder.checkpoint(10)
    tier = ObjectTier(builder.store, "job", codec="none")
    old = put(tier, builder, step=20, rank=0, nonce="0a")
    assert read_index_at(builder.store, Key(old.index_key)).base == seq
    monkeypatch.setattr(tier, "_base_of", lambda _: None)
    new = put(tier, builder, step=20, rank=1, nonce="1a")
    index = read_index_at(builder.store, Key(new.index_key))
    assert ([file.key for file in index.files], index.base) == ([new.key, old.key], None)


@pytest.mark.parametrize(("kept", "borrows"), [(62, True), (63, False)])
def test_no_more_files_are_named_than_an_index_may_name(kept: int, borrows: bool) -> None:  # noqa: FBT001 - a column
    builder = built()
    key = Key(put(ObjectTier(builder.store, "job"), builder, step=10, rank=0, nonce="0a").index_key)
    whole = read_index_at(builder.store, key)
    image = replica(step=10, rank=0, world=WORLD, job_uid=builder.log.state.job_uid)
    tensor = whole.tensors[0]
    old = {f"old{n}": Placed(file=File(key=f"old{n}", bytes=1, digest=""), tensor=tensor) for n in range(kept)}
    siblings = Siblings()
    first, second = (shard_of(image, builder, step=10, rank=rank) for rank in (0, 1))
    with siblings.turn(first, whole, None, {}) as (turn, _):
        turn.index = whole
    with siblings.turn(second, whole, None, old) as (turn, borrowed):
        assert bool(borrowed.turns) is borrows
        turn.index = whole


# On the way to READY


class Way:
    """The coordinator's book of a step, told of receipts of node ``a``; ``b`` reads back what is asked for."""

    def __init__(self) -> None:
        self.builder = built()
        self.tier = ObjectTier(self.builder.store, "job", codec="none")
        state = self.builder.log.state
        self.commits = Commits(attempt=state.attempt, last_step=0, retry_s=1.0, read_back_deadline_s=60.0)

    def told(self, *copies: Copy) -> None:
        self.commits.collect(
            Inventory(
                job="job",
                job_uid="",
                node="a",
                boot_id="",
                incarnation="",
                version=1,
                url="http://a",
                domain={},
                copies=copies,
            )
        )

    def uploaded(self, ranks: range, *, nonce: str) -> list[Copy]:
        return [put(self.tier, self.builder, step=10, rank=rank, nonce=f"{nonce}{rank}") for rank in ranks]

    def asked(self) -> tuple[ReadBackTask, ...]:
        effects = self.commits.steer(last_step=0, readers=["a", "b"], now_s=1.0)
        assert all(isinstance(effect, ReadAhead) for effect in effects)
        return self.commits.tasks(readers=["a", "b"], now_s=1.0)

    def found(self, key: str, digest: str) -> None:
        """Let the coordinator have read back an object itself, and found this digest."""
        result = ReadBack(key=key, digest=digest, ok=True)
        self.commits.read_here(ReadHere(key=key, result=result, now_s=1.0))

    def intent(self) -> CommitStep:
        for task in self.asked():
            self.found(task.key, digest(self.builder.store.read(Key(task.key))))
        (effect,) = self.commits.steer(last_step=0, readers=["a", "b"], now_s=2.0)
        assert isinstance(effect, Commit)
        return effect.intent

    def made(self, intent: CommitStep, *, change: Callable[[Index], Index] = lambda index: index) -> Manifest | str:
        indexes = [self.checked(intent, one, change=change) for one in (*intent.receipts, *intent.others)]
        return make_manifest(self.builder.log.state, intent, indexes, {})

    def checked(self, intent: CommitStep, receipt: Receipt, *, change: Callable[[Index], Index]) -> Index:
        body = encode(change(read_index_at(self.builder.store, Key(receipt.copy.index_key))))
        expected = expected_of(self.builder.log.state, intent, receipt)
        return checked(
            body,
            msgspec.structs.replace(expected, copy=msgspec.structs.replace(expected.copy, index_sha256=sha256(body))),
        )


def test_a_step_whose_ranks_rest_on_one_another_may_become_ready() -> None:
    way = Way()
    way.told(*way.uploaded(range(WORLD), nonce="a"))
    intent = way.intent()
    assert intent.others == ()
    assert isinstance(way.made(intent), Manifest)


def test_an_upload_that_was_repeated_is_read_back_too_if_another_rank_rests_on_it() -> None:
    way = Way()
    before = way.uploaded(range(WORLD), nonce="b")
    way.told(*before)
    way.tier = ObjectTier(way.builder.store, "job", codec="none")  # another life: it knows nothing of the first
    (again,) = way.uploaded(range(1), nonce="a")
    way.told(again)
    assert {task.key for task in way.asked()} == {again.key, *(copy.key for copy in before)}
    for copy in (again, *before[1:]):
        way.found(copy.key, copy.stored_digest)
    assert [task.key for task in way.asked() if task.key not in way.commits.found] == [before[0].key]
    intent = way.intent()
    assert [receipt.copy for receipt in intent.receipts] == [again, *before[1:]]
    assert [receipt.copy for receipt in intent.others] == [before[0]]
    assert isinstance(way.made(intent), Manifest)
    assert "nothing it may point into" in str(way.made(without_others(intent)))


def without_others(intent: CommitStep) -> CommitStep:
    return CommitStep(
        attempt=intent.attempt, attempt_uid=intent.attempt_uid, step=intent.step, receipts=intent.receipts
    )


def test_a_shard_that_rests_on_what_nobody_tells_of_is_not_there_yet() -> None:
    way = Way()
    copies = way.uploaded(range(WORLD), nonce="a")
    way.told(*copies[1:])
    way.tier = ObjectTier(way.builder.store, "job", codec="none")
    (other,) = way.uploaded(range(1), nonce="b")
    way.told(other)
    assert way.asked() == ()
    way.told(copies[0])
    assert way.intent().others == ()


def test_what_a_rank_rests_on_is_found_damaged_before_anything_is_ready() -> None:
    way = Way()
    before = way.uploaded(range(WORLD), nonce="b")
    way.told(*before)
    way.tier = ObjectTier(way.builder.store, "job", codec="none")
    way.told(*way.uploaded(range(1), nonce="a"))
    for task in way.asked():
        way.found(task.key, "0" * 32 if task.key == before[0].key else task.digest)
    (said,) = way.commits.steer(last_step=0, readers=["a", "b"], now_s=2.0)
    assert before[0].key in str(said)
    assert 10 in way.commits.dead


def test_an_index_whose_tensors_lie_outside_of_its_own_file_makes_nothing_ready() -> None:
    def change(index: Index) -> Index:
        last = index.tensors[-1]
        assert last.file == 0
        return msgspec.structs.replace(
            index, tensors=(*index.tensors[:-1], msgspec.structs.replace(last, end=last.end + 10**6))
        )

    way = Way()
    way.told(*way.uploaded(range(WORLD), nonce="a"))
    with pytest.raises(CorruptObjectError, match="does not lie inside its file"):
        way.made(way.intent(), change=change)


@pytest.mark.parametrize("lie", ["digest", "begin"])
def test_what_a_rank_says_of_the_file_of_another_must_be_what_that_one_says(lie: str) -> None:
    def change(index: Index) -> Index:
        if index.rank == 0:
            return index
        number = next(at for at, one in enumerate(index.tensors) if one.file == 1)
        true = index.tensors[number]
        false = {
            "digest": msgspec.structs.replace(true, digest="0" * 32),
            "begin": msgspec.structs.replace(true, begin=true.begin - 1, end=true.end - 1),
        }
        tensors = list(index.tensors)
        tensors[number] = false[lie]
        return msgspec.structs.replace(index, tensors=tuple(tensors))

    way = Way()
    way.told(*way.uploaded(range(WORLD), nonce="a"))
    assert "nothing it may point into has tensor 'model.running'" in str(way.made(way.intent(), change=change))
