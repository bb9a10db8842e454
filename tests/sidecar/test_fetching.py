"""Bytes that come from elsewhere are believed only once they were hashed where they lie."""

from __future__ import annotations

import io
import json
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pytest
import xxhash
from tests.support.fake_store import FakeStore
from tests.support.scripted_trainer import image

from toprope.coordinator.wire import Inventory, ReadBackTask, RestoreShard
from toprope.sidecar.adapters.files import Disk, Pages
from toprope.sidecar.effects import Stage
from toprope.sidecar.memory import DroppedError, Memory, used_bytes
from toprope.sidecar.object_tier import read_back
from toprope.sidecar.parts import Parts, parts_of
from toprope.sidecar.ports import PeerError
from toprope.sidecar.staging import Stager, StagingError
from toprope.sidecar.values import Way
from toprope.store.checkpoint.codec import pack
from toprope.store.checkpoint.manifest import File, Packed, encode, sha256
from toprope.store.checkpoint.shard import hash_image, index_of
from toprope.store.names import Key, index_key, shard_key
from toprope.trainer_hooks.link.slot import Page, SlotState, write_page
from toprope.trainer_hooks.link.wire import ALL, DIGESTS

UID, NEW = "1a" * 16, "2b" * 16
BODY = image(attempt=1, attempt_uid=UID, step=1, rank=0, world=1, payload=4096, job_uid="0b" * 16)
DIGEST = xxhash.xxh3_128(BODY).hexdigest()
HELD = Page(state=SlotState.HASHED, world=1, attempt=1, attempt_uid=UID, step=1, bytes=len(BODY), digest=DIGEST)


@dataclass
class FakePeers:
    """Other sidecars: what each serves, by the part of its url before the path."""

    served: dict[str, bytes] = field(default_factory=dict)
    listed: dict[str, bytes] = field(default_factory=dict)
    received: int = 0

    async def watch(self, url: str, *, after: int) -> Inventory:
        raise PeerError(url)

    def receive(self, url: str, into: memoryview, *, begin: int | None = None, paced: bool = False) -> None:
        body = self._body(url)
        into[:] = body if begin is None else body[begin : begin + len(into)]
        self.received += len(into)

    def parts(self, url: str, *, of_bytes: int) -> Parts:
        """List parts as they were before anything went wrong on the way."""
        body = self._body(url)
        assert of_bytes == len(body)
        return parts_of(memoryview(self.listed.get(url.partition("/v1/")[0], body)), name=url)

    def _body(self, url: str) -> bytes:
        body = self.served.get(url.partition("/v1/")[0])
        if body is None:
            raise PeerError(f"{url}: away")
        return body

    async def acknowledge(self, url: str, *, digest: str) -> None:
        raise PeerError(url)


@pytest.fixture
def memory(memory_dir: Path) -> Memory:
    memory = Memory(memory_dir / "job", Pages(), limit_bytes=None)
    memory.make_directories()
    return memory


def wrong(body: bytes) -> bytes:
    """The bytes with one bit flipped, well behind the header."""
    return body[:2000] + bytes([body[2000] ^ 1]) + body[2001:]


# Staging


def asked(*tensors: str, ways: tuple[Way, ...]) -> Stage:
    """Return what is asked for when these tensors of the shard are wanted."""
    return Stage(
        attempt_uid=NEW,
        source_attempt_uid=UID,
        step=1,
        shard=RestoreShard(rank=0, bytes=len(BODY), digest=DIGEST, sources=()),
        ways=ways,
        tensors=frozenset(tensors),
        part=1,
    )


def staging(memory: Memory, peers: FakePeers, objects: FakeStore, *ways: Way) -> Callable[[], tuple[str, bytes]]:
    """Return a function that stages, and gives the tier that the shard came from and its bytes."""
    request = asked(ALL, ways=ways)
    stager = Stager(memory=memory, peers=peers, objects=objects, doubt=lambda *_: None)

    def stage() -> tuple[str, bytes]:
        staged = stager.stage(request).shard
        return staged.tier, Path(staged.path).read_bytes()[: staged.bytes]

    return stage


def test_of_an_object_only_the_tensors_that_are_wanted_are_fetched_each_checked_by_its_own_digest(
    memory: Memory,
) -> None:
    def stage(objects: FakeStore, *tensors: str) -> tuple[frozenset[str], bytes]:
        request = asked(*tensors, ways=(OBJECT,))
        staged = Stager(memory=memory, peers=FakePeers(), objects=objects, doubt=lambda *_: None).stage(request)
        return staged.tensors, Path(staged.shard.path).read_bytes()

    (weight, document) = STORED.tensors
    assert weight.end - weight.begin == 4096
    tensors, found = stage(stored(wrong(BODY)))  # what is wrong is in a tensor that nobody wants
    assert tensors == frozenset()
    assert found[: weight.begin] == BODY[: weight.begin]
    assert found[weight.begin : weight.end] == bytes(4096)
    assert found[document.begin :] == BODY[document.begin :]
    tensors, found = stage(stored(BODY), weight.name)
    assert (tensors, found) == (frozenset({weight.name}), BODY)
    beside = [path for path in (memory.root / "stage").iterdir() if path.suffix == DIGESTS]
    assert [json.loads(path.read_bytes()) for path in beside] == [{one.name: one.digest for one in STORED.tensors}]
    with pytest.raises(StagingError, match=f"its tensor {weight.name} has digest .*; expected {weight.digest}"):
        stage(stored(wrong(BODY)), weight.name)
    with pytest.raises(StagingError, match=f"its header has digest .*; expected {STORED.head.digest}"):
        stage(stored(bytes([BODY[0] ^ 1]) + BODY[1:]))


PEER = Way(kind="node", tier="peer", node="b", url="http://b")
STORED = index_of(
    hash_image(memoryview(BODY), name="k"),
    key=shard_key("job", attempt=1, step=1, rank=0, world=1, nonce="0a"),
)
INDEX = index_key("job", attempt=1, step=1, rank=0, world=1, sha256=sha256(encode(STORED)))
OBJECT = Way(kind="object", tier="object", key=INDEX)


def stored(body: bytes) -> FakeStore:
    """A store with these bytes in the place of the shard."""
    objects = FakeStore()
    objects.create(Key(STORED.files[0].key), body)
    objects.create(INDEX, encode(STORED))
    return objects


def some_of(memory: Memory, peers: FakePeers, *tensors: str) -> tuple[frozenset[str], bytes, dict[str, str]]:
    """Stage these tensors from a peer; return what is there, the file, and the digests beside it."""
    shard = RestoreShard(rank=0, bytes=len(BODY), digest=DIGEST, sources=())
    names = frozenset(tensors)
    request = Stage(attempt_uid=NEW, source_attempt_uid=UID, step=1, shard=shard, ways=(PEER,), tensors=names, part=1)
    staged = Stager(memory=memory, peers=peers, objects=FakeStore(), doubt=lambda *_: None).stage(request)
    path = Path(staged.shard.path)
    return staged.tensors, path.read_bytes(), json.loads(path.with_suffix(DIGESTS).read_bytes())


def test_of_a_peer_s_copy_only_the_tensors_that_are_wanted_are_received(memory: Memory) -> None:
    (weight, document) = STORED.tensors
    peers = FakePeers({"http://b": BODY})
    tensors, found, digests = some_of(memory, peers)
    assert (tensors, found[: weight.begin], found[document.begin :]) == (
        frozenset(),
        BODY[: weight.begin],
        BODY[document.begin :],
    )
    assert found[weight.begin : weight.end] == bytes(4096), "nothing that was ever saved"
    assert peers.received == len(BODY) - 4096
    assert digests == {one.name: one.digest for one in STORED.tensors}
    assert some_of(memory, peers, weight.name)[:2] == (frozenset({weight.name}), BODY)


def test_what_a_peer_lists_or_sends_that_is_not_of_the_source_is_refused(memory: Memory) -> None:
    (weight, _) = STORED.tensors
    with pytest.raises(StagingError, match=f"its digest is .*; expected {DIGEST}"):
        some_of(memory, FakePeers({"http://b": wrong(BODY)}))
    changed = FakePeers({"http://b": wrong(BODY)}, listed={"http://b": BODY})
    with pytest.raises(StagingError, match=f"its tensor {weight.name} has digest .*; expected {weight.digest}"):
        some_of(memory, changed, weight.name)
    with pytest.raises(StagingError, match=r"http://b.*: away"):
        some_of(memory, FakePeers())


def test_wrong_bytes_of_a_peer_are_not_staged_and_the_next_way_is_tried(memory: Memory) -> None:
    peers, objects = FakePeers({"http://b": wrong(BODY)}), stored(BODY)
    assert staging(memory, peers, objects, PEER, OBJECT)() == ("object", BODY)
    peers.served["http://b"] = BODY
    assert staging(memory, peers, objects, PEER, OBJECT)() == ("peer", BODY)


def test_what_does_not_fit_is_refused_with_both_numbers_before_a_byte_is_taken(memory_dir: Path) -> None:
    memory = Memory(memory_dir / "job", Pages(), limit_bytes=len(BODY) - 1)
    memory.make_directories()
    peers = FakePeers({"http://b": BODY})
    needed = rf"{len(BODY)} bytes of memory needed; .*{len(BODY) - 1}"
    with pytest.raises(StagingError, match=needed):
        staging(memory, peers, stored(BODY), PEER, OBJECT)()
    assert peers.received == 0
    assert used_bytes(memory.root) == 0


def test_wrong_bytes_of_the_object_store_are_not_staged(memory: Memory) -> None:
    objects = stored(wrong(BODY))
    with pytest.raises(StagingError, match=r"peer of b: .*away; object job/shards.*: its digest is .*; expected "):
        staging(memory, FakePeers(), objects, PEER, OBJECT)()
    objects.objects[INDEX] += b" "
    with pytest.raises(StagingError, match=r"index.json: SHA-256 is .*, expected "):
        staging(memory, FakePeers(), objects, PEER, OBJECT)()


RAW = shard_key("job", attempt=1, step=1, rank=0, world=1, nonce="0a")
PACKED_KEY = shard_key("job", attempt=1, step=1, rank=0, world=1, nonce="0a", packed=True)


def packed() -> tuple[FakeStore, Way]:
    """A store with the shard in a packed file, and the way to it."""
    body = io.BytesIO()
    made = pack(memoryview(BODY), body.write)
    file = File(
        key=PACKED_KEY,
        bytes=len(BODY),
        digest=DIGEST,
        packed=Packed(codec="zstd", bytes=made.bytes, digest=made.digest),
    )
    index = msgspec.structs.replace(STORED, files=(file,))
    key = index_key("job", attempt=1, step=1, rank=0, world=1, sha256=sha256(encode(index)))
    objects = FakeStore()
    objects.create(PACKED_KEY, body.getvalue())
    objects.create(key, encode(index))
    return objects, Way(kind="object", tier="object", key=key)


class MisreadStore(FakeStore):
    """Has the right bytes, and sends a wrong one of this object the first ``times`` times that its place is read."""

    def __init__(self, objects: FakeStore, key: Key, *, at: int, times: int) -> None:
        super().__init__()
        self.objects.update(objects.objects)
        self.key, self.at, self.times = key, at % len(objects.objects[key]), times

    def size(self, key: Key) -> int:
        return len(self.objects[key])

    def read(self, key: Key, *, start: int = 0, length: int | None = None, uncached: bool = False) -> bytes:
        body = super().read(key, start=start, length=length, uncached=uncached)
        at = self.at - start
        if key == self.key and self.times and 0 <= at < len(body):
            self.times -= 1
            return body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
        return body


@pytest.mark.parametrize("wanted", [ALL, STORED.tensors[0].name])
@pytest.mark.parametrize(
    ("what", "at", "said"),
    [
        ("raw", 2000, r"has digest|its digest is"),
        ("index", 100, r"index.json: SHA-256 is"),
        ("packed", 20, r"a frame can't be unpacked"),
        ("packed", -1, r"it does not end with a seek table"),
    ],
    ids=["raw", "index", "frame", "table"],
)
def test_bytes_that_came_wrong_from_the_object_store_are_asked_for_once_more(
    memory: Memory, wanted: str, what: str, at: int, said: str
) -> None:
    objects, way = packed() if what == "packed" else (stored(BODY), OBJECT)
    key = {"raw": RAW, "index": INDEX, "packed": PACKED_KEY}[what]

    def stage(times: int) -> bytes:
        misread = MisreadStore(objects, key, at=at, times=times)
        request = asked(wanted, ways=(way,))
        staged = Stager(memory=memory, peers=FakePeers(), objects=misread, doubt=lambda *_: None).stage(request)
        assert misread.times == 0
        return Path(staged.shard.path).read_bytes()[: len(BODY)]

    assert stage(1) == BODY
    with pytest.raises(StagingError, match=said):
        stage(2)


def test_an_index_of_another_image_is_not_staged(memory: Memory) -> None:
    longer = image(attempt=1, attempt_uid=UID, step=1, rank=0, world=1, payload=8192, job_uid="0b" * 16)
    other = index_of(hash_image(memoryview(longer), name="k"), key=Key(STORED.files[0].key))
    key = index_key("job", attempt=1, step=1, rank=0, world=1, sha256=sha256(encode(other)))
    objects = stored(longer)
    objects.create(key, encode(other))
    with pytest.raises(StagingError, match=f"its image has {len(longer)} bytes; expected {len(BODY)}"):
        staging(memory, FakePeers(), objects, Way(kind="object", tier="object", key=key))()
    alike = image(attempt=1, attempt_uid=NEW, step=1, rank=0, world=1, payload=4096, job_uid="0b" * 16)
    assert len(alike) == len(BODY)
    other = index_of(hash_image(memoryview(alike), name="k"), key=Key(STORED.files[0].key))
    key = index_key("job", attempt=1, step=1, rank=0, world=1, sha256=sha256(encode(other)))
    objects = stored(alike)
    objects.create(key, encode(other))
    for tensors in (frozenset({ALL}), frozenset[str]()):
        shard = RestoreShard(rank=0, bytes=len(BODY), digest=DIGEST, sources=())
        way = Way(kind="object", tier="object", key=key)
        request = Stage(
            attempt_uid=NEW, source_attempt_uid=UID, step=1, shard=shard, ways=(way,), tensors=tensors, part=1
        )
        with pytest.raises(StagingError, match=f"its digest is {other.digest}; expected {DIGEST}"):
            Stager(memory=memory, peers=FakePeers(), objects=objects, doubt=lambda *_: None).stage(request)


def test_staged_files_of_other_attempts_go_and_those_of_the_current_stay(memory: Memory) -> None:
    for uid in (UID, NEW):
        memory.staged(uid, 0, 1).write_bytes(b"x")
    memory.drop_staged(keep=NEW)
    assert [path.name for path in (memory.root / "stage").iterdir()] == [memory.staged(NEW, 0, 1).name]
    memory.drop_staged(keep="")
    assert list((memory.root / "stage").iterdir()) == []


class CountingStore(FakeStore):
    """Remembers which reads were to go past the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.uncached: list[bool] = []

    def read(self, key: Key, *, start: int = 0, length: int | None = None, uncached: bool = False) -> bytes:
        self.uncached.append(uncached)
        return super().read(key, start=start, length=length, uncached=uncached)


def test_an_object_is_read_back_from_the_medium(memory: Memory) -> None:
    objects = CountingStore()
    objects.create(Key("k"), BODY)
    task = ReadBackTask(node="a", key="k", bytes=len(BODY), digest=DIGEST)
    assert read_back(objects, task).ok
    assert objects.uncached[-1]


# Spares


def test_a_spare_is_believed_only_with_a_page_that_says_it_is_whole_and_its_own(memory: Memory) -> None:
    paths = memory.spare(0, 0)
    memory.fit(paths.data, len(BODY))[:] = BODY
    write_page(paths.page, HELD)
    assert memory.check_spare(0, 0).digest == DIGEST
    for page in (replace(HELD, state=SlotState.EMPTY), replace(HELD, state=SlotState.SEALED), replace(HELD, rank=1)):
        write_page(paths.page, page)
        with pytest.raises(DroppedError, match="no whole copy"):
            memory.check_spare(0, 0)


# Files


def test_no_page_of_a_new_slot_is_still_to_be_found_by_the_kernel(memory: Memory) -> None:
    memory.make_slots(0, (0,), 16 << 20)
    view = memory.view(memory.slot(0, 0).data)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for start in range(0, len(view), 4096):
        view[start] = 1
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 100


def test_a_local_file_is_synced_when_it_was_written_and_before_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, int]] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        synced.append((str(Path(f"/proc/self/fd/{descriptor}").readlink()), os.fstat(descriptor).st_size))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    Disk().write(tmp_path / "file", memoryview(BODY))
    assert synced == [(str(tmp_path / "file"), len(BODY))]
    Disk().sync_directory(tmp_path)
    assert synced[1][0] == str(tmp_path)
    assert (tmp_path / "file").read_bytes() == BODY
