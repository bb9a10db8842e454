"""Checkpoints of format 1 stay loadable: ``data/store-format-1`` was written before there was another."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.support.stores import JobBuilder, shard_image

from toprope.store.log.chain import read_log
from toprope.store.look.verify import plan, verify_checkpoint, verify_facts
from toprope.store.objects.directory import DirectoryStore
from toprope.store.transfer.restore import restore

OLD = Path(__file__).parents[1] / "data" / "store-format-1"


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(shutil.copytree(OLD, tmp_path / "store"))


def test_a_store_of_format_1_verifies_and_restores(store: DirectoryStore, tmp_path: Path) -> None:
    state = read_log(store, "gpt")
    assert plan(state) == (4, 5, 7)
    assert [verify_checkpoint(store, state, seq).damages for seq in plan(state)] == [(), (), ()]
    assert verify_facts(store, state) == ()
    done = restore(store, state, to=tmp_path / "out")
    assert (done.attempt, done.step) == (2, 25)
    for rank in range(2):
        wanted = shard_image(step=25, rank=rank, number=2)
        assert (tmp_path / "out" / f"rank-{rank:05d}-of-00002.safetensors").read_bytes() == wanted


def test_damage_in_a_store_of_format_1_is_found(store: DirectoryStore) -> None:
    state = read_log(store, "gpt")
    for path in sorted((OLD / "gpt" / "shards" / "a2").rglob("*.*")):
        place = Path(store.root) / path.relative_to(OLD)
        good = place.read_bytes()
        for at in range(0, len(good), 37):
            place.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
            assert verify_checkpoint(store, state, 7).damages
        place.write_bytes(good)
    assert verify_checkpoint(store, state, 7).damages == ()


def test_a_new_checkpoint_may_point_into_files_of_format_1(store: DirectoryStore, tmp_path: Path) -> None:
    old = read_log(store, "gpt")
    builder = JobBuilder(store, "gpt", codec="none")
    builder.log.state, builder.log.term = old, old.term
    seq = builder.checkpoint(30)
    assert verify_checkpoint(store, builder.log.state, seq).damages == ()
    restore(store, builder.log.state, to=tmp_path / "out")
    for rank in range(2):
        wanted = shard_image(step=30, rank=rank, number=2)
        assert (tmp_path / "out" / f"rank-{rank:05d}-of-00002.safetensors").read_bytes() == wanted
