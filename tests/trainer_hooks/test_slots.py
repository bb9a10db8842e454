"""Locks and grants: a slot is locked once per process, and each grant is used once."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from tests.support.tiny_trainer import METADATA

from toprope.trainer_hooks.image.shard import Image, MappedFile, plan_image, write_image
from toprope.trainer_hooks.link import wire
from toprope.trainer_hooks.link.slot import CELL_BYTES, Page, SlotState, lock_holder, read_page, write_page
from toprope.trainer_hooks.link.slots import LentSlots, SlotLockedError, hold_lock, hold_until_taken


def _slot(directory: Path, number: int = 0, seq: int = 1, size: int = 4096) -> wire.Slot:
    for kind in ("data", "lock"):
        path = directory / f"slot-{number}.{kind}"
        if not path.exists():
            path.write_bytes(bytes(size))
    return wire.Slot(
        slot=number,
        seq=seq,
        path=str(directory / f"slot-{number}.data"),
        page_path=str(directory / f"slot-{number}.page"),
        lock_path=str(directory / f"slot-{number}.lock"),
        bytes=size,
    )


def _holder(path: Path) -> str:
    """Ask from another process who holds the lock: in this one, looking would lose it."""
    code = (
        "import pathlib, sys; from toprope.trainer_hooks.link.slot import lock_holder\n"
        "print(lock_holder(pathlib.Path(sys.argv[1])))"
    )
    return subprocess.run(
        [sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_the_lock_outlives_opening_and_closing_the_data_and_a_forked_child(tmp_path: Path) -> None:
    slot = _slot(tmp_path)
    slots = LentSlots()
    slots.lend(slot)
    slots.lend(_slot(tmp_path, seq=2))  # a second grant does not open the lock file again
    Path(slot.path).read_bytes()
    assert _holder(Path(slot.lock_path)) == str(os.getpid())
    child = os.fork()
    if child == 0:
        os.closerange(3, 256)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert _holder(Path(slot.lock_path)) == str(os.getpid())


def test_a_slot_that_the_sidecar_has_removed_is_passed_over_when_the_others_are_handed_over(tmp_path: Path) -> None:
    slots = LentSlots()
    lent = [_slot(tmp_path, number) for number in range(3)]
    for slot in lent:
        slots.lend(slot)
    Path(lent[0].lock_path).unlink()
    slots.hand_over()
    assert [_holder(Path(slot.lock_path)) for slot in lent[1:]] == [str(os.getpid()), "None"]
    assert not slots._targets, "nor kept in memory"


def test_a_lock_file_is_opened_once_however_often_its_slot_is_lent(tmp_path: Path) -> None:
    slots = LentSlots()
    slots.lend(_slot(tmp_path))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for seq in range(2, 12):
        slots.lend(_slot(tmp_path, seq=seq))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_lock_that_another_process_holds_is_an_error_and_stays_theirs(tmp_path: Path) -> None:
    slot = _slot(tmp_path)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with Path(slot.lock_path).open("r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            os.write(write, b"x")
            signal.pause()
    try:
        os.read(read, 1)
        with pytest.raises(SlotLockedError, match=r"slot-0\.lock"):
            LentSlots().lend(slot)
        assert lock_holder(Path(slot.lock_path)) == child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    hold_lock(Path(slot.lock_path))


def test_a_forked_child_does_not_think_that_it_holds_the_lock(tmp_path: Path) -> None:
    def ask(slot: wire.Slot) -> None:
        with pytest.raises(SlotLockedError):
            hold_lock(Path(slot.lock_path))

    slot = _slot(tmp_path)
    hold_lock(Path(slot.lock_path))
    assert _in_child(ask, slot) == 0


def test_a_lock_is_held_at_each_moment_while_another_process_takes_the_slots_over(tmp_path: Path) -> None:
    """The sidecar takes a world of which no lock is held for dead, and another one may be let in beside it."""
    lent = [_slot(tmp_path, number) for number in range(3)]
    kept, *others = [Path(slot.lock_path) for slot in lent]
    slots = LentSlots()
    for slot in lent:
        slots.lend(slot)
    (told, tell), (heard, say) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        _take_over(lent, told, say)
    try:
        slots.hand_over()
        assert slots.take() is None
        assert (_holder(kept), [lock_holder(path) for path in others]) == (str(os.getpid()), [None, None])
        os.write(tell, b"x")
        assert os.read(heard, 1) == b"2", "all but the one that is kept"
        while _holder(kept) == str(os.getpid()):
            pass
        os.write(tell, b"x")
        assert os.read(heard, 1) == b"3", "that one, too, now that it was dropped"
        assert {lock_holder(path) for path in (kept, *others)} == {child}
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for descriptor in (told, tell, heard, say):
            os.close(descriptor)
    assert {lock_holder(path) for path in (kept, *others)} == {None}, "it has died alone: nobody saves any more"


def _take_over(lent: list[wire.Slot], told: int, say: int) -> NoReturn:
    """Be the other process: lock what can be locked as soon as one is told to, and once more when told again."""
    slots = LentSlots()
    os.read(told, 1)
    for slot in lent:
        with contextlib.suppress(SlotLockedError):
            slots.lend(slot)
    os.write(say, str(len(slots._free)).encode())
    os.read(told, 1)
    granted = [slots.take() for _ in lent]
    os.write(say, str(len([one for one in granted if one is not None])).encode())
    os.read(told, 1)
    os._exit(0)


def test_slots_that_this_process_takes_again_are_not_dropped_under_it(tmp_path: Path) -> None:
    lent = [_slot(tmp_path, number) for number in range(2)]
    first, second = LentSlots(), LentSlots()
    for slot in lent:
        first.lend(slot)
    first.hand_over()
    for slot in lent:
        second.lend(slot)
    hold_until_taken(Path(lent[0].lock_path))
    assert [_holder(Path(slot.lock_path)) for slot in lent] == [str(os.getpid())] * 2


@pytest.mark.fault("B89")
def test_a_slot_that_could_not_be_mapped_for_want_of_memory_is_whole_for_whoever_maps_it_next(tmp_path: Path) -> None:
    """Neither the hook that lends nor the one that restores leaves a lock, or less than there was."""
    slot = _slot(tmp_path, size=32 << 20)
    tensors = {"w": torch.arange(6 << 20, dtype=torch.float32)}
    plan = plan_image(tensors, METADATA)
    length = write_image(MappedFile(Path(slot.path)), plan, tensors, b"{}", METADATA)
    whole = Path(slot.path).read_bytes()

    def attach(slot: wire.Slot) -> None:
        """Be a process that may not map as much, then one that may."""
        limits = resource.getrlimit(resource.RLIMIT_AS)
        here = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (here + (12 << 20), limits[1]))
        slots = LentSlots()
        for failing in (lambda: slots.lend(slot), lambda: Image(Path(slot.path), length)):
            with pytest.raises(OSError, match="Cannot allocate memory"):
                failing()
        assert slots.take() is None
        resource.setrlimit(resource.RLIMIT_AS, limits)
        slots.lend(slot)
        assert slots.take() is not None

    assert _in_child(attach, slot) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["slot-0.data", "slot-0.lock"]
    assert Path(slot.path).read_bytes() == whole
    assert Image(Path(slot.path), length).tensor("w").equal(tensors["w"])
    LentSlots().lend(slot)


def test_grants_are_used_in_order_and_once(tmp_path: Path) -> None:
    slots = LentSlots()
    for number in range(2):
        slots.lend(_slot(tmp_path, number))
    taken = [slots.take() for _ in range(3)]
    assert [grant.slot.slot if grant else None for grant in taken] == [0, 1, None]


def test_a_newer_grant_of_a_slot_replaces_the_older(tmp_path: Path) -> None:
    slots = LentSlots()
    slots.lend(_slot(tmp_path, seq=1))
    slots.lend(_slot(tmp_path, seq=2))
    first, second = slots.take(), slots.take()
    assert first is not None
    assert first.slot.seq == 2
    assert second is None


def test_what_is_sealed_is_said_again_until_its_slot_is_lent_again(tmp_path: Path) -> None:
    slots = LentSlots()
    sealed = wire.Sealed(slot=0, seq=1, attempt_uid="a", step=3, bytes=10)
    slots.note_sealed(sealed)
    slots.forget()
    assert slots.unconfirmed() == (sealed,)
    slots.lend(_slot(tmp_path, seq=1))  # a late double of the grant that it was sealed under
    assert slots.unconfirmed() == (sealed,)
    slots.lend(_slot(tmp_path, seq=2))
    assert slots.unconfirmed() == ()


def test_a_slot_file_that_was_removed_is_not_kept_in_memory(tmp_path: Path) -> None:
    slots = LentSlots()
    small, large = _slot(tmp_path, 0), _slot(tmp_path, 1)
    slots.lend(small)
    slots.take()
    Path(small.path).unlink()
    slots.lend(large)
    mapped = Path("/proc/self/maps").read_text()
    assert small.path not in mapped
    assert large.path in mapped


def test_a_grown_slot_file_is_mapped_anew(tmp_path: Path) -> None:
    slots = LentSlots()
    slots.lend(_slot(tmp_path))
    with (tmp_path / "slot-0.data").open("r+b") as file:
        file.truncate(8192)
    slots.lend(_slot(tmp_path, seq=2, size=8192))
    grant = slots.take()
    assert grant is not None
    assert grant.target.bytes == 8192


def test_a_page_whose_newest_cell_was_cut_off_or_changed_is_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "page"
    for seq in (1, 2, 3):
        write_page(path, Page(state=SlotState.SEALED, seq=seq))
        assert read_page(path).seq == seq
    raw = path.read_bytes()
    newest = raw.index(b'"seq":3') // CELL_BYTES * CELL_BYTES
    written = raw[newest : newest + CELL_BYTES].rstrip(b"\0")
    for length in range(len(written)):
        path.write_bytes(raw[:newest] + written[:length].ljust(CELL_BYTES, b"\0") + raw[newest + CELL_BYTES :])
        assert read_page(path).seq == 2, length
    for at in range(newest, newest + len(written)):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        assert read_page(path).seq == 2, at


def _killed_in_mid_copy(slot: wire.Slot) -> None:
    class Deadly(MappedFile):
        def put_tensor(self, offset: int, tensor: torch.Tensor) -> None:
            super().put_tensor(offset, tensor)
            os.kill(os.getpid(), signal.SIGKILL)

    hold_lock(Path(slot.lock_path))
    write_page(Path(slot.page_path), Page(state=SlotState.WRITING, seq=2, step=5))
    tensors = {"a": torch.ones(4), "b": torch.ones(4)}
    write_image(Deadly(Path(slot.path)), plan_image(tensors, METADATA), tensors, b"{}", METADATA)


def _in_child(action: Callable[[wire.Slot], None], slot: wire.Slot) -> int:
    child = os.fork()
    if child == 0:
        try:
            action(slot)
        except BaseException:  # noqa: BLE001 - the edge of a process
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_page_of_another_version_is_an_empty_one_and_is_written_over(tmp_path: Path) -> None:
    path = tmp_path / "page"
    body = b'{"state":"HASHED","seq":4,"colour":"red"}'
    counted = struct.pack("<IQ", len(body), 1) + body
    cell = struct.pack("<I", zlib.crc32(counted)) + counted
    path.write_bytes(bytes(CELL_BYTES) + cell.ljust(CELL_BYTES, b"\0"))
    assert read_page(path) == Page()
    write_page(path, Page(seq=5))
    assert read_page(path).seq == 5


def test_a_kill_in_mid_copy_leaves_writing_and_a_free_lock(tmp_path: Path) -> None:
    slot = _slot(tmp_path)
    write_page(Path(slot.page_path), Page(state=SlotState.EMPTY, seq=1))
    assert _in_child(_killed_in_mid_copy, slot) == -signal.SIGKILL
    page = read_page(Path(slot.page_path))
    assert (page.state, page.seq, page.step) == (SlotState.WRITING, 2, 5)
    assert lock_holder(Path(slot.lock_path)) is None


def test_who_waits_for_a_successor_waits_no_more_once_the_slot_is_removed(tmp_path: Path) -> None:
    slot = _slot(tmp_path)
    lent = LentSlots()
    lent.lend(slot)
    before = set(threading.enumerate())
    lent.hand_over()
    (waiting,) = set(threading.enumerate()) - before
    Path(slot.lock_path).unlink()
    waiting.join(10)
    assert not waiting.is_alive()
