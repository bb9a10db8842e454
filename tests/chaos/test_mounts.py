"""File systems of a run's own: a full one refuses, one whose power fails forgets what was not synced, none is left."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.chaos.test_scratch import program, said

from toprope.chaos.live.mounts import Mounts, unmount_below
from toprope.chaos.live.processes import LiveError
from toprope.chaos.live.scratch import Scratch

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("mkfs.ext4") is None, reason="mounting takes root, and mkfs.ext4"
)


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    probe = directory(tmp_path, "probe")
    probed = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", probe], capture_output=True, text=True, check=False)
    if probed.returncode:
        pytest.skip(f"nothing can be mounted here: {probed.stderr}")
    subprocess.run(["umount", probe], check=True)
    mounts = Mounts()
    yield mounts
    mounts.remove_all()
    assert not [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(tmp_path) in line]


def directory(tmp_path: Path, name: str) -> Path:
    path = tmp_path / name
    path.mkdir()
    return path


def write(path: Path, *, synced: bool) -> None:
    with path.open("wb") as stream:
        stream.write(b"x" * 4096)
        if synced:
            os.fsync(stream.fileno())


@pytest.mark.skipif(not Path("/dev/loop-control").exists(), reason="a disk in a file takes loop devices")
def test_a_disk_whose_power_fails_has_forgotten_files_and_names_that_were_not_synced(
    mounts: Mounts, tmp_path: Path
) -> None:
    disk = directory(tmp_path, "disk")
    mounts.disk(disk, mib=8, image=tmp_path / "images" / "disk.img")
    assert list(disk.iterdir()) == []
    write(disk / "kept", synced=True)
    write(disk / "named", synced=True)
    write(disk / "lost", synced=False)
    (disk / "named").rename(disk / "renamed")
    mounts.cut_power(disk)
    assert {path.name: path.read_bytes() for path in disk.iterdir()} == dict.fromkeys(("kept", "named"), b"x" * 4096)
    write(disk / "later", synced=True)
    mounts.cut_power(disk)
    assert {path.name for path in disk.iterdir()} == {"kept", "named", "later"}


def test_memory_of_its_own_is_as_large_as_was_asked_and_mounted_once(mounts: Mounts, tmp_path: Path) -> None:
    memory = directory(tmp_path, "memory")
    mounts.memory(memory, mib=1)
    write(memory / "small", synced=False)
    mounts.memory(memory, mib=1)
    assert (memory / "small").exists(), "nothing was mounted over it"
    with (memory / "large").open("wb") as stream, pytest.raises(OSError, match="No space") as refused:
        os.posix_fallocate(stream.fileno(), 0, 1 << 20)
    assert refused.value.errno == errno.ENOSPC
    mounts.remove(memory)
    assert list(memory.iterdir()) == []


def test_what_a_killed_run_has_left_mounted_is_unmounted_by_whoever_clears_up(mounts: Mounts, tmp_path: Path) -> None:
    left = directory(tmp_path, "left")
    inner = directory(left, "inner")
    forgotten = Mounts()
    forgotten.memory(inner, mib=1)
    try:
        assert os.path.ismount(inner)
        unmount_below(left)
        assert not os.path.ismount(inner)
    finally:
        if os.path.ismount(inner):
            forgotten.remove(inner)


_MOUNTS_A_DISK = """
import sys, time
from pathlib import Path
from toprope.chaos.live.mounts import Mounts
from toprope.chaos.live.scratch import Scratch
path = Scratch(Path(sys.argv[1])).path
(path / "disk").mkdir()
Mounts().disk(path / "disk", mib=8, image=path / "disk.img")
print("made", path, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not Path("/dev/loop-control").exists(), reason="a disk in a file takes loop devices")
@pytest.mark.usefixtures("mounts")
def test_a_disk_that_a_killed_run_has_left_mounted_is_gone_with_the_next_run(tmp_path: Path) -> None:
    runs = directory(tmp_path, "runs")
    killed = program(_MOUNTS_A_DISK, str(runs), directory=tmp_path)
    try:
        (left,) = map(Path, said(killed))
        killed.kill()
        assert os.path.ismount(left / "disk")
        with Scratch(runs) as own:
            assert list(runs.iterdir()) == [own.path]
        assert str(left) not in Path("/proc/self/mounts").read_text()
    finally:
        killed.kill()
        unmount_below(runs)


def test_what_cant_be_mounted_is_told_with_the_command(mounts: Mounts, tmp_path: Path) -> None:
    with pytest.raises(LiveError, match=r"`mount -t tmpfs .*` ended with status .*, this takes root"):
        mounts.memory(tmp_path / "nowhere", mib=1)
