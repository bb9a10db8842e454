"""Only tensors that changed are stored again; the image that comes back is the one that was sealed, bit for bit."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import msgspec
import pytest
from safetensors import safe_open
from tests.support.fake_store import FakeStore
from tests.support.stores import JobBuilder, adapter_image, safetensors_image, shard_image

from toprope.sidecar.packing import Codec
from toprope.store.checkpoint.files import image_chunks
from toprope.store.checkpoint.incremental import HEAD, Grounds, kept_tensors
from toprope.store.checkpoint.manifest import File, Index
from toprope.store.checkpoint.ready import read_index, read_manifest
from toprope.store.checkpoint.shard import hash_image, index_of
from toprope.store.digest import digest
from toprope.store.errors import CorruptObjectError, StoreError
from toprope.store.log.chain import read_log
from toprope.store.look.show import named_objects, read_job, xxhsum_lines
from toprope.store.look.usage import usage
from toprope.store.look.verify import verify_checkpoint
from toprope.store.names import Key
from toprope.store.objects.directory import DirectoryStore
from toprope.store.transfer.restore import restore

CODECS: tuple[Codec, ...] = ("none", "zstd")


def indexes_of(builder: JobBuilder, seq: int) -> list[Index]:
    manifest, _ = read_manifest(builder.store, builder.log.state, seq)
    return [read_index(builder.store, manifest, shard) for shard in manifest.shards]


def stored_bytes(store: FakeStore, step: int) -> int:
    return sum(len(body) for key, body in store.objects.items() if f"/s{step:09d}/" in key)


@pytest.mark.parametrize("codec", CODECS)
def test_each_restored_image_is_the_one_that_was_sealed(codec: Codec, tmp_path: Path) -> None:
    builder = JobBuilder(FakeStore(), image=adapter_image, codec=codec).begin()
    for step in (10, 20, 30):
        builder.checkpoint(step)
    builder.open_attempt(ready=6, from_step=30).checkpoint(40)
    state = read_log(builder.store, "job")
    for step, number in ((10, 1), (20, 1), (30, 1), (40, 2)):
        done = restore(builder.store, state, to=tmp_path / str(step), step=step)
        assert done.step == step
        for rank in range(2):
            wanted = adapter_image(step=step, rank=rank, number=number)
            assert (done.directory / f"rank-{rank:05d}-of-00002.safetensors").read_bytes() == wanted
    assert [len(index.files) for seq in (4, 5, 6, 8) for index in indexes_of(builder, seq)] == [1, 1, 2, 2, 2, 2, 2, 2]


def test_one_percent_that_changes_costs_two_percent_at_most() -> None:
    store = FakeStore()

    def image(**of: int | str) -> bytes:
        return adapter_image(**of, frozen=400_000)  # type: ignore[arg-type] # as put_shard gives them

    builder = JobBuilder(store, image=image, codec="none", world=1).begin()
    for step in range(10, 60, 10):
        builder.checkpoint(step)
    full = stored_bytes(store, 10)
    assert full > 1_600_000
    assert all(stored_bytes(store, step) <= 0.02 * full for step in range(20, 60, 10))
    assert all(len(index.files) == 2 for index in indexes_of(builder, builder.log.state.live[-1]))


@pytest.mark.parametrize("codec", CODECS)
def test_every_flipped_cut_or_missing_byte_of_what_a_step_needs_is_found_and_none_is_restored(
    codec: Codec, tmp_path: Path
) -> None:
    store = FakeStore()
    builder = JobBuilder(store, image=lambda **of: adapter_image(**of, frozen=64), codec=codec, world=1).begin()
    builder.checkpoint(10)
    seq = builder.checkpoint(20)
    state, want = builder.log.state, adapter_image(step=20, rank=0, world=1, frozen=64)
    (index,) = indexes_of(builder, seq)
    assert len(index.files) == 2
    manifest, _ = read_manifest(store, state, seq)
    for key in [manifest.shards[0].index_key, *(file.key for file in index.files)]:
        good = store.objects[Key(key)]
        for at in range(len(good)):
            store.objects[Key(key)] = good[:at] + bytes([good[at] ^ (1 << at % 8)]) + good[at + 1 :]
            assert [damage.key for damage in verify_checkpoint(store, state, seq).damages] == [key], at
            if ".index." not in key:
                part = b"".join(chunk for chunk in _chunks_or_none(store, index))
                assert part in {want, b""} or digest(part) != index.digest, at
        for length in range(0, len(good), 37):
            store.objects[Key(key)] = good[:length]
            assert verify_checkpoint(store, state, seq).damages, length
        del store.objects[Key(key)]
        assert verify_checkpoint(store, state, seq).damages
        store.objects[Key(key)] = good
    assert verify_checkpoint(store, state, seq).damages == ()
    # and one that hits what step 20 needs of the file of step 10
    old = Key(index.files[1].key)
    good = store.objects[old]
    tensor = next(one for one in index.tensors if one.file == 1)
    at = tensor.begin + 5 if codec == "none" else 20
    store.objects[old] = good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]
    with pytest.raises(StoreError, match="no READY checkpoint could be restored"):
        restore(store, state, to=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def _chunks_or_none(store: FakeStore, index: Index) -> list[bytes]:
    try:
        return list(image_chunks(store, index))
    except CorruptObjectError:
        return []


def test_a_file_of_which_under_a_quarter_is_named_is_left_behind() -> None:
    def image(*, step: int, rank: int, **of: int | str) -> bytes:
        plain = shard_image(step=step, rank=rank, **of)  # type: ignore[arg-type] # as put_shard gives them
        header = hash_image(memoryview(plain), name="plain").header
        blocks = {f"block{n}": ("F32", [256], bytes([n, step if step >= 20 + 10 * n else 0] * 512)) for n in range(8)}
        document = header.extents[-1]
        body = plain[document.begin : document.end]
        return safetensors_image(blocks | {"__document__": ("U8", [len(body)], body)}, header.metadata)

    builder = JobBuilder(FakeStore(), image=image, codec="none", world=1).begin()
    first = next(file.key for file in indexes_of(builder, builder.checkpoint(10))[0].files)
    named = []
    for step in range(20, 110, 10):
        (index,) = indexes_of(builder, builder.checkpoint(step))
        old = [tensor for tensor in index.tensors if index.files[tensor.file].key == first]
        named.append(len(old))
        for number, file in enumerate(index.files):
            used = sum(tensor.end - tensor.begin for tensor in index.tensors if tensor.file == number)
            assert number == 0 or 4 * used >= file.bytes
    assert named[:6] == [7, 6, 5, 4, 3, 0]
    assert verify_checkpoint(builder.store, builder.log.state, builder.log.state.live[-1]).damages == ()


def test_the_chain_is_no_longer_than_the_limit() -> None:
    one = index_of(hash_image(memoryview(adapter_image(step=10, rank=0)), name="one"), key=Key("k"))
    tensor = one.tensors[0]
    tensors = tuple(msgspec.structs.replace(tensor, name=f"t{n}", file=n, begin=0, end=100 + n) for n in range(80))
    files = tuple(File(key=f"k{n}", bytes=200, digest="") for n in range(80))
    base = msgspec.structs.replace(one, files=files, tensors=tensors)
    kept = kept_tensors(msgspec.structs.replace(one, tensors=tensors), base)
    assert sorted(tensor.file for tensor in kept.values()) == list(range(17, 80))


def test_an_image_that_has_a_tensor_of_our_name_is_stored_whole() -> None:
    plain = hash_image(memoryview(adapter_image(step=10, rank=0)), name="plain")
    one = index_of(plain, key=Key("k"))
    odd = msgspec.structs.replace(one, tensors=(*one.tensors, msgspec.structs.replace(one.tensors[0], name=HEAD)))
    assert kept_tensors(one, one) != {}
    assert kept_tensors(odd, one) == {}


def test_another_world_is_stored_whole() -> None:
    builder = JobBuilder(FakeStore(), image=adapter_image, codec="none").begin()
    builder.checkpoint(10)
    builder.world = 1
    builder.open_attempt(ready=4, from_step=10)
    (index,) = indexes_of(builder, builder.checkpoint(20))
    assert (len(index.files), index.base) == (1, None)


def test_a_base_that_is_damaged_is_none() -> None:
    store = FakeStore()
    builder = JobBuilder(store, image=adapter_image, codec="none", world=1).begin()
    builder.checkpoint(10)
    key = next(key for key in store.objects if ".index." in key)
    store.objects[key] = store.objects[key][:-1]
    (index,) = indexes_of(builder, builder.checkpoint(20))
    assert (len(index.files), index.base) == (1, None)


def test_what_an_index_names_of_older_files_must_be_what_its_base_names() -> None:
    builder = JobBuilder(FakeStore(), image=adapter_image, codec="none", world=1).begin()
    (base,) = indexes_of(builder, builder.checkpoint(10))
    (index,) = indexes_of(builder, builder.checkpoint(20))
    assert index.base == 4
    assert Grounds([index], {4: [base]}).unfounded(index) is None
    number = next(at for at, tensor in enumerate(index.tensors) if tensor.file == 1)

    def with_tensor(**change: object) -> Index:
        changed = msgspec.structs.replace(index.tensors[number], **change)
        return msgspec.structs.replace(index, tensors=(*index.tensors[:number], changed, *index.tensors[number + 1 :]))

    old = index.files[1]
    lies = [
        with_tensor(digest="0" * 32),
        with_tensor(begin=index.tensors[number].begin + 4),
        with_tensor(name="model.other"),
        with_tensor(shape=(1,)),
        msgspec.structs.replace(index, files=(index.files[0], msgspec.structs.replace(old, key=f"{old.key}0"))),
        msgspec.structs.replace(index, files=(index.files[0], msgspec.structs.replace(old, digest="0" * 32))),
        msgspec.structs.replace(index, head=msgspec.structs.replace(index.head, file=1)),
        msgspec.structs.replace(index, files=(*index.files, msgspec.structs.replace(old, key=f"{old.key}1"))),
    ]
    assert all(Grounds([lie], {4: [base]}).unfounded(lie) for lie in lies)
    for none in (msgspec.structs.replace(index, base=None), msgspec.structs.replace(index, base=5)):
        assert "nothing it may point into has tensor" in (Grounds([none], {4: [base]}).unfounded(none) or "")


@pytest.mark.parametrize("codec", CODECS)
def test_lists_name_each_object_once_and_xxhsum_agrees(codec: Codec, tmp_path: Path) -> None:
    builder = JobBuilder(DirectoryStore(tmp_path), image=adapter_image, codec=codec).begin()
    for step in (10, 20, 30):
        builder.checkpoint(step)
    names = [one.key for one in named_objects(builder.store, read_job(builder.store, "job"))]
    assert sorted(names) == sorted(builder.store.list("job/"))
    lines = "\n".join(xxhsum_lines(named_objects(builder.store, read_job(builder.store, "job")))) + "\n"
    subprocess.run(["xxhsum", "-c", "-"], input=lines, text=True, cwd=tmp_path, check=True, capture_output=True)
    (used,) = usage(builder.store, job="job").jobs
    assert (used.orphans.objects, used.damages) == (0, [])
    assert [step.shard > 0 for step in used.steps] == [True] * 3
    assert used.bytes == sum(path.stat().st_size for path in tmp_path.rglob("*.*") if path.is_file())


def test_a_part_file_is_a_safetensors_file_of_its_own(tmp_path: Path) -> None:
    builder = JobBuilder(DirectoryStore(tmp_path), image=adapter_image, codec="none", world=1).begin()
    builder.checkpoint(10)
    (index,) = indexes_of(builder, builder.checkpoint(20))
    with safe_open(tmp_path / index.files[0].key, framework="np") as opened:
        assert opened.metadata()["format"] == "2"
        assert set(opened.keys()) == {HEAD, *(tensor.name for tensor in index.tensors if tensor.file == 0)}
        head = opened.get_tensor(HEAD).tobytes()
    assert json.loads(head[8:])["__metadata__"]["step"] == "20"
