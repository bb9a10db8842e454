"""The guards of the suite itself: each finds what was planted for it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from blockbuster import BlockingError
from tests.meta import test_tidy as tidy

from toprope.trainer_hooks.link.slot import Page, read_page, write_page


async def test_a_coroutine_of_ours_that_reads_a_file_is_caught(tmp_path: Path) -> None:
    (tmp_path / "page").write_bytes(b"")  # the test itself may
    with pytest.raises(BlockingError):
        read_page(tmp_path / "page")


def test_the_same_call_outside_an_event_loop_is_not(tmp_path: Path) -> None:
    write_page(tmp_path / "page", Page(seq=7))
    assert read_page(tmp_path / "page").seq == 7


@pytest.mark.parametrize(
    ("planted", "caught"),
    [
        ("try:\n  f()\nexcept Exception:\n  pass", True),
        ("try:\n  f()\nexcept (OSError, BaseException):\n  log()", True),
        ("try:\n  f()\nexcept:\n  pass", True),
        ("try:\n  f()\nexcept BaseException:\n  undo()\n  raise", False),
        ("try:\n  f()\nexcept OSError:\n  pass", False),
    ],
)
def test_a_handler_of_everything_is_found_unless_it_raises_again(planted: str, *, caught: bool) -> None:
    handlers = [node for node in ast.walk(ast.parse(planted)) if isinstance(node, ast.ExceptHandler)]
    assert any(tidy.swallows_everything(handler) for handler in handlers) is caught


@pytest.mark.parametrize(
    "planted",
    ["import pickle", "from pickle import loads", "torch.load(x)", "torch.load(x, weights_only=maybe)", "eval(x)"],
)
def test_code_that_unpickles_is_found(planted: str) -> None:
    assert tidy.dangers(ast.parse(planted))


def test_a_load_of_weights_only_is_let_pass() -> None:
    assert not tidy.dangers(ast.parse("torch.load(x, weights_only=True)"))


def test_an_object_collective_is_found() -> None:
    assert tidy.dangers(ast.parse("dist.broadcast_object_list([x])"))
    assert not tidy.dangers(ast.parse("dist.broadcast(tensor)"))
