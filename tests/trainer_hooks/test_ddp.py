"""Two real ranks under DDP: who stores what, and that a restart is bit-identical on each."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from tests.support.ddp_rank import ALL_STEPS, SAVED_STEPS, WORLD
from tests.support.fake_sidecar import FakeSidecar
from tests.support.services import Process
from tests.support.source import ROOT
from tests.support.tiny_trainer import open_image, tiny

from toprope.trainer_hooks.image.shard import DOCUMENT, Image


@dataclass(frozen=True)
class Outcome:
    """What each rank found, and what the sidecar got from it."""

    ranks: list[dict[str, Any]]
    images: list[Image]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    directory = tmp_path_factory.mktemp("ddp")
    with FakeSidecar(directory / "s") as sidecar:
        command = [sys.executable, "-m", "tests.support.ddp_rank"]
        env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        where = [str(directory / "rendezvous"), str(sidecar.socket_path), str(directory)]
        ranks = [
            Process(f"rank {rank}", [*command, str(rank), *where], log=directory / f"rank-{rank}.log", env=env)
            for rank in range(WORLD)
        ]
        try:
            statuses = [process.wait(100) for process in ranks]
            assert statuses == [0, 0], "\n".join(process.log.read_text() for process in ranks)
        finally:
            for process in ranks:
                process.kill()
        images = []
        for rank in range(WORLD):
            path = directory / f"image-{rank}"
            path.write_bytes(sidecar.images[SAVED_STEPS, rank])
            images.append(open_image(path))
        yield Outcome([json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(WORLD)], images)


def test_parameters_and_their_optimizer_state_are_stored_once_in_all(outcome: Outcome) -> None:
    model = tiny().model
    stored = [set(image.extents) for image in outcome.images]
    for name, _ in model.named_parameters():
        holders = [rank for rank in range(WORLD) if f"model.{name}" in stored[rank]]
        assert len(holders) == 1
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert [rank for rank in range(WORLD) if f"optimizer.state.{name}.{key}" in stored[rank]] == holders
    parameters = {f"model.{name}" for name, _ in model.named_parameters()}
    assert all(held & parameters for held in stored)


def test_buffers_and_random_streams_are_stored_by_each_rank_for_itself(outcome: Outcome) -> None:
    own = {f"model.{name}" for name, _ in tiny().model.named_buffers()} | {"rng.torch", "rng.python.state", DOCUMENT}
    assert all(own <= set(image.extents) for image in outcome.images)


def test_a_restart_is_bit_identical_on_each_rank(outcome: Outcome) -> None:
    for found in outcome.ranks:
        assert (found["fresh"], found["step"]) == (0, SAVED_STEPS)
        assert found["restored"] == found["saved"]
        assert found["again"] == found["end"]
    assert outcome.ranks[0]["saved"] != outcome.ranks[1]["saved"]  # each has streams and data of its own


def test_what_one_rank_cannot_keep_stops_all(outcome: Outcome) -> None:
    assert [found["odd"][0] for found in outcome.ranks] == ["UnsupportedLeafError"] * WORLD
    assert outcome.ranks[0]["odd"][1].startswith("rank 1: extra.f: ")


def test_one_rank_without_a_sidecar_stops_all(outcome: Outcome) -> None:
    assert [found["alone"][0] for found in outcome.ranks] == ["SidecarUnavailableError"] * WORLD
    assert outcome.ranks[0]["alone"][1].startswith("rank 1: no sidecar answered within 0.3 s")


def test_only_a_ddp_that_would_regroup_is_warned_of(outcome: Outcome) -> None:
    for found in outcome.ranks:
        assert len(found["warnings"]) == 1
        assert "with 3 ranks" in found["warnings"][0]
        assert "find_unused_parameters=True" in found["warnings"][0]


def test_what_is_said_to_be_replicated_and_is_not_is_refused_before_anything_is_saved(outcome: Outcome) -> None:
    for found in outcome.ranks:
        kind, text, snapshots = found["not the same"]
        assert (kind, snapshots) == ("UsageError", "0")
        assert "model.0.weight (unlike rank 0: 1)" in text
        assert f"differs between ranks after step {ALL_STEPS + 1}" in text
