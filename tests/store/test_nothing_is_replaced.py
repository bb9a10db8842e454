"""No pointer, no rename and no replacement decides which checkpoint is the newest: one new record of the log does.

Other software keeps a pointer to the newest, or renames a directory into place, and is left with half of it. Here is
nothing of that kind to be lost, and these tests say so of the store on a directory, which is the likeliest to have it.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.stores import JobBuilder, shard_image, small_store

from toprope.store.log.chain import read_log
from toprope.store.log.fold import JobState
from toprope.store.look.verify import verify_checkpoint
from toprope.store.objects.directory import DirectoryStore
from toprope.store.transfer.restore import restore

CALLS = ("mkdir", "write", "fsync", "link", "unlink", "rmdir", "rename", "replace", "ftruncate")
"""What changes files, of the calls that Python has for the system's own."""


def newest(root: Path, to: Path) -> int:
    """Restore the newest, see that each shard has the bytes of its step, and return that."""
    done = restore(DirectoryStore(root), read_log(DirectoryStore(root), "job"), to=to)
    shards = sorted(to.glob("*.safetensors"))
    for rank, path in enumerate(shards):
        number = 1 if path.read_bytes() == shard_image(step=done.step, rank=rank) else 2
        assert path.read_bytes() == shard_image(step=done.step, rank=rank, number=number)
    assert len(shards) == 2
    shutil.rmtree(to)
    return done.step


@pytest.mark.fault("B52")
@pytest.mark.parametrize("pointer", [None, b"", b"garbage", b"job/manifests/a1-s000000010"])
def test_a_pointer_to_the_newest_is_neither_needed_nor_believed(tmp_path: Path, pointer: bytes | None) -> None:
    root = tmp_path / "root"
    root.mkdir()
    small_store(DirectoryStore(root), steps=(10, 20))
    if pointer is not None:
        (root / "job" / "latest").write_bytes(pointer)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert newest(root, tmp_path / "out") == 20
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


@pytest.mark.fault("B58")
def test_nothing_is_renamed_in_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rename that takes its time, as on FUSE and object stores, can't be cut in two where there is none."""

    def refuse(*paths: object, **_: object) -> None:
        pytest.fail(f"renamed {paths}")

    for module, name in ((os, "rename"), (os, "replace"), (os, "renames"), (shutil, "move")):
        monkeypatch.setattr(module, name, refuse)
    builder = small_store(DirectoryStore(tmp_path), steps=(10, 20))
    assert [verify_checkpoint(builder.store, builder.log.state, seq).damages for seq in (4, 5)] == [(), ()]


def saved_again(root: Path) -> None:
    """Save step 20 once more, in an attempt that began at step 10."""
    builder = JobBuilder(DirectoryStore(root))
    builder.log.state = read_log(builder.store, "job")
    builder.log.term, builder.log.writer_id = builder.log.state.term, builder.log.state.writer_id
    builder.open_attempt(ready=4, from_step=10).checkpoint(20)


def killed_at(number: int, *, after: bool) -> dict[str, Callable[..., Any]]:
    """Return what stands for the calls of the system in a process that is killed at call ``number``."""
    calls = itertools.count(1)

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any, **more: Any) -> Any:  # noqa: ANN401 - as the system takes it
            mine = next(calls) == number
            if mine and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return real(*words, **more)
            finally:
                if mine:
                    os.kill(os.getpid(), signal.SIGKILL)

        return call

    return {name: counted(getattr(os, name)) for name in CALLS}


def dies(root: Path, number: int, *, after: bool) -> bool:
    """Save again in a process of its own; say whether it was killed before it had ended."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for name, call in killed_at(number, after=after).items():
                setattr(os, name, call)
            saved_again(root)
            status = 0
        finally:
            sys.stdout.flush()
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def newest_of(state: JobState) -> tuple[int, int]:
    _, ready = state.restorable()[0]
    return ready.attempt, ready.step


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.fault("B55")
@pytest.mark.parametrize("after", [False, True], ids=["before each call", "after each call"])
def test_a_step_that_is_saved_twice_is_whole_whenever_the_second_save_is_killed(
    memory_dir: Path, *, after: bool
) -> None:
    whole = memory_dir / "whole"
    whole.mkdir()
    small_store(DirectoryStore(whole), steps=(10, 20))
    seen = set()
    for number in itertools.count(1):
        root = memory_dir / "root"
        shutil.copytree(whole, root)
        died = dies(root, number, after=after)
        state = read_log(DirectoryStore(root), "job")
        seen.add(newest_of(state))
        assert newest(root, memory_dir / "out") == newest_of(state)[1]
        shutil.rmtree(root)
        if not died:
            break
    assert number > 30, "calls of the system"
    assert seen == {(1, 20), (1, 10), (2, 20)}, "old; the attempt that goes back to 10 is open; new"
