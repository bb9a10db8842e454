"""Simulated histories: no promise broken, all troubles met, the same story each time."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections import Counter

import pytest

from toprope.__main__ import main
from toprope.chaos.sim import search
from toprope.chaos.sim.history import Outcome, run
from toprope.chaos.sim.search import Found

CHUNKS = range(4)
CHUNK = 60
_DIGESTS = "from toprope.chaos.sim.history import run; print([run(seed).digest for seed in (3, 5, 8)])"


@functools.cache
def found(chunk: int) -> Found:
    return search.run(range(chunk * CHUNK, (chunk + 1) * CHUNK), jobs=2)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_no_history_breaks_a_promise(chunk: int) -> None:
    broken = found(chunk).broken
    assert broken == [], "\n".join(str(outcome) for outcome in broken)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_that_must_happen_sometimes_does() -> None:
    counts = sum((found(chunk).counts for chunk in CHUNKS), Counter[str]())
    assert Found(counts=counts).never() == []


@pytest.mark.slow
def test_a_seed_gives_the_same_history_whatever_the_hash_seed() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", _DIGESTS],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


def test_a_broken_promise_is_told_with_seed_options_and_story(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = run(0)
    broken = Outcome(
        seed=7,
        options=good.options,
        invariant="I10",
        text="wrong bytes",
        story=("    1.000  n0  sealed step 4",),
        counts=good.counts,
        digest="",
        virtual_s=1.0,
    )
    monkeypatch.setattr(search, "run_one", lambda _seed: broken)
    assert main(["chaos", "sim", "--seeds", "1", "--seed", "7"]) == 1
    told = capsys.readouterr().out
    for wanted in ("seed 7: I10: wrong bytes", "options: nodes=", "sealed step 4", "ckpt chaos sim --seed 7 --seeds 1"):
        assert wanted in told


def test_a_good_search_ends_with_status_0_and_says_what_it_met(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "sim", "--seeds", "2"]) == 0
    told = capsys.readouterr().out
    assert "2 histories" in told
    assert "no promise was broken" in told


def test_an_unknown_mutant_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "sim", "--mutant", "nothing"]) == 64
    assert "fence" in capsys.readouterr().err
