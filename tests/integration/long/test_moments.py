"""Kills at moments that a seed draws, one or two at once; the final state is as if nothing had happened."""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path

import pytest
from tests.support.blows import KINDS, Trouble
from tests.support.job_in_training import (
    Job,
    assert_as_if_nothing_had_happened,
    assert_the_last_is_ready,
    assert_trained_through,
    job_in_training,
)
from tests.support.training import Reference

from toprope.chaos.live.forking import ForkedServices, ForkServer
from toprope.store.log.chain import read_log
from toprope.store.look.verify import verify_checkpoint, verify_facts
from toprope.store.objects.directory import DirectoryStore

STEPS = 72
STEP_S = 0.1
SEEDS = range(101, 111)
pytestmark = [pytest.mark.long, pytest.mark.slow]


def hit(job: Job, kinds: tuple[str, ...], *, seed: int) -> None:
    """Let training come to a moment, kill within a second what ``kinds`` names, bring it back, train to the end."""
    chance = random.Random(f"{seed} {kinds}")
    trouble = Trouble(job, chance)
    job.train_to(chance.randint(9, 24))
    time.sleep(chance.uniform(0, 4 * STEP_S))
    for kind in chance.sample(kinds, len(kinds)):
        trouble.strike(kind)
        time.sleep(chance.uniform(0, 1.0) if len(kinds) > 1 else 0)
    again = "world" in trouble.dead
    trouble.heal(within_s=2.0)
    job.finish()
    if again:
        trouble.assert_little_lost()
        assert_the_last_is_ready(job)
    else:
        assert_trained_through(job)


def assert_all_that_is_ready_is_whole(job: Job) -> None:
    store = DirectoryStore(job.cluster.store)
    state = read_log(store, job.cluster.job)
    assert state.live
    assert [damage for seq in state.live for damage in verify_checkpoint(store, state, seq).damages] == []
    assert verify_facts(store, state) == ()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_one_kill(
    kind: str, seed: int, tmp_path: Path, fork_server: ForkServer, services: ForkedServices, reference: Reference
) -> None:
    with job_in_training(tmp_path, fork_server, services, steps=STEPS, delay_s=STEP_S) as job:
        hit(job, (kind,), seed=seed)
        assert_as_if_nothing_had_happened(job, reference)
        assert_all_that_is_ready_is_whole(job)


@pytest.mark.parametrize("seed", range(201, 203))
@pytest.mark.parametrize("kinds", list(itertools.combinations(KINDS, 2)), ids="-".join)
def test_two_kills_within_a_second(
    kinds: tuple[str, str],
    seed: int,
    tmp_path: Path,
    fork_server: ForkServer,
    services: ForkedServices,
    reference: Reference,
) -> None:
    with job_in_training(tmp_path, fork_server, services, steps=STEPS, delay_s=STEP_S) as job:
        hit(job, kinds, seed=seed)
        assert_as_if_nothing_had_happened(job, reference)
        assert_all_that_is_ready_is_whole(job)
