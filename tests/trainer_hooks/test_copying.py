"""The copying thread: what it can't do is said, and it goes on with what comes next."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest
import torch

from toprope.trainer_hooks.image.copying import (
    SAMPLE_BYTES,
    WORTH_A_THREAD_BYTES,
    Copier,
    Move,
    sample_place,
    sampled,
)


class Unreadable:
    """A tensor that is not there any more, in a way that nobody foresaw."""

    def data_ptr(self) -> int:
        raise LookupError


def test_work_that_raises_is_told_of_and_the_next_is_done_all_the_same(
    thread_errors: queue.SimpleQueue[type[BaseException]],
) -> None:
    copier, done = Copier(threads=2), threading.Event()
    nothing: dict[str, None] = {}
    for _ in range(2):
        copier.start(lambda: nothing["unforeseen"])
    copier.start(done.set)
    assert done.wait(20)
    copier.close()
    assert [thread_errors.get(timeout=20) for _ in range(2)] == [KeyError, KeyError]


def test_halves_are_copied_and_one_that_was_not_is_an_error(
    thread_errors: queue.SimpleQueue[type[BaseException]],
) -> None:
    half = torch.arange(WORTH_A_THREAD_BYTES // 8, dtype=torch.int64)
    target = torch.zeros(2, len(half), dtype=torch.int64)
    gone: Any = Unreadable()
    copier = Copier(threads=2)
    mine, other = (Move(target[at].data_ptr(), half, half.nbytes) for at in range(2))
    with pytest.raises(RuntimeError, match="failed to copy its half"):
        copier.run([mine, Move(other.to, gone, half.nbytes)])
    assert not target[1].any()
    copier.run([mine, other])
    copier.close()
    assert thread_errors.get(timeout=20) is LookupError
    assert torch.equal(target, torch.stack([half, half]))


@pytest.mark.parametrize("changed", range(3))
@pytest.mark.parametrize("side", ["source", "copy"])
def test_samples_notice_a_byte_that_changes_on_either_side_of_any_of_several_copies(side: str, changed: int) -> None:
    sources = [torch.arange(count).to(torch.uint8) for count in (250, SAMPLE_BYTES, 3 * SAMPLE_BYTES)]
    copies = [torch.zeros_like(source) for source in sources]
    moves = [Move(copy.data_ptr(), source, len(source)) for source, copy in zip(sources, copies, strict=True)]
    for turn in range(3):
        sound = sampled(moves, turn)
        assert not sound(), "nothing is copied yet"
        for move in moves:
            move.run()
        assert sound()
        place, count = sample_place(len(sources[changed]), turn)
        for at in (place, place + count - 1):
            one = (sources if side == "source" else copies)[changed]
            one[at] ^= 1
            assert not sound()
            one[at] ^= 1
        assert sound()
        for copy in copies:
            copy.zero_()
