"""Verify finds every flipped byte, and says where it is as exactly as the digests can tell."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from tests.support.fake_store import FakeStore
from tests.support.stores import JobBuilder, adapter_image, small_store

from toprope.sidecar.packing import Codec
from toprope.store import digest
from toprope.store.checkpoint import ready as checkpoint
from toprope.store.checkpoint import shard
from toprope.store.checkpoint.manifest import Index, Manifest, Packed
from toprope.store.checkpoint.ready import check_places, read_index, read_index_at, read_manifest
from toprope.store.errors import CorruptObjectError, NothingToVerifyError, UnavailableError
from toprope.store.log.chain import read_log
from toprope.store.log.records import Retire
from toprope.store.look.show import named_objects, read_job, xxhsum_lines
from toprope.store.look.verify import plan, verify_checkpoint, verify_facts
from toprope.store.names import Key


def the_key(store: FakeStore, *parts: str) -> Key:
    (key,) = [key for key in store.objects if all(part in key for part in parts)]
    return key


def flip(store: FakeStore, key: Key, at: int) -> None:
    body = store.objects[key]
    store.objects[key] = body[:at] + bytes([body[at] ^ (1 << at % 8)]) + body[at + 1 :]


def test_a_good_store_has_no_damage() -> None:
    builder = small_store(FakeStore(), steps=(10, 20))
    state = read_log(builder.store, "job")
    assert plan(state) == (4, 5)
    assert [verify_checkpoint(builder.store, state, seq).damages for seq in plan(state)] == [(), ()]
    assert verify_facts(builder.store, state) == ()


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_an_old_file_that_has_rotted_damages_each_step_that_names_it(codec: Codec) -> None:
    store = FakeStore()
    builder = JobBuilder(store, image=adapter_image, codec=codec, world=1).begin()
    for step in (10, 20, 30):
        builder.checkpoint(step)
    old = the_key(store, "s000000010", "safetensors")
    manifest, _ = read_manifest(store, builder.log.state, 4)
    table = next(one for one in read_index(store, manifest, manifest.shards[0]).tensors if one.name == "model.table")
    flip(store, old, table.begin + 8 if codec == "none" else 200)
    state = read_log(store, "job")
    found = [damage for seq in plan(state) for damage in verify_checkpoint(store, state, seq).damages]
    assert [(damage.key, damage.step) for damage in found] == [(old, 10), (old, 20), (old, 30)]
    assert codec == "zstd" or {damage.tensor for damage in found} == {"model.table"}


def test_each_object_that_the_log_names_is_listed_once() -> None:
    store = FakeStore()
    small_store(store, steps=(10, 20))
    names = [named.key for named in named_objects(store, read_job(store, "job"))]
    assert sorted(names) == sorted(store.objects)
    sums = list(xxhsum_lines(named_objects(store, read_job(store, "job"))))
    assert sums == [f"{digest.digest(store.objects[key])}  {key}" for key in store.objects if "safetensors" in key]


def test_every_flipped_byte_of_a_checkpoint_is_found() -> None:
    store = FakeStore()
    small_store(store, steps=(10, 20))
    state = read_log(store, "job")
    of_20 = [key for key in store.objects if "s000000020" in key]
    assert len(of_20) == 5
    for key in of_20:
        good = store.objects[key]
        for at in range(len(good)):
            flip(store, key, at)
            damages = verify_checkpoint(store, state, 5).damages
            assert [damage.key for damage in damages] == [key], at
            assert (damages[0].job, damages[0].step, damages[0].attempt) == ("job", 20, 1)
            assert damages[0].rank == (None if "manifests" in key else int(key.partition("rank-")[2][:5]))
            if key.endswith(".safetensors"):
                begin, end = damages[0].begin, damages[0].end
                assert begin is not None
                assert end is not None
                assert begin <= at < end
            store.objects[key] = good
    assert verify_checkpoint(store, state, 5).damages == ()
    assert verify_checkpoint(store, state, 4).damages == ()


def test_a_changed_byte_of_a_header_that_still_says_the_same_is_found() -> None:
    store = FakeStore()
    small_store(store, steps=(10, 20, 30, 40))
    state = read_log(store, "job")
    changed = 0
    for key, good in list(store.objects.items()):
        begin = int.from_bytes(good[:8], "little") + 8
        if key.endswith(".safetensors") and good[begin - 1 : begin] == b" ":
            store.objects[key] = good[: begin - 1] + b"\t" + good[begin:]
            found = [damage for seq in state.live for damage in verify_checkpoint(store, state, seq).damages]
            assert [(damage.key, damage.tensor, damage.begin, damage.end) for damage in found] == [
                (key, None, 0, begin)
            ]
            store.objects[key] = good
            changed += 1
    assert changed, "no header is padded"


def test_every_flipped_byte_of_the_facts_is_found() -> None:
    store = FakeStore()
    small_store(store, steps=())
    state = read_log(store, "job")
    for key in [key for key in store.objects if "/facts/" in key]:
        good = store.objects[key]
        for at in range(len(good)):
            flip(store, key, at)
            assert [damage.key for damage in verify_facts(store, state)] == [key]
        store.objects[key] = good
        del store.objects[key]
        assert [damage.key for damage in verify_facts(store, state)] == [key]
        store.objects[key] = good


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 500, 4096])
def test_damage_names_the_tensor_wherever_chunks_end(chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "CHUNK_BYTES", chunk_bytes)
    store = FakeStore()
    small_store(store, steps=(10,))
    state = read_log(store, "job")
    assert verify_checkpoint(store, state, 4).damages == ()
    key = the_key(store, "rank-00001", ".safetensors")
    image = shard.hash_image(memoryview(store.objects[key]), name=key)
    weight = next(extent for extent in image.header.extents if extent.name == "model.weight")
    for at in (weight.begin, weight.end - 1):
        flip(store, key, at)
        (damage,) = verify_checkpoint(store, state, 4).damages
        assert (damage.tensor, damage.begin, damage.end) == ("model.weight", weight.begin, weight.end)
        flip(store, key, at)
    flip(store, key, 20)
    (damage,) = verify_checkpoint(store, state, 4).damages
    assert (damage.tensor, damage.begin, damage.end) == (None, 0, image.header.bytes)
    assert "header" in damage.what


def test_a_shard_that_is_cut_off_or_too_long_or_missing_is_found() -> None:
    store = FakeStore()
    small_store(store, steps=(10,))
    state = read_log(store, "job")
    key = the_key(store, "rank-00000", ".safetensors")
    good = store.objects[key]
    for length in (0, 8, len(good) - 30, len(good) - 1):
        store.objects[key] = good[:length]
        (damage,) = verify_checkpoint(store, state, 4).damages
        assert (damage.key, damage.rank, damage.begin, damage.end) == (key, 0, length, len(good))
        assert damage.tensor is not None
    store.objects[key] = good + b"\0"
    (damage,) = verify_checkpoint(store, state, 4).damages
    assert "expected" in damage.what
    del store.objects[key]
    (damage,) = verify_checkpoint(store, state, 4).damages
    assert (damage.key, damage.rank) == (key, 0)


def test_a_shard_of_another_rank_in_its_place_is_found() -> None:
    store = FakeStore()
    small_store(store, steps=(10,))
    first, second = (the_key(store, f"rank-0000{rank}", ".safetensors") for rank in (0, 1))
    store.objects[first] = store.objects[second]
    (damage,) = [
        one for one in verify_checkpoint(store, read_log(store, "job"), 4).damages if one.tensor == "model.weight"
    ]
    assert damage.rank == 0


def test_a_manifest_of_another_job_in_its_place_is_found() -> None:
    store = FakeStore()
    small_store(store, steps=(10,))
    small_store(store, steps=(10,), name="other")
    mine, other = (the_key(store, f"{name}/manifests/") for name in ("job", "other"))
    store.objects[mine] = store.objects[other]
    (damage,) = verify_checkpoint(store, read_log(store, "job"), 4).damages
    assert (damage.key, damage.rank) == (mine, None)


def test_a_store_that_does_not_answer_is_not_called_damaged() -> None:
    store = FakeStore()
    small_store(store, steps=(10,))
    state = read_log(store, "job")
    store.reads_lost = 1
    with pytest.raises(UnavailableError):
        verify_checkpoint(store, state, 4)


def test_the_plan_leaves_out_what_is_retired() -> None:
    builder = small_store(FakeStore(), steps=(10, 20, 30))
    builder.log.add(Retire(seqs=(4,)))
    assert plan(builder.log.state) == (5, 6)
    assert plan(builder.log.state, step=30) == (6,)
    with pytest.raises(NothingToVerifyError, match=r"no READY checkpoint of step 10; there are steps \[20, 30\]"):
        plan(builder.log.state, step=10)
    with pytest.raises(NothingToVerifyError, match="nothing to verify"):
        plan(JobBuilder(FakeStore()).begin().log.state)


def changed_manifest(change: dict[str, object]) -> Callable[[Manifest], Manifest]:
    return lambda manifest: msgspec.structs.replace(manifest, **change)


LYING_MANIFESTS: dict[str, tuple[Callable[[Manifest], Manifest], str]] = {
    "another step": (changed_manifest({"step": 11}), "but READY 4 is"),
    "another job": (changed_manifest({"job_uid": "0c" * 16}), "but READY 4 is"),
    "another attempt": (changed_manifest({"attempt_uid": "0c" * 16}), "but READY 4 is"),
    "a rank too few": (
        lambda manifest: msgspec.structs.replace(manifest, shards=manifest.shards[:1]),
        "does not name each of the 2 ranks",
    ),
    "a rank twice": (
        lambda manifest: msgspec.structs.replace(manifest, shards=manifest.shards[:1] * 2),
        "does not name each of the 2 ranks",
    ),
    "other sizes": (
        lambda manifest: msgspec.structs.replace(
            manifest, shards=(msgspec.structs.replace(manifest.shards[0], bytes=1), manifest.shards[1])
        ),
        "do not add up",
    ),
    "an index elsewhere": (
        lambda manifest: msgspec.structs.replace(
            manifest,
            shards=(msgspec.structs.replace(manifest.shards[0], index_key="../../etc/passwd"), manifest.shards[1]),
        ),
        "the manifest names '../../etc/passwd' instead",
    ),
}


@pytest.mark.parametrize("what", LYING_MANIFESTS)
def test_a_manifest_that_lies_under_its_true_hash_is_found(what: str) -> None:
    change, text = LYING_MANIFESTS[what]
    builder = JobBuilder(FakeStore()).begin()
    seq = builder.checkpoint(10, change_manifest=change)
    damages = verify_checkpoint(builder.store, builder.log.state, seq).damages
    assert text in damages[0].what


def with_file(**change: object) -> Callable[[Index], Index]:
    return lambda index: msgspec.structs.replace(index, files=(msgspec.structs.replace(index.files[0], **change),))


def with_tensor(**change: object) -> Callable[[Index], Index]:
    return lambda index: msgspec.structs.replace(
        index, tensors=(msgspec.structs.replace(index.tensors[0], **change), *index.tensors[1:])
    )


LYING_INDEXES: dict[str, tuple[Callable[[Index], Index], str]] = {
    "another rank": (lambda index: msgspec.structs.replace(index, rank=1 - index.rank), "expected"),
    "another step": (lambda index: msgspec.structs.replace(index, step=11), "expected"),
    "two files": (lambda index: msgspec.structs.replace(index, files=index.files * 2), "it names 2 files"),
    "no file": (lambda index: msgspec.structs.replace(index, files=()), "it names 0 files"),
    "a tensor of another file": (with_tensor(file=1), "lies in file 1 of 1"),
    "a file elsewhere": (with_file(key="job/log/00000000000000000000.json"), "not one of that rank and step"),
    "a file outside": (with_file(key="job/shards/../../x.safetensors"), "not one of that rank and step"),
    "a file of another job": (
        with_file(key="other/shards/a1/s000000010/rank-00000-of-00002-0a.safetensors"),
        "not one of that",
    ),
    "another size": (with_file(bytes=5), "does not lie inside"),
    "another digest": (with_file(digest="0" * 32), f"expected {'0' * 32}"),
    "an image of another size": (lambda index: msgspec.structs.replace(index, bytes=5), "another size or digest"),
    "an image of another digest": (
        lambda index: msgspec.structs.replace(index, digest="0" * 32),
        "another size or digest",
    ),
    "a header in the midst": (
        lambda index: msgspec.structs.replace(index, head=msgspec.structs.replace(index.head, end=index.head.end + 8)),
        "does not lie inside",
    ),
    "a header of another file": (
        lambda index: msgspec.structs.replace(index, head=msgspec.structs.replace(index.head, file=-1)),
        "lies in file -1 of 1",
    ),
    "a packed file by the name of one that is not": (
        with_file(packed=Packed(codec="zstd", bytes=500, digest="0" * 32)),
        "not one of a shard",
    ),
    "a file that can't be packed so small": (
        lambda index: with_file(key=f"{index.files[0].key}.zst", packed=Packed(codec="zstd", bytes=0, digest="0" * 32))(
            index
        ),
        "0 bytes can't be",
    ),
    "a tensor past the end": (with_tensor(end=10**9), "does not lie inside"),
    "a tensor backwards": (with_tensor(end=8), "does not lie inside"),
    "another name": (with_tensor(name="model.other"), "different tensors"),
    "another shape": (with_tensor(shape=(1, 3)), "different tensors"),
    "a tensor left out": (
        lambda index: msgspec.structs.replace(index, tensors=index.tensors[1:]),
        "and its image",
    ),
}


@pytest.mark.parametrize("what", LYING_INDEXES)
def test_an_index_that_lies_under_its_true_hash_is_found(what: str) -> None:
    change, text = LYING_INDEXES[what]
    builder = JobBuilder(FakeStore()).begin()
    seq = builder.checkpoint(10, change_index=change)
    damages = verify_checkpoint(builder.store, builder.log.state, seq).damages
    assert text in damages[0].what
    assert [damage.rank for damage in damages] == [0, 1]


def test_an_index_that_is_read_by_its_key_alone_may_lie_no_more_than_others() -> None:
    builder = JobBuilder(FakeStore()).begin()
    builder.checkpoint(10, change_index=with_file(key="other/shards/a1/s000000010/rank-00000-of-00002-0a.safetensors"))
    keys = [key for key in builder.store.list("job/") if ".index." in key]
    for key in keys:
        with pytest.raises(CorruptObjectError, match="not one of that rank and step"):
            read_index_at(builder.store, key)


def test_a_header_of_more_than_the_limit_is_refused() -> None:
    builder = JobBuilder(FakeStore()).begin()
    builder.checkpoint(10)
    key = next(key for key in builder.store.list("job/") if ".index." in key)
    index = read_index_at(builder.store, key)
    most = shard.LENGTH_BYTES + shard.MAX_HEADER_BYTES

    def with_header(size: int) -> Index:
        head = msgspec.structs.replace(index.head, end=size)
        file = msgspec.structs.replace(index.files[0], bytes=size)
        return msgspec.structs.replace(index, bytes=size, head=head, files=(file,), tensors=())

    check_places(with_header(most), job="job", key=key)
    with pytest.raises(CorruptObjectError, match=f"its header has {most + 1} bytes; at most {most}"):
        check_places(with_header(most + 1), job="job", key=key)


def test_objects_over_their_limit_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = small_store(FakeStore(), steps=(10,))
    monkeypatch.setattr(checkpoint, "MAX_INDEX_BYTES", 100)
    assert "at most 100" in verify_checkpoint(builder.store, builder.log.state, 4).damages[0].what
    monkeypatch.setattr(checkpoint, "MAX_MANIFEST_BYTES", 99)
    assert "at most 99" in verify_checkpoint(builder.store, builder.log.state, 4).damages[0].what


@pytest.mark.fault("B79")
def test_every_kind_of_damage_in_forty_shards_is_told_by_rank_and_kind() -> None:
    store = FakeStore()
    JobBuilder(store, world=40).begin().checkpoint(10)
    keys = {rank: the_key(store, f"rank-{rank:05d}-", ".safetensors") for rank in range(40)}
    bodies = {rank: store.objects[key] for rank, key in keys.items()}
    del store.objects[keys[3]]
    store.objects[keys[7]] = bodies[7][:-1]
    store.objects[keys[11]] = bodies[11] + b"\0"
    store.objects[keys[19]] = bytes(len(bodies[19]))
    flip(store, keys[23], len(bodies[23]) - 30)
    assert len(bodies[31]) == len(bodies[32])
    store.objects[keys[31]], store.objects[keys[32]] = bodies[32], bodies[31]
    damages = verify_checkpoint(store, read_log(store, "job"), 4).damages
    told = {rank: [damage for damage in damages if damage.rank == rank] for rank in range(40)}
    assert [rank for rank, found in told.items() if found] == [3, 7, 11, 19, 23, 31, 32]
    assert all(damage.key == keys[rank] for rank, found in told.items() for damage in found)
    size = len(bodies[7])
    assert f"the file has {size - 1} bytes, expected {size}" in str(told[7][0])
    assert f"the file has {len(bodies[11]) + 1} bytes, expected {len(bodies[11])}" in str(told[11][0])
    assert len(told[23]) == 1
    assert told[23][0].tensor is not None
