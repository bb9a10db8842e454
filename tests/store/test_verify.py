"""Verify finds every flipped byte, and says where it is as exactly as the digests can tell."""

from __future__ import annotations

import pytest
from tests.support.fake_store import FakeStore
from tests.support.stores import JobBuilder, small_store

from toprope.store import digest, shard
from toprope.store.errors import NothingToVerifyError, UnavailableError
from toprope.store.log import read_log
from toprope.store.names import Key
from toprope.store.records import Retire
from toprope.store.show import named_objects, read_job, xxhsum_lines
from toprope.store.verify import plan, verify_checkpoint, verify_facts


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
    weight = next(place for place in image.header.places if place.name == "model.weight")
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
