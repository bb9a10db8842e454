"""Random streams that are derived for a rank that saved none."""

from __future__ import annotations

import hashlib
import logging
import random

import numpy as np
import pytest
import torch

from toprope.trainer_hooks.rng import derive_streams, set_streams, streams


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
