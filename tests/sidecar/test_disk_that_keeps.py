"""A disk from which nothing can be removed, as one that was remounted read-only: it costs nothing but the room."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from toprope.sidecar.adapters.files import Disk
from toprope.sidecar.local_tier import LocalTier


class KeepingDisk(Disk):
    def remove(self, path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))


def test_a_sweep_goes_on_past_what_the_disk_keeps_and_names_it(tmp_path: Path) -> None:
    for name in ("tmp.a", "tmp.b", "notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    assert LocalTier(tmp_path, KeepingDisk()).sweep() == [
        f"{tmp_path}/tmp.a can't be removed: Read-only file system",
        f"{tmp_path}/tmp.b can't be removed: Read-only file system",
    ]


def test_a_copy_that_the_disk_keeps_is_named(tmp_path: Path) -> None:
    copy = tmp_path / "a1-s2-rank-0-of-1-ab.safetensors"
    receipt = copy.with_name(f"{copy.name}.receipt")
    for path in (copy, receipt):
        path.write_bytes(b"x")
    assert LocalTier(tmp_path, KeepingDisk()).drop(copy) == f"{receipt} can't be removed: Read-only file system"
    assert LocalTier(tmp_path, Disk()).drop(copy) == ""
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_can_t_be_read_has_nothing_that_is_listed_and_is_named(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "gone", Disk())
    line = f"{tmp_path}/gone can't be read: No such file or directory"
    assert tier.sweep() == [line]
    assert list(tier.scan()) == [line]
