"""Who trains on which samples, on any number of ranks: each sample once in an epoch, across restarts in its midst.

The order of an epoch is a pure function of seed, epoch and number of samples. The ranks take from it in turn, so what
all of them have trained on together is a first part of it, whatever the batch size; its length is the *position*, the
same on each rank. Another number of ranks goes on from there.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sized
from typing import Any, ClassVar, Literal

import torch
from torch.utils.data import Sampler

from toprope.trainer_hooks.errors import StateMismatchError, UsageError
from toprope.trainer_hooks.launch import this_world

logger = logging.getLogger("toprope")
FORMAT = 1


class ElasticSampler(Sampler[int]):
    """Deals the samples of a data set to the ranks, and knows which were trained on.

    ::

        sampler = ElasticSampler(dataset, seed=7)
        loader = DataLoader(dataset, batch_size=8, sampler=sampler, generator=torch.Generator(), num_workers=2)
        ckpt = Checkpointer(job="gpt", model=model, optimizer=optimizer, dataloader=loader)
        step = ckpt.restore()
        while step < steps:
            for batch in loader:                # the rest of this epoch
                train(batch)
                sampler.advance(len(batch))     # before end_step: what the snapshot shall count
                step += 1
                ckpt.end_step(step)

    The epoch moves by itself: ``advance`` with its last sample begins the next, and so there is no ``set_epoch``.

    An epoch ends when fewer than ``world * batch_size`` samples are left. ``tail`` says what becomes of those:
    ``drop`` leaves them out, another choice in each epoch; ``pad`` fills up with the first of the same epoch, so that
    each sample is dealt and fewer than ``world * batch_size`` are dealt twice. Either way all ranks get as many. With
    ``DataLoader(drop_last=True)`` give its ``batch_size`` here, too.

    ``rank`` and ``world`` are those of the process group unless given: give them when several ranks train on the same
    samples, as under tensor parallelism.
    """

    elastic: ClassVar[bool] = True
    """Its state is the same on all ranks, counts the samples of all, and so holds on any number of ranks."""

    def __init__(  # noqa: PLR0913 - how samples are dealt, all by keyword
        self,
        samples: int | Sized,
        *,
        seed: int = 0,
        shuffle: bool = True,
        batch_size: int = 1,
        tail: Literal["drop", "pad"] = "drop",
        rank: int | None = None,
        world: int | None = None,
    ) -> None:
        """Stand at the beginning of epoch 0.

        Raises:
            UsageError: with these numbers no rank would ever get a sample, or one is not usable.
        """
        self._samples = samples if isinstance(samples, int) else len(samples)
        self._seed = seed
        self._shuffle = shuffle
        self._batch_size = batch_size
        self._pad = tail == "pad"
        here = this_world() if rank is None or world is None else None
        self._rank = here.rank if here is not None and rank is None else rank or 0
        self._world = here.size if here is not None and world is None else world or 1
        self._epoch = 0
        self._position = 0
        self._dealt = 0
        self._in_vain = 0
        self._trained = False
        self._check(tail)

    def _check(self, tail: str) -> None:
        if tail not in {"drop", "pad"}:
            raise UsageError(f"tail={tail!r}; give 'drop' or 'pad'")
        if not 0 <= self._rank < self._world or self._batch_size < 1:
            raise UsageError(f"rank {self._rank} of {self._world} with batch_size {self._batch_size} can't be dealt to")
        if self._left() == 0:
            raise UsageError(
                f"{self._samples} samples are too few for {self._world} ranks with batch_size {self._batch_size}: no "
                "epoch would have a batch; give a smaller batch_size, or tail='pad'"
            )

    @property
    def epoch(self) -> int:
        """The epoch that is being trained; the first is 0."""
        return self._epoch

    @property
    def position(self) -> int:
        """How many samples of this epoch all ranks have trained on together."""
        return self._position

    @property
    def trained(self) -> bool:
        """Whether ``advance`` was called since this object was made or its state was loaded."""
        return self._trained

    def __len__(self) -> int:
        """Return how many samples of this epoch are left for this rank."""
        return self._left()

    def __iter__(self) -> Iterator[int]:
        """Deal this rank's samples from the position to the end of the epoch. Begin it when all before is trained.

        Raises:
            UsageError: all there is was dealt twice, and nobody said that any of it was trained on.
        """
        if self._in_vain > 1:
            raise UsageError(
                f"all that was left of epoch {self._epoch} was dealt twice, and advance() was not called since: call "
                "sampler.advance(n) for each batch; with DataLoader(drop_last=True) give its batch_size to the sampler"
            )
        self._dealt = 0
        order, count = self._order(), self._left()
        begin = self._position + self._rank
        for number in range(count):
            self._dealt += 1
            self._in_vain += number == count - 1
            yield order[(begin + number * self._world) % self._samples]

    def advance(self, samples: int) -> None:
        """Say that this rank has trained on that many more of its samples; each other rank says the same.

        Raises:
            UsageError: more than were dealt to this rank.
        """
        if not 0 <= samples <= self._dealt:
            raise UsageError(
                f"advance({samples}) and {self._dealt} samples were dealt to this rank since the last advance; give "
                "the number of this rank's samples, not that of all ranks"
            )
        self._dealt -= samples
        self._in_vain = 0
        self._trained = True
        self._position += samples * self._world
        self._turn()

    def _left(self) -> int:
        group = self._world * self._batch_size
        groups, rest = divmod(max(0, self._samples - self._position), group)
        return (groups + (self._pad and rest > 0)) * self._batch_size

    def _turn(self) -> None:
        """Begin the next epoch if this one has nothing left to deal."""
        if self._left() == 0:
            self._epoch, self._position = self._epoch + 1, 0

    def _order(self) -> list[int] | range:
        if not self._shuffle:
            return range(self._samples)
        drawn = hashlib.blake2b(f"{self._seed}/{self._epoch}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(drawn, "little") >> 1)
        return torch.randperm(self._samples, generator=generator).tolist()

    def state_dict(self) -> dict[str, Any]:
        """Return where the job stands in its data: the same on each rank, and for any number of ranks."""
        return {"format": FORMAT, **self._identity(), "epoch": self._epoch, "position": self._position}

    def _identity(self) -> dict[str, Any]:
        return {"samples": self._samples, "seed": self._seed, "shuffle": self._shuffle}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that any rank of any number of ranks gave; make a new iterator afterwards.

        Raises:
            StateMismatchError: it is of other data or another order; nothing was changed.
        """
        if (form := state.get("format")) != FORMAT:
            raise StateMismatchError(f"ElasticSampler: state of format {form}; this version reads format {FORMAT}")
        for name, here in self._identity().items():
            if state[name] != here:
                raise StateMismatchError(
                    f"ElasticSampler: {name} is {state[name]} in the checkpoint and {here} here; in the midst of an "
                    "epoch that would train on some samples twice and never on others"
                )
        self._epoch, self._position = state["epoch"], state["position"]
        self._dealt, self._in_vain, self._trained = 0, 0, False
        self._turn()


def sampler_of(loader: object) -> ElasticSampler | None:
    """Return the sampler that a data loader deals by, or that is given in its place; None when it is another one."""
    if isinstance(loader, ElasticSampler):
        return loader
    for holder in (loader, getattr(loader, "batch_sampler", None)):
        sampler = getattr(holder, "sampler", None)
        if isinstance(sampler, ElasticSampler):
            if getattr(loader, "generator", None) is None:
                logger.warning(
                    "the data loader has no generator of its own, and so draws from torch's stream whenever it begins; "
                    "a restart in the midst of an epoch draws once more. Give it one: "
                    "DataLoader(..., generator=torch.Generator())"
                )
            return sampler
    return None
