"""A copy of a store has the same jobs, and its logs name the coordinators of the other, which must not be changed."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from tests.coordinator.test_changes import contents, reigning
from tests.support.stores import JobBuilder, small_store

from toprope.coordinator.basing import pinned_base
from toprope.coordinator.changing import Changer
from toprope.store.errors import UnavailableError
from toprope.store.log.chain import read_log
from toprope.store.log.records import Pin
from toprope.store.names import PROBES, Key
from toprope.store.objects.directory import DirectoryStore

CHANGES: tuple[tuple[str, ...], ...] = (
    ("pin", "ROOT", "job@10"),
    ("metric", "ROOT", "job@10", "val_loss=2"),
    ("taint", "ROOT", "job@40..", "--reason", "x"),
    ("gc", "ROOT", "--retain", "last=1"),
    ("rollback", "ROOT", "job", "--to", "10", "--confirm", "job"),
    ("job", "retain", "ROOT", "last=3"),
)


@pytest.fixture
def job(tmp_path: Path) -> JobBuilder:
    """Return a job with READY 4 to 8: steps 10 to 50, in a store of that name."""
    (tmp_path / "store").mkdir()
    return small_store(DirectoryStore(tmp_path / "store"), steps=(10, 20, 30, 40, 50))


async def copied(root: Path) -> Path:
    return await asyncio.to_thread(shutil.copytree, root, root.parent / "copy")


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("named", [False, True], ids=["by the log", "by its url"])
async def test_what_is_asked_of_a_copy_changes_neither_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, named: bool
) -> None:
    async with reigning(tmp_path / "store") as live:
        copy = await copied(live.root)
        before, before_in_copy = contents(live.root), contents(copy)
        for words in CHANGES:
            url = ("--coordinator", live.url) if named else ()
            assert await live.ckpt(*(copy if word == "ROOT" else word for word in words), *url) == 64, words
            told = capsys.readouterr().err
            assert f"the coordinator at {live.url} serves {live.root}, not {copy}" in told
            assert "nothing was changed. " in told
            assert contents(live.root) == before
            assert contents(copy) == before_in_copy


@pytest.mark.usefixtures("job")
async def test_a_copy_is_changed_alone_by_who_asks_no_coordinator(tmp_path: Path) -> None:
    async with reigning(tmp_path / "store") as live:
        copy = await copied(live.root)
        before = contents(live.root)
        for words in CHANGES:
            words_of_copy = (copy if word == "ROOT" else word for word in words)
            assert await live.ckpt(*words_of_copy, "--coordinator", "none") == 0, words
        assert contents(live.root) == before
        changed = await asyncio.to_thread(read_log, DirectoryStore(copy), "job")
        assert (set(changed.pins), changed.attempt_number, changed.retain) == ({4}, 2, "last=3")
        assert await live.ckpt("job", "purge", copy, "job", "--confirm", "job") == 64
        assert await live.ckpt("job", "purge", copy, "job", "--confirm", "job", "--coordinator", "none") == 0
        assert contents(copy) == {}
        assert contents(live.root) == before


@pytest.mark.usefixtures("job")
async def test_the_store_itself_is_changed_however_it_is_written_and_no_probe_stays(tmp_path: Path) -> None:
    async with reigning(tmp_path / "store") as live:
        link = tmp_path / "link"
        link.symlink_to(live.root)
        term = (await live.state()).term
        assert await live.ckpt("pin", link, "job@10") == 0
        state = await live.state()
        assert (set(state.pins), state.term) == ({4}, term)
        assert not [key for key in await asyncio.to_thread(contents, live.root) if key.startswith(PROBES)]


class ReadOnlyStore(DirectoryStore):
    def create(self, key: Key, body: bytes | memoryview) -> None:
        raise UnavailableError(f"{key}: Read-only file system")


@pytest.mark.usefixtures("job")
async def test_of_a_store_that_can_not_be_written_nothing_is_asked(tmp_path: Path) -> None:
    async with reigning(tmp_path / "store") as live:
        changer = Changer(store=ReadOnlyStore(live.root), root="here", coordinator_url="", token="", say=print)
        state, before = await live.state(), contents(live.root)
        with pytest.raises(UnavailableError, match=r"not be written to here.* nothing was asked .*Read-on") as refused:
            await asyncio.to_thread(changer.append, state, Pin(seq=4), purpose="pin")
        assert refused.value.exit_status == 4
        assert contents(live.root) == before


@pytest.mark.usefixtures("job")
async def test_a_base_in_a_copy_is_pinned_in_the_copy(tmp_path: Path) -> None:
    async with reigning(tmp_path / "store") as live:
        copy = DirectoryStore(await copied(live.root))
        before = contents(live.root)

        def pin() -> int:
            base = pinned_base(copy, "new", at="job@20", take="all", token="", into=lambda: copy, say=lambda _: None)
            return base.seq

        seq = await asyncio.to_thread(pin)
        assert (await asyncio.to_thread(read_log, copy, "job")).pins == {seq}
        assert contents(live.root) == before
