"""Ranks of one node that have the same tensors at the same step: the first stores them, the others name its file.

Nothing is divided beforehand. A rank says what its shard will name before it uploads; whoever comes later leaves out
what one before it has, uploads the rest at the same time, and waits for that one only before it writes its own index.
Each waits for earlier ones only, so that none waits for ever.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

from toprope.sidecar.values import Shard
from toprope.store.checkpoint.incremental import HEAD, Base, Content, Placed, content_of
from toprope.store.checkpoint.manifest import MAX_FILES, Index
from toprope.store.errors import UnavailableError

SHARED_BYTES = 64 * 1024
"""What two ranks share is left out if it is so many bytes: less is not worth a request of whoever reads it."""
_STEPS = 4

Wait: TypeAlias = Callable[[threading.Event], object]
"""Blocks until an event has been set."""

NEW = ""
"""Stands for the file that a rank is about to write."""


@dataclass(slots=True, kw_only=True, eq=False)
class Turn:
    """The upload of a shard: ``lends`` are the files of its tensors, ``index`` is set once it has been written."""

    rank: int
    base: int | None
    lends: Mapping[Content, str]
    done: threading.Event = field(default_factory=threading.Event)
    index: Index | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Borrowed:
    """The tensors, by name, that a rank leaves to earlier ones."""

    turns: Mapping[str, Turn]

    wait: Wait

    def placed(self) -> dict[str, Placed]:
        """Wait until those have been stored, and return where they are.

        Raises:
            UnavailableError: they were not stored; try again.
        """
        places: dict[int, dict[str, Placed]] = {}
        for turn in {id(turn): turn for turn in self.turns.values()}.values():
            self.wait(turn.done)
            if turn.index is None:
                raise UnavailableError(f"rank {turn.rank}, which has tensors that this shard has too, was not stored")
            index = turn.index
            places[id(turn)] = {one.name: Placed(file=index.files[one.file], tensor=one) for one in index.tensors}
        return {name: places[id(turn)][name] for name, turn in self.turns.items()}


class Siblings:
    """The uploads of the last few steps. Used by many threads."""

    def __init__(self, *, shared_bytes: int = SHARED_BYTES, wait: Wait = threading.Event.wait) -> None:
        self._shared_bytes = shared_bytes
        self._wait = wait
        self._steps: OrderedDict[tuple[str, int], list[Turn]] = OrderedDict()
        self._mutex = threading.Lock()

    @contextmanager
    def turn(
        self, shard: Shard, whole: Index, base: Base | None, kept: Mapping[str, Placed]
    ) -> Iterator[tuple[Turn, Borrowed]]:
        """Take a turn for a shard, and see what it can leave to others; ``kept`` is what its base has."""
        at = (shard.attempt_uid, shard.step)
        turn = Turn(rank=shard.rank, base=None if base is None else base.seq, lends={})
        with self._mutex:
            earlier = self._steps.setdefault(at, [])
            while len(self._steps) > _STEPS:
                self._steps.popitem(last=False)
            borrowed = self._borrowed(whole, earlier, turn, kept)
            turn.lends = {
                content_of(one): kept[one.name].file.key if one.name in kept else NEW
                for one in whole.tensors
                if one.name not in borrowed
            }
            earlier.append(turn)
        try:
            yield turn, Borrowed(turns=borrowed, wait=self._wait)
        finally:
            if turn.index is None:
                with self._mutex:
                    earlier.remove(turn)
            turn.done.set()

    def _borrowed(self, whole: Index, earlier: list[Turn], turn: Turn, kept: Mapping[str, Placed]) -> dict[str, Turn]:
        borrowed: dict[str, Turn] = {}
        if any(one.name == HEAD for one in whole.tensors):
            return borrowed  # a part file would have two of that name
        files = {placed.file.key for placed in kept.values()}
        for other in (one for one in earlier if one.rank != turn.rank):
            common = [
                one
                for one in whole.tensors
                if one.name not in kept and one.name not in borrowed and self._may_have(content_of(one), other, turn)
            ]
            named = {other.lends[content_of(one)] or f"of rank {other.rank}" for one in common}
            enough = sum(one.end - one.begin for one in common) >= self._shared_bytes
            if enough and len(files | named) < MAX_FILES:
                files |= named
                borrowed |= dict.fromkeys((one.name for one in common), other)
        return borrowed

    @staticmethod
    def _may_have(content: Content, other: Turn, turn: Turn) -> bool:
        """Say whether a tensor lies in another's new file, or in an old one that the own base vouches for too."""
        file = other.lends.get(content)
        return file == NEW or (file is not None and other.base == turn.base)
