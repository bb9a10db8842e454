"""Only so many buffers at once, whoever asks, and none that nobody needs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from toprope.store.checkpoint.buffers import Buffers


def test_who_comes_when_all_are_taken_waits_for_one() -> None:
    buffers = Buffers(at_once=2)

    def take() -> int:
        with buffers.one(10) as view:
            return len(view)

    with ThreadPoolExecutor(1) as pool, ExitStack() as first:
        with buffers.one(10):
            first.enter_context(buffers.one(10))
            late = pool.submit(take)
            assert not buffers._turns.acquire(blocking=False)
            assert not late.done()
        assert late.result(timeout=20) == 10


def test_a_buffer_is_used_again_as_long_as_somebody_is_at_work_and_then_goes() -> None:
    buffers = Buffers(at_once=2)
    with buffers.kept():
        with buffers.one(100) as view:
            view[:] = bytes([1]) * 100
        with buffers.one(10) as view:
            assert bytes(view) == bytes([1]) * 10, "the same one"
        with buffers.kept(), buffers.one(200) as view:
            assert len(view) == 200
        assert len(buffers._free) == 1
    assert buffers._free == []
    with buffers.one(10) as view:
        assert bytes(view) == bytes(10)
    assert buffers._free == []


def test_one_that_fails_gives_its_buffer_back() -> None:
    buffers = Buffers(at_once=1)
    for _ in range(3):
        with pytest.raises(KeyError), buffers.one(10):
            raise KeyError
