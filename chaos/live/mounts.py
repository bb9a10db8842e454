"""File systems of a run's own: memory that can be filled, and disks that forget what was not synced. Takes root."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from toprope.chaos.live.processes import LiveError

_MIB = 1 << 20


@dataclass(slots=True)
class Mounts:
    """What was mounted, newest last: the mount point, and of a disk the file that it is in."""

    _mounted: list[tuple[Path, Path | None]] = field(default_factory=list)

    def memory(self, at: Path, *, mib: int) -> None:
        """Mount an empty tmpfs of this size, unless something is mounted there.

        Raises:
            LiveError: it can't be mounted here.
        """
        if not self._is_mounted(at):
            self._mount(["-t", "tmpfs", "-o", f"size={mib}m,mode=700", "tmpfs"], at, image=None)

    def disk(self, at: Path, *, mib: int, image: Path) -> None:
        """Mount an empty disk of this size, which is a file, unless something is mounted there.

        Raises:
            LiveError: it can't be mounted here.
        """
        if self._is_mounted(at):
            return
        image.parent.mkdir(parents=True, exist_ok=True)
        with image.open("wb") as stream:
            stream.truncate(mib * _MIB)
        _run(["mkfs.ext4", "-q", str(image)])
        self._mount(["-o", "loop", str(image)], at, image=image)
        (at / "lost+found").rmdir()

    def cut_power(self, at: Path) -> None:
        """Let a disk be what it would be had the power failed now: the file that it is in has what was synced alone.

        Nothing may use the disk meanwhile.

        Raises:
            LiveError: it can't be mounted again.
        """
        image = next(image for mounted, image in self._mounted if mounted == at)
        assert image is not None, at
        cut = image.with_name(f"{image.name}.cut")
        _run(["cp", "--sparse=always", str(image), str(cut)])
        self.remove(at)
        cut.rename(image)
        self._mount(["-o", "loop", str(image)], at, image=image)

    def remove(self, at: Path) -> None:
        """Unmount what is mounted there, if anything is."""
        for one in [one for one in self._mounted if one[0] == at]:
            _run(["umount", "-l", str(at)])
            self._mounted.remove(one)

    def remove_all(self) -> None:
        """Unmount all."""
        for at, _ in reversed(self._mounted.copy()):
            self.remove(at)

    def _is_mounted(self, at: Path) -> bool:
        return any(mounted == at for mounted, _ in self._mounted)

    def _mount(self, words: Sequence[str], at: Path, *, image: Path | None) -> None:
        _run(["mount", *words, str(at)])
        self._mounted.append((at, image))


def unmount_below(directory: Path) -> None:
    """Unmount what is mounted somewhere in a directory: what a run that was killed has left."""
    mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for at in mounted:
        if Path(at).is_relative_to(directory):
            _run(["umount", "-l", at])


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise LiveError(f"`{command[0]}` is not there: this scenario takes it, and root") from error
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or [""])[-1]
        raise LiveError(f"`{' '.join(command)}` ended with status {done.returncode}, this takes root: {said}")
