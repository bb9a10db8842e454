"""Random streams that are derived for a rank that saved none."""

from __future__ import annotations

import hashlib
import logging
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.fitted_states import fitted, linear, saved
from torch import nn

from toprope.trainer_hooks.capture.rng import derive_streams, set_streams, streams
from toprope.trainer_hooks.capture.state import Parts
from toprope.trainer_hooks.launch import World
from toprope.trainer_hooks.link import wire
from toprope.trainer_hooks.link.session import Session
from toprope.trainer_hooks.restore.entering import Entry
from toprope.trainer_hooks.restore.relaxing import Allowed
from toprope.trainer_hooks.restore.restoring import Restorer


def drawn(*, seed: int | str = 7, step: int = 3, rank: int = 0) -> tuple[float, float, float, float]:
    derive_streams(seed, step=step, rank=rank, devices=[])
    numbers = float(np.random.rand()), float(torch.rand(1))  # noqa: NPY002 - the global stream is what is tested
    return random.random(), *numbers, float(torch.randn(1))


def test_derived_streams_differ_by_seed_step_and_rank_and_are_the_same_each_time() -> None:
    first = drawn()
    assert drawn() == first
    others = [drawn(rank=rank) for rank in range(1, 64)] + [drawn(step=4), drawn(seed=8), drawn(seed="job"), first]
    for stream in range(4):
        assert len({numbers[stream] for numbers in others}) == len(others)


def test_derived_streams_are_those_that_the_page_says() -> None:
    """Fixed for good: a later version that derived others would break the runs of users."""

    def seed(stream: str) -> bytes:
        return hashlib.blake2b(f"7/100/2/{stream}".encode(), digest_size=16).digest()

    numpy = np.random.RandomState([int(word) for word in np.frombuffer(seed("numpy"), "<u4")])
    cpu = torch.Generator().manual_seed(int.from_bytes(seed("torch")[:8], "little"))
    expected = random.Random(seed("python")).random(), float(numpy.rand()), float(torch.rand(1, generator=cpu))
    assert drawn(seed=7, step=100, rank=2)[:3] == expected


def test_derived_streams_draw_nothing_from_what_was_there_and_are_said(caplog: pytest.LogCaptureFixture) -> None:
    before = streams([])
    with caplog.at_level(logging.INFO, "toprope"):
        derive_streams(1, step=2, rank=3, devices=[])
    assert "rank 3 begin anew, from seed 1, step 2" in caplog.text
    set_streams(before, [])
    torch.testing.assert_close(streams([])["torch"], before["torch"])


@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_of_another_number_of_ranks_begins_its_own_streams_from_the_job_and_the_step(
    tmp_path: Path, rank: int
) -> None:
    found = fitted(saved(tmp_path, [{"model": linear(3.0)}] * 2), rank=rank, world=3, model=linear(9.0))
    hello = wire.Hello(job="j", launch_id="aa", rank=rank, world=3, pid=1)
    entry = Entry(Session(tmp_path / "none", hello), World(rank, 3), "aa", {})
    attempt = wire.Attempt(
        job_uid="0b" * 16,
        number=2,
        uid="1a" * 16,
        launch_id="aa",
        round=0,
        source="ready",
        source_world=2,
        from_step=40,
        schedule=wire.Schedule(from_step=0, every=1),
    )
    Restorer(entry, Parts(model=nn.Identity()), {}, Allowed())._apply(attempt, found)
    begun = random.random(), float(torch.rand(1))
    derive_streams("0b" * 16, step=40, rank=rank, devices=[])
    assert (random.random(), float(torch.rand(1))) == begun
