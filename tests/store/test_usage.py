"""What a store weighs: each object counted once, and apart what no record names or what nobody can tell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.fake_store import FakeStore
from tests.support.stores import JobBuilder, adapter_image, small_store

from toprope.__main__ import main
from toprope.store.errors import UsageError
from toprope.store.log.records import Retire
from toprope.store.look.usage import damages, usage
from toprope.store.names import Key
from toprope.store.objects.directory import DirectoryStore
from toprope.store.objects.opening import open_store


def weight(store: FakeStore, *parts: str) -> int:
    return sum(len(body) for key, body in store.objects.items() if all(part in key for part in parts))


def test_each_object_is_counted_once_by_what_it_is_of() -> None:
    store = FakeStore()
    small_store(store, steps=(10, 20), name="gpt").open_attempt(ready=4, from_step=10).checkpoint(15)
    small_store(store, steps=(10,), name="new")
    found = usage(store)
    gpt, new = found.jobs
    assert gpt.bytes + new.bytes == sum(map(len, store.objects.values()))
    assert (gpt.bytes, gpt.log, gpt.facts) == tuple(weight(store, f"gpt/{part}") for part in ("", "log/", "facts/"))
    assert [(step.attempt, step.step) for step in gpt.steps] == [(1, 10), (1, 20), (2, 15)]
    for step in gpt.steps:
        place = f"gpt/shards/a{step.attempt}/s{step.step:09d}/"
        assert step.shard == weight(store, place, ".safetensors")
        assert step.index == weight(store, place, ".index.json")
        assert step.manifest == weight(store, f"gpt/manifests/a{step.attempt}-s{step.step:09d}-")
    assert gpt.orphans.objects == gpt.unknown.objects == found.others.objects == len(list(damages(found))) == 0
    assert [one.job for one in usage(store, job="new").jobs] == ["new"]
    with pytest.raises(UsageError, match="there are gpt, new"):
        usage(store, job="old")


def test_what_no_record_names_is_counted_apart() -> None:
    store = FakeStore()
    builder = small_store(store, steps=(10,), name="gpt")
    before = set(store.objects)
    builder.put_shard(step=20, rank=1)  # a step that did not come to READY
    store.create(Key("gpt/shards/a1/s000000010/rank-00000-of-00002-ff.safetensors"), b"a second try")
    left = set(store.objects) - before
    store.create(Key("probe/0123"), b"first")
    found = usage(store)
    (gpt,) = found.jobs
    assert (set(gpt.orphans.keys), gpt.orphans.objects) == (left, 3)
    assert gpt.orphans.bytes == sum(len(store.objects[key]) for key in left)
    assert (found.others.keys, found.others.bytes) == (["probe/0123"], 5)
    assert gpt.steps[0].shard == weight(store, "s000000010/", ".safetensors") - len(b"a second try")


def test_what_a_damaged_index_may_name_is_no_orphan() -> None:
    store = FakeStore()
    small_store(store, steps=(10, 20), name="gpt")
    (key,) = [key for key in store.objects if "s000000020/rank-00001" in key and key.endswith("json")]
    store.objects[key] = b"{}"
    (gpt,) = usage(store).jobs
    shard = next(one for one in store.objects if "s000000020/rank-00001" in one and one.endswith("safetensors"))
    assert set(gpt.unknown.keys) == {key, shard}
    assert gpt.orphans.objects == 0
    assert gpt.bytes == weight(store, "gpt/")
    assert [(damage.step, damage.rank, damage.key) for damage in gpt.damages] == [(20, 1, key)]
    (manifest,) = [key for key in store.objects if "manifests/a1-s000000020" in key]
    del store.objects[manifest]
    (gpt,) = usage(store).jobs
    assert gpt.unknown.objects == 4
    assert [(damage.step, damage.key) for damage in gpt.damages] == [(20, manifest)]


def test_a_shard_that_is_missing_is_damage_unless_it_is_retired() -> None:
    store = FakeStore()
    builder = small_store(store, steps=(10, 20, 30), name="gpt")
    for key in [key for key in store.objects if "s000000010/rank-00001" in key and key.endswith("safetensors")]:
        del store.objects[key]
    assert [(damage.step, damage.rank) for damage in damages(usage(store))] == [(10, 1)]
    builder.log.add(Retire(seqs=(4,)))
    (gpt,) = usage(store).jobs
    assert (gpt.damages, gpt.orphans.objects, gpt.steps[0].retired) == ([], 0, True)
    for key in [key for key in store.objects if "s000000010" in key]:
        del store.objects[key]
    (gpt,) = usage(store).jobs
    assert (gpt.damages, gpt.steps[0].bytes, gpt.bytes) == ([], 0, weight(store, "gpt/"))


def test_what_becomes_ready_meanwhile_is_not_taken_for_an_orphan() -> None:
    class Busy(FakeStore):
        busy = False

        def list(self, prefix: str):  # type: ignore[no-untyped-def]  # noqa: ANN202 - as it is
            listed = list(super().list(prefix))
            if self.busy:
                self.busy = False
                builder.checkpoint(20)
            return iter(listed)

    store = Busy()
    builder = small_store(store, steps=(10,), name="gpt")
    store.busy = True
    (gpt,) = usage(store, job="gpt").jobs
    assert ([step.step for step in gpt.steps], gpt.orphans.objects, gpt.damages) == ([10, 20], 0, [])
    assert gpt.bytes == weight(store, "gpt/")


@pytest.mark.parametrize("kind", ["directory", "bucket"])
def test_the_command_over_both_kinds_of_roots(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    root = str(tmp_path)
    if kind == "bucket":
        server = request.getfixturevalue("strict")
        server.page, root = 3, server.root("team")
    store = open_store(root, write=True)
    builder = small_store(store, steps=(10, 20), name="gpt")
    builder.put_shard(step=30, rank=0)
    JobBuilder(store, "new").begin()
    assert main(["du", root, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    gpt, new = said["jobs"]
    total = sum(store.size(key) for key in store.list("gpt/"))
    assert (gpt["bytes"], gpt["orphans"]["objects"], new["steps"]) == (total, 2, [])
    assert [(step["step"], step["shard"]) for step in gpt["steps"]] == [(10, 1134), (20, 1134)]
    assert main(["du", root, "--job", "gpt"]) == 0
    out, err = capsys.readouterr()
    assert "named by no record: " in out
    assert " in 2 objects" in out
    assert "job new" not in out
    assert err == ""


def test_damage_is_named_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_store(DirectoryStore(tmp_path), steps=(10,), name="gpt")
    next(tmp_path.glob("gpt/facts/*")).unlink()
    assert main(["du", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].startswith("total ")
    assert "job gpt: " in err
    assert "gpt/facts/" in err
    assert main(["du", str(tmp_path), "--job", "none"]) == 64


def test_a_shard_that_is_cut_is_damage_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_store(DirectoryStore(tmp_path), steps=(10, 20), name="gpt")
    (shard,) = tmp_path.glob("gpt/shards/a1/s000000020/rank-00001-*.safetensors")
    whole = shard.stat().st_size
    for size in (whole - 1, 0):
        shard.write_bytes(shard.read_bytes()[:size])
        assert main(["du", str(tmp_path), "--json"]) == 2
        said = json.loads(capsys.readouterr().out)
        (damage,) = said["damages"]
        assert (damage["step"], damage["rank"]) == (20, 1)
        assert f"the file has {size} bytes, expected {whole}" in damage["what"]
        assert said["jobs"][0]["steps"][1]["shard"] == size + whole, "what is known is counted all the same"


def test_a_shard_that_a_retired_step_shares_is_damage_of_the_one_that_needs_it() -> None:
    store = FakeStore()
    builder = JobBuilder(store, "gpt", image=adapter_image, codec="zstd")
    builder.begin()
    for step in (10, 20, 30):
        builder.checkpoint(step)
    builder.log.add(Retire(seqs=(4,)))
    shared = {file for line in indexes_of(store, "s000000030/") for file in line if "s000000010/" in file}
    assert shared, "what is stored once is named by both"
    for key in shared:
        del store.objects[Key(key)]
    assert {(one.step, one.key) for one in damages(usage(store))} == {
        (step, key) for step in (20, 30) for key in shared
    }


def indexes_of(store: FakeStore, place: str) -> list[list[str]]:
    """Return the keys of the files that each index of a step names."""
    indexes = (json.loads(body) for key, body in store.objects.items() if place in key and key.endswith("index.json"))
    return [[file["key"] for file in index["files"]] for index in indexes]
