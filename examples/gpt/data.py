"""Training data that is on every machine: the source text of the Python standard library."""

from __future__ import annotations

import hashlib
import random
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TEXT_BYTES_MAX = 8 << 20


def standard_library_text(limit_bytes: int = TEXT_BYTES_MAX) -> bytes:
    """Return the sources of the standard library's top-level modules, in order of name, at most ``limit_bytes``."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit_bytes:
            break
    return bytes(text[:limit_bytes])


class ShuffledWindows:
    """An endless, shuffled stream of batches of windows of a text, whose position can be saved and set.

    Each epoch visits every window once, in an order drawn from (seed, epoch); a rank takes every ``world``-th of it.
    Each batch is shifted by some bytes drawn from Python's ``random``, so that epochs differ.
    """

    def __init__(self, text: bytes, *, block: int, batch: int, seed: int, rank: int = 0, world: int = 1) -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._text_sha256 = hashlib.sha256(text).hexdigest()
        self._block, self._batch, self._seed = block, batch, seed
        self._rank, self._world = rank, world
        self._windows = (len(text) - 1) // block - 1  # one less: room for the shift
        if self._windows < batch * world:
            raise ValueError(f"a text of {len(text)} bytes is too short for {world} ranks of {batch} x {block} bytes")
        self._epoch, self._taken = 0, 0
        self._order = self._shuffle()

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Return the next windows and, as targets, the same windows one byte on."""
        per_rank = self._windows // self._world
        if self._taken + self._batch > per_rank:
            self._epoch, self._taken = self._epoch + 1, 0
            self._order = self._shuffle()
        mine = self._order[self._rank :: self._world][self._taken : self._taken + self._batch]
        self._taken += self._batch
        shift = random.randrange(self._block)  # noqa: S311 - data, no secret
        at = mine[:, None] * self._block + shift + torch.arange(self._block + 1)
        windows = self._text[at].long()
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the SHA-256 of the text that it is a position in."""
        return {"epoch": self._epoch, "taken": self._taken, "seed": self._seed, "text_sha256": self._text_sha256}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position that ``state_dict`` returned.

        Raises:
            ValueError: it is a position in another text (another Python, say).
        """
        if state["text_sha256"] != self._text_sha256:
            raise ValueError(f"the data has changed: SHA-256 {self._text_sha256}, saved {state['text_sha256']}")
        self._epoch, self._taken, self._seed = state["epoch"], state["taken"], state["seed"]
        self._order = self._shuffle()

    def _shuffle(self) -> Tensor:
        # a generator of its own: data order neither draws from nor moves the stream that dropout uses
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        return torch.randperm(self._windows, generator=generator)
