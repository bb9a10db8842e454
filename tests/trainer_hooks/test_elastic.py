"""The elastic sampler: each sample once in an epoch, whatever becomes of the number of ranks in its midst."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.fake_sidecar import FakeSidecar
from tests.support.tiny_trainer import tiny
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

from toprope.trainer_hooks import Checkpointer, ElasticSampler, StateMismatchError, UsageError
from toprope.trainer_hooks.elastic import sampler_of

Tail = Literal["drop", "pad"]
SAMPLES, BATCH = 64, 4
EPOCH = SAMPLES // BATCH


class Job:
    """All ranks of a job, and what they have trained on in each epoch."""

    def __init__(self, samples: int, batch: int, tail: Tail) -> None:
        self.samples, self.batch, self.tail = samples, batch, tail
        self.seen: dict[int, Counter[int]] = {}
        self.state: dict[str, Any] | None = None

    def launch(self, world: int, steps: int, prefetch: int) -> None:
        """Train that many steps on that many ranks, each of which is dealt more than it trains on; then die."""
        ranks = [self._sampler(rank, world) for rank in range(world)]
        while steps > 0:
            streams = [iter(sampler) for sampler in ranks]
            epoch = ranks[0].epoch
            waiting: list[list[int]] = [[] for _ in ranks]
            while steps > 0 and ranks[0].epoch == epoch:
                for sampler, stream, fetched in zip(ranks, streams, waiting, strict=True):
                    fetched.extend(islice(stream, self.batch + prefetch - len(fetched)))
                    trained, fetched[:] = fetched[: self.batch], fetched[self.batch :]
                    self.seen.setdefault(epoch, Counter()).update(trained)
                    sampler.advance(len(trained))
                steps -= 1
        states = [sampler.state_dict() for sampler in ranks]
        assert all(state == states[0] for state in states)
        self.state = states[-1]

    def _sampler(self, rank: int, world: int) -> ElasticSampler:
        sampler = ElasticSampler(self.samples, batch_size=self.batch, tail=self.tail, rank=rank, world=world, seed=5)
        if self.state is not None:
            sampler.load_state_dict(self.state)
        return sampler


@settings(max_examples=60)
@given(
    samples=st.integers(40, 70),
    batch=st.integers(1, 4),
    tail=st.sampled_from(["drop", "pad"]),
    launches=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 12), st.integers(0, 20)), min_size=1, max_size=8),
)
def test_each_sample_is_trained_on_once_in_an_epoch_over_any_change_of_world(
    samples: int, batch: int, tail: Tail, launches: list[tuple[int, int, int]]
) -> None:
    job = Job(samples, batch, tail)
    for world, steps, prefetch in launches:
        job.launch(world, steps, prefetch)
    assert job.state is not None
    largest = batch * max(world for world, _, _ in launches)
    for epoch, seen in job.seen.items():
        twice = seen.total() - len(seen)
        if epoch == job.state["epoch"]:
            assert (twice, seen.total()) == (0, job.state["position"])
        elif tail == "drop":
            assert twice == 0
            assert samples - seen.total() < largest
        else:
            assert set(seen) == set(range(samples))
            assert twice < largest


@pytest.mark.parametrize(("tail", "dealt", "twice"), [("drop", 60, 0), ("pad", 66, 2)])
def test_the_tail_of_an_epoch_is_dropped_or_filled_up_by_exact_counts(tail: Tail, dealt: int, twice: int) -> None:
    """64 samples for 3 ranks in batches of 2: ten full rounds, and 4 samples that do not make one of 6."""
    ranks = [ElasticSampler(64, batch_size=2, tail=tail, rank=rank, world=3) for rank in range(3)]
    got = [list(sampler) for sampler in ranks]
    assert [len(mine) for mine in got] == [dealt // 3] * 3
    assert [len(sampler) for sampler in ranks] == [dealt // 3] * 3
    counted = Counter(number for mine in got for number in mine)
    assert counted.total() - len(counted) == twice
    assert len(counted) == min(dealt, 64)


@pytest.mark.parametrize("make", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize(
    ("stop", "workers"),
    [(1, 0), (EPOCH - 1, 2), (EPOCH - 1, 0), (EPOCH, 0), (EPOCH + 1, 0), (EPOCH + 5, 0)],
)
@pytest.mark.fault("B41")
@pytest.mark.fault("B43")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_loader_goes_on_with_what_was_not_trained_on(make: Callable[..., Any], stop: int, workers: int) -> None:
    """What workers had fetched and nobody trained on comes again; order, epochs and torch's stream are as they were."""

    def train(steps: int, state: dict[str, Any] | None = None) -> tuple[list[list[int]], dict[str, Any]]:
        sampler = ElasticSampler(SAMPLES, seed=3)
        if state is not None:
            sampler.load_state_dict(state)
        loader = make(range(SAMPLES), batch_size=BATCH, sampler=sampler, num_workers=workers, generator=_generator())
        found = sampler_of(loader)
        assert found is sampler
        seen: list[list[int]] = []
        while len(seen) < steps:
            for batch in loader:
                seen.append(batch.tolist())
                sampler.advance(len(batch))
                if len(seen) == steps:
                    break
        return seen, sampler.state_dict()

    torch.manual_seed(1)
    drawn = torch.get_rng_state()
    steps = stop + 3 if workers else 4 * EPOCH
    whole, end = train(steps)
    first, state = train(stop)
    second, again = train(steps - stop, state)
    assert first + second == whole
    assert again == end
    assert torch.equal(torch.get_rng_state(), drawn)
    if not workers:
        ids = [number for batch in whole for number in batch]
        orders = [ids[epoch * SAMPLES : (epoch + 1) * SAMPLES] for epoch in range(4)]
        assert all(sorted(order) == list(range(SAMPLES)) for order in orders)
        assert len({tuple(order) for order in orders}) == 4


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(9)


def test_other_data_or_another_order_is_refused_and_changes_nothing() -> None:
    sampler = ElasticSampler(10, seed=1, rank=0, world=1)
    for other in (
        ElasticSampler(11, seed=1, rank=0, world=1),
        ElasticSampler(10, seed=2, rank=0, world=1),
        ElasticSampler(10, seed=1, rank=0, world=1, shuffle=False),
    ):
        before = sampler.state_dict()
        with pytest.raises(StateMismatchError, match="in the checkpoint and"):
            sampler.load_state_dict(other.state_dict())
        assert sampler.state_dict() == before
    with pytest.raises(StateMismatchError, match="format 7"):
        sampler.load_state_dict({**sampler.state_dict(), "format": 7})


def test_what_the_ranks_had_in_common_counts_and_a_rank_can_not_count_for_others() -> None:
    sampler = ElasticSampler(12, rank=1, world=4, shuffle=False)
    stream = iter(sampler)
    assert [next(stream), next(stream)] == [1, 5]
    with pytest.raises(UsageError, match=r"advance\(4\) and 2 samples were dealt"):
        sampler.advance(4)
    sampler.advance(1)
    assert sampler.position == 4
    assert list(sampler) == [5, 9]


def test_a_loop_that_never_says_what_it_trained_on_ends() -> None:
    sampler = ElasticSampler(8, rank=0, world=1)
    assert list(sampler) == list(sampler)  # looked at, and then trained on, is fine
    with pytest.raises(UsageError, match="advance"):
        list(sampler)


def test_a_step_of_which_no_sample_was_said_to_be_trained_on_is_refused_at_the_first_end_step(
    memory_dir: Path,
) -> None:
    def begun(sampler: ElasticSampler) -> Checkpointer:
        hook = Checkpointer(job="j", socket=sidecar.socket_path, **{**tiny().named(), "dataloader": sampler})
        assert hook.restore() == 0
        assert len(list(islice(sampler, 2))) == 2
        return hook

    with FakeSidecar(memory_dir / "s") as sidecar:
        hook = begun(ElasticSampler(8, rank=0, world=1))
        with pytest.raises(UsageError, match=r"end_step\(1\) and no sample was said .* call sampler\.advance\(n\)"):
            hook.end_step(1)
        hook.close("nothing")
        sampler = ElasticSampler(8, rank=0, world=1)
        hook = begun(sampler)
        sampler.advance(2)
        hook.end_step(1)
        hook.close("nothing")


@pytest.mark.parametrize(
    "given",
    [{"samples": 7, "world": 8}, {"samples": 0, "tail": "pad"}, {"rank": 3, "world": 2}, {"tail": "keep"}],
)
def test_what_can_not_be_dealt_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ElasticSampler(**{"samples": 10, "rank": 0, "world": 1, **given})


def test_a_loader_that_draws_from_torchs_stream_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    sampler = ElasticSampler(8, rank=0, world=1)
    with caplog.at_level(logging.WARNING, "toprope"):
        assert sampler_of(DataLoader(range(8), sampler=sampler)) is sampler  # type: ignore[arg-type]
    assert "generator=torch.Generator()" in caplog.text
    assert sampler_of(DataLoader(range(8))) is None  # type: ignore[arg-type]
