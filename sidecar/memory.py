"""The files of the memory and peer tiers: made, faulted in, mapped, hashed. All calls block; none is for the loop.

::

    <memory-dir>/boot_id                        names this memory
    <memory-dir>/<job>/slots/rank-<r>/slot-<n>.{data,page,lock}
    <memory-dir>/<job>/peer/rank-<r>-spare-<n>.{data,page}
    <memory-dir>/<job>/stage/<attempt uid>-rank-<r>-<part>.data
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from toprope.sidecar.budget import measure, why_too_little
from toprope.sidecar.filling import Filling
from toprope.sidecar.ports import PagesPort
from toprope.sidecar.values import Shard, SlotSight, shard_of_page
from toprope.store.checkpoint.shard import identity_of, parse_header
from toprope.store.digest import digest as digest_of
from toprope.store.errors import CorruptObjectError
from toprope.trainer_hooks.link.slot import Page, SlotPaths, SlotState, lock_holder, slot_paths

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_POPULATE_CHUNK = 16 * 1024 * 1024
_SLOT = re.compile(r"slot-(\d{1,9})\.data")
_RANK = re.compile(r"rank-(\d{1,9})")
_SPARE = re.compile(r"rank-(\d{1,9})-spare-(\d)\.data")
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class DroppedError(Exception):
    """A slot or spare does not hold what it should."""


class NoRoomError(Exception):
    """There is not enough memory; the message says what is needed and what there is."""


def slot_files(root: Path, rank: int, number: int) -> SlotPaths:
    """Return the files of a slot in a job's directory."""
    return slot_paths(root / "slots" / f"rank-{rank}", number)


def spare_files(root: Path, rank: int, number: int) -> SlotPaths:
    """Return the files of a spare (it has no lock) in a job's directory."""
    stem = root / "peer" / f"rank-{rank}-spare-{number}"
    return SlotPaths(data=stem.with_suffix(".data"), page=stem.with_suffix(".page"), lock=stem.with_suffix(".lock"))


class Memory:
    """This job's directory in the node's memory."""

    def __init__(
        self, root: Path, pages: PagesPort, *, limit_bytes: int | None, job_uid: Callable[[], str] = lambda: ""
    ) -> None:
        """``job_uid`` tells which job's images may lie here; empty while that is not known."""
        self.root = root
        self._job_uid = job_uid
        self._pages = pages
        self._limit_bytes = limit_bytes
        self._maps: dict[Path, mmap.mmap] = {}
        self._mutex = threading.Lock()

    def make_directories(self) -> None:
        """Make the directories in which all else lies, where they are not there already, or not there any more."""
        for directory in (self.root, self.root / "slots", self.root / "peer", self.root / "stage"):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    # Names

    def slot(self, rank: int, number: int) -> SlotPaths:
        """Return the files of a slot."""
        return slot_files(self.root, rank, number)

    def spare(self, rank: int, number: int) -> SlotPaths:
        """Return the files of a spare (it has no lock)."""
        return spare_files(self.root, rank, number)

    def staged(self, attempt_uid: str, rank: int, part: int) -> Path:
        """Return the file into which a shard, or what is wanted of it, is fetched for a restore."""
        return self.root / "stage" / f"{attempt_uid}-rank-{rank}-{part}.data"

    def slot_ranks(self) -> list[int]:
        """Return the ranks that have slots in memory."""
        found = (_RANK.fullmatch(path.name) for path in (self.root / "slots").iterdir())
        return sorted(int(match[1]) for match in found if match is not None)

    def spares(self) -> list[tuple[int, int]]:
        """Return rank and number of each spare in memory."""
        found = (_SPARE.fullmatch(path.name) for path in (self.root / "peer").iterdir())
        return sorted((int(match[1]), int(match[2])) for match in found if match is not None)

    # Files

    def make_slots(self, rank: int, numbers: tuple[int, ...], size: int) -> None:
        """Make slots: data faulted in, page EMPTY, lock.

        What lacks one of its files was begun, or half removed, by a life that was killed, and is made anew.

        Raises:
            NoRoomError: they do not fit; what was begun is removed.
        """
        self.make_directories()
        self.remove_slots(rank, tuple(number for number in numbers if not self._is_whole(self.slot(rank, number))))
        (self.root / "slots" / f"rank-{rank}").mkdir(mode=0o700, exist_ok=True)
        self._check_room(size * len(numbers), what=f"{len(numbers)} slots of rank {rank}")
        try:
            for number in numbers:
                paths = self.slot(rank, number)
                self._make(paths.data, size)
                _fault_in(self.view(paths.data))
                self._pages.write(paths.page, Page(rank=rank))
                os.close(os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except NoRoomError:
            self.remove_slots(rank, numbers)
            raise

    def _is_whole(self, paths: SlotPaths) -> bool:
        return all(path.exists() for path in (paths.data, paths.page, paths.lock))

    def remove_slots(self, rank: int, numbers: tuple[int, ...]) -> None:
        """Delete slots."""
        for number in numbers:
            paths = self.slot(rank, number)
            for path in (paths.page, paths.data, paths.lock):
                self._remove(path)

    def remove_spares(self, rank: int, numbers: tuple[int, ...]) -> None:
        """Delete spares."""
        for number in numbers:
            paths = self.spare(rank, number)
            self._remove(paths.page)
            self._remove(paths.data)

    def fit(self, path: Path, size: int) -> memoryview:
        """Return a writable view of a file of at least this size, made anew if the one there is smaller.

        Room for all of it is there, but its pages are found only as they are written.

        Raises:
            NoRoomError: it does not fit.
        """
        if not path.exists() or path.stat().st_size < size:
            self.make_directories()
            self._remove(path)
            self._check_room(size, what=path.name)
            self._make(path, size)
        return self.view(path)[:size]

    @contextmanager
    def filling(self, path: Path, size: int, *, needed: int | None = None) -> Iterator[Filling]:
        """Yield a new file of this size, of which ``needed`` bytes are to be filled; after an error it is gone.

        Raises:
            NoRoomError: what is needed does not fit.
        """
        self.make_directories()
        self._remove(path)
        self._check_room(size if needed is None else needed, what=path.name)
        descriptor = os.open(path, _NEW, 0o600)
        try:
            os.ftruncate(descriptor, size)
            yield self._filled(descriptor, path)
        except BaseException:
            self._remove(path)
            raise
        finally:
            os.close(descriptor)

    def drop_staged(self, *, keep: str) -> None:
        """Delete staged files, but for those of attempt ``keep``."""
        self.make_directories()
        for path in sorted((self.root / "stage").iterdir()):
            if not keep or not path.name.startswith(f"{keep}-"):
                self._remove(path)

    def view(self, path: Path) -> memoryview:
        """Return a view of a whole file, mapped once."""
        with self._mutex:
            found = self._maps.get(path)
            if found is None:
                with path.open("r+b") as file:
                    found = mmap.mmap(file.fileno(), 0)
                self._maps[path] = found
        return memoryview(found)

    def _make(self, path: Path, size: int) -> None:
        descriptor = os.open(path, _NEW, 0o600)
        try:
            self._filled(descriptor, path).reserve(0, size)
        except (NoRoomError, OSError):
            path.unlink()
            raise
        finally:
            os.close(descriptor)

    def _filled(self, descriptor: int, path: Path) -> Filling:
        def no_room(more: int, reason: str) -> NoRoomError:
            text = why_too_little(measure(self.root), more, what=path.name)
            return NoRoomError(text or f"{path}: {more} bytes more do not fit: {reason}")

        return Filling(descriptor, no_room=no_room, view=lambda: self.view(path))

    def _check_room(self, more: int, *, what: str) -> None:
        text = why_too_little(measure(self.root), more, what=what)
        if text is not None:
            raise NoRoomError(text)
        if self._limit_bytes is not None:
            left = self._limit_bytes - used_bytes(self.root)
            if more > left:
                allowed = f"--memory {self._limit_bytes} leaves {left}. Raise it, or give none"
                raise NoRoomError(f"{what}: {more} bytes of memory needed; {allowed}")

    def room(self) -> int:
        """Return how many bytes this job may have here in all, those that it has among them."""
        return self.free() + used_bytes(self.root)

    def free(self) -> int:
        """Return how many bytes more this job may have here."""
        available = measure(self.root).available
        return available if self._limit_bytes is None else min(available, self._limit_bytes - used_bytes(self.root))

    def _remove(self, path: Path) -> None:
        with self._mutex:
            self._maps.pop(path, None)  # closed when the last view of it is gone
        path.unlink(missing_ok=True)

    # Slots

    def look(self, rank: int, *, known: Collection[int] = ()) -> tuple[SlotSight, ...]:
        """Return the slots of a rank as they lie in memory; one without page or lock is not ready and left out.

        But each that is ``known`` to have been there is told of: one that lacks a file is gone.
        """
        found = (_SLOT.fullmatch(path.name) for path in (self.root / "slots" / f"rank-{rank}").glob("slot-*.data"))
        numbers = {int(match[1]) for match in found if match is not None}
        sights = (self._sight(rank, number, known=number in known) for number in sorted(numbers.union(known)))
        return tuple(sight for sight in sights if sight is not None)

    def _sight(self, rank: int, number: int, *, known: bool) -> SlotSight | None:
        paths = self.slot(rank, number)
        try:
            page, held = self._pages.read(paths.page), lock_holder(paths.lock) is not None
            return SlotSight(slot=number, capacity=paths.data.stat().st_size, page=page, lock_held=held)
        except FileNotFoundError:
            if not known:
                return None
        page = Page()
        with contextlib.suppress(FileNotFoundError):  # its owner may have written another one
            page = self._pages.read(paths.page)
        return SlotSight(slot=number, capacity=0, page=page, lock_held=False, gone=True)

    def lend(self, slot: int, page: Page, *, check_lock: bool) -> str | None:
        """Write the EMPTY page of a slot; or return the launch whose process holds its lock and do nothing.

        Raises:
            FileNotFoundError: the slot lacks a file.
        """
        paths = self.slot(page.rank, slot)
        if not self._is_whole(paths):
            raise FileNotFoundError(errno.ENOENT, "the slot lacks a file", str(paths.data))
        if check_lock and lock_holder(paths.lock) is not None:
            return self._pages.read(paths.page).launch_id
        self._pages.write(paths.page, page)
        return None

    def empty(self, slot: int, page: Page) -> None:
        """Write the EMPTY page of a slot, if the slot is there."""
        paths = self.slot(page.rank, slot)
        if self._is_whole(paths):
            self._pages.write(paths.page, page)

    def hash_slot(self, rank: int, slot: int, *, seq: int) -> Shard:
        """Return what a sealed slot holds, and write its digest into its page.

        Raises:
            DroppedError: it is not what it should be.
        """
        paths = self.slot(rank, slot)
        page = self._page(paths.page, seq=seq, state=SlotState.SEALED)
        hashed = replace(page, state=SlotState.HASHED, digest=self._digest_of_image(paths.data, page))
        self._check_untouched(paths.page, page)
        self._pages.write(paths.page, hashed)
        return shard_of_page(hashed)

    def check_slot(self, rank: int, slot: int, *, seq: int, digest: str) -> Shard:
        """Return what a hashed slot holds, hashed anew.

        Raises:
            DroppedError: it is not what it should be.
        """
        paths = self.slot(rank, slot)
        page = self._page(paths.page, seq=seq, state=SlotState.HASHED)
        found = self._digest_of_image(paths.data, page)
        if found != digest:
            raise DroppedError(f"its digest is {found}; it was {digest} when it was hashed")
        self._check_untouched(paths.page, page)
        return shard_of_page(replace(page, digest=digest))

    def _page(self, path: Path, *, seq: int, state: SlotState) -> Page:
        page = self._pages.read(path)
        if (page.seq, page.state) != (seq, state):
            raise DroppedError(f"its page says {page.state} of seq {page.seq}; expected {state} of seq {seq}")
        return page

    def _check_untouched(self, path: Path, page: Page) -> None:
        if self._pages.read(path) != page:
            raise DroppedError("it was written to while it was hashed")

    def check_spare(self, rank: int, number: int) -> Shard:
        """Return the peer copy in a spare.

        Raises:
            DroppedError: it holds none, or not the bytes of its digest.
        """
        paths = self.spare(rank, number)
        page = self._pages.read(paths.page)
        if page.state is not SlotState.HASHED or page.rank != rank:
            raise DroppedError("it holds no whole copy")
        found = self._digest_of_image(paths.data, page)
        if found != page.digest:
            raise DroppedError(f"its digest is {found}; it was {page.digest} when it was received")
        return shard_of_page(page)

    def _digest_of_image(self, path: Path, page: Page) -> str:
        view = self.view(path)
        if not 0 < page.bytes <= len(view):
            raise DroppedError(f"its page says {page.bytes} bytes; it has room for {len(view)}")
        image = view[: page.bytes]
        self.check_header(image, shard_of_page(page))
        return digest_of(image)

    def check_header(self, image: memoryview, shard: Shard) -> None:
        """Check that an image says of itself what is said of it.

        Raises:
            DroppedError: it is no image, or that of another snapshot.
        """
        name = f"rank {shard.rank} step {shard.step}"
        try:
            said = identity_of(parse_header(image, size=len(image), name=name), name=name)
        except CorruptObjectError as error:
            raise DroppedError(str(error)) from error
        for field in ("attempt", "attempt_uid", "step", "rank", "world"):
            if getattr(said, field) != getattr(shard, field):
                raise DroppedError(f"its header says {field} {getattr(said, field)}; expected {getattr(shard, field)}")
        job_uid = self._job_uid()
        if job_uid not in {"", said.job_uid}:
            raise DroppedError(f"its header says job {said.job_uid}; this is job {job_uid}")


def used_bytes(root: Path) -> int:
    """Return the bytes of all data files of a job in memory; what goes meanwhile may count or not."""
    used = 0
    for directory, _, names in os.walk(root):  # it passes over a directory that is gone
        for name in names:
            if name.endswith(".data"):
                with contextlib.suppress(FileNotFoundError):
                    used += Path(directory, name).stat().st_size
    return used


def boot_id(memory_dir: Path) -> str:
    """Return the id of this memory, drawn by whoever comes first."""
    path = memory_dir / "boot_id"
    if not path.exists():
        drawn = memory_dir / f"tmp.boot_id.{os.urandom(8).hex()}"
        drawn.write_text(os.urandom(16).hex(), encoding="ascii")
        try:
            path.hardlink_to(drawn)
        except FileExistsError:
            pass
        finally:
            drawn.unlink()
    return path.read_text(encoding="ascii").strip()


def _fault_in(view: memoryview) -> None:
    """Touch each page for writing, so that no trainer waits for the kernel to find one."""
    mapped = view.obj
    assert isinstance(mapped, mmap.mmap)
    try:
        for start in range(0, len(view), _POPULATE_CHUNK):
            mapped.madvise(_POPULATE_WRITE, start, min(_POPULATE_CHUNK, len(view) - start))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        for start in range(0, len(view), mmap.PAGESIZE):
            view[start] = 0
