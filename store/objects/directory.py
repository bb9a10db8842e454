"""A directory as an object store: each object a file under the root, put there by ``link``.

``link`` either gives the file its final name, whole, or fails because the name is taken; there is no state between.
The bytes are synced before the link and the directory after it, so what ``create`` reported survives a power cut.
Paths are walked part by part from the root without following symbolic links. Names that begin with a dot are
temporaries and no objects; a crash can leave one behind, and nothing ever reads it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import stat
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

from toprope.store.errors import (
    AlreadyExistsError,
    CorruptObjectError,
    MissingObjectError,
    UnavailableError,
    UnseenDirectoryError,
    UsageError,
)
from toprope.store.names import PROBES, Key, key_parts
from toprope.store.objects.pieces import pieces_of
from toprope.store.objects.protocol import check_whole

_WALK = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_TEMPORARY = ".tmp-"
_KEPT_DEPTH = 2
"""Directories so many parts deep, ``job/log`` for one, stay when they are empty."""

_MAX_SYNCED = 1024
"""Of so many directories is known that their entries were synced; then all are synced once more."""

_RIGHTS = "; let this user read and write there, or be the user that made it"
NO_ROOM = "; make room: `ckpt gc` deletes what is condemned, and needs none; `ckpt du` says what is large"
_ADVICE = {
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.ENOSPC: NO_ROOM,
    errno.EDQUOT: NO_ROOM,
    errno.EROFS: "; mount it so that it can be written",
}

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_ALIGNMENT_BYTES = 4096
_DIRECT_BYTES = 8 * 1024 * 1024


class DirectoryStore:
    """Objects as files under ``root``, which must exist."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._synced: set[tuple[str, ...]] = set()

    def __repr__(self) -> str:
        return f"DirectoryStore({str(self.root)!r})"

    def create(self, key: Key, body: bytes | memoryview) -> None:
        """Write a new object, durably and whole."""
        *parents, name = key_parts(key)
        with self._translated(key), self._directory(tuple(parents), make=True) as directory:
            temporary = f"{_TEMPORARY}{secrets.token_hex(8)}"
            try:
                _write_synced(temporary, body, directory=directory)
                os.link(temporary, name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
            except FileNotFoundError as error:
                raise UnavailableError(f"{key}: its directory was removed from {self.root} meanwhile") from error
            except FileExistsError:
                os.fsync(directory)
                raise AlreadyExistsError(f"{key}: exists already in {self.root}; it was not touched") from None
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=directory)
            os.fsync(directory)

    def read(self, key: Key, *, start: int = 0, length: int | None = None, uncached: bool = False) -> bytes:
        """Return bytes of an object; ``uncached`` reads with O_DIRECT where the file system can."""
        *parents, name = key_parts(key)
        with self._translated(key), self._directory(tuple(parents)) as directory:
            if uncached:
                os.fsync(directory)
            with _opened(name, directory) as file:
                wanted = _wanted(file, key, start, length)
                read = _read_direct if uncached and _set_direct(file) else _read_buffered
                body = read(file, start, wanted)
        if len(body) != wanted:
            raise _ends_at(key, start + len(body), start + wanted)
        return body

    def stream(self, key: Key, *, start: int, length: int) -> Generator[memoryview, None, None]:
        """Yield bytes of an object."""
        *parents, name = key_parts(key)
        with (
            self._translated(key),
            self._directory(tuple(parents)) as directory,
            _opened(name, directory) as file,
        ):
            _wanted(file, key, start, length)

            def read_into(room: memoryview, at: int) -> int:
                return os.preadv(file, [room], at)

            def short(at: int) -> CorruptObjectError:
                return _ends_at(key, at, start + length)

            yield from pieces_of(read_into, start=start, length=length, short=short)

    def size(self, key: Key) -> int:
        """Return the length of an object in bytes."""
        *parents, name = key_parts(key)
        with self._translated(key), self._directory(tuple(parents)) as directory, _opened(name, directory) as file:
            return _regular_size(file, key)

    def delete(self, keys: Sequence[Key]) -> None:
        """Remove objects, and directories that this leaves empty. Needs no free space."""
        left: set[tuple[str, ...]] = set()
        for key in keys:
            *parents, name = key_parts(key)
            with contextlib.suppress(MissingObjectError), self._translated(key), self._directory(tuple(parents)) as at:
                os.unlink(name, dir_fd=at)
                left.add(tuple(parents))
        for parts in sorted(left, key=len, reverse=True):
            self._prune(parts)

    def _prune(self, parts: tuple[str, ...]) -> None:
        """Remove a directory and those above it as far as they are empty; a writer makes them again."""
        for depth in range(len(parts), _KEPT_DEPTH, -1):
            try:
                with self._directory(parts[: depth - 1]) as parent:
                    os.rmdir(parts[depth - 1], dir_fd=parent)
            except OSError:
                return  # it has something in it, or is gone

    def list(self, prefix: str) -> Iterator[Key]:
        """Yield the keys that begin with ``prefix``, in order."""
        parent = prefix.rpartition("/")[0]
        start = key_parts(parent) if parent else ()
        for key in self._walk(start):
            if key.startswith(prefix):
                yield key

    def sweep_temporaries(self, prefix: str) -> tuple[Key, ...]:
        """Remove what writers that died have left under a directory; return what it was.

        A writer holds a lock on its temporary file while it lives, so no clock has to tell.
        """
        return tuple(self._swept(tuple(key_parts(prefix.removesuffix("/")))))

    def empty_directories(self, prefix: str) -> tuple[str, ...]:
        """Return the directories under one that have nothing in them."""
        return tuple("/".join(parts) for parts in self._emptied(tuple(key_parts(prefix.removesuffix("/")))))

    def _emptied(self, parts: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        entries = self._entries(parts, temporary=True)
        if not entries:
            yield parts
        for name, is_directory in entries:
            if is_directory:
                yield from self._emptied((*parts, name))

    def _swept(self, parts: tuple[str, ...]) -> Iterator[Key]:
        for name, is_directory in self._entries(parts, temporary=True):
            if is_directory:
                yield from self._swept((*parts, name))
            elif name.startswith(_TEMPORARY):
                with self._translated(Key("/".join((*parts, name)))), self._directory(parts) as directory:
                    if _unlinked_if_dead(name, directory):
                        yield Key("/".join((*parts, name)))

    def probe(self) -> None:
        """Check that objects can be written once and only once here. Leaves nothing but the place for probes.

        Who serves here owns that: else it would be whoever first asks for a change, and nobody else might ask then.

        Raises:
            UsageError: the directory can't be written, or its file system lacks ``link``.
        """
        try:
            with self._directory(()) as root:
                _probe_link(root)
                self._make(root, (PROBES.rstrip("/"),))
        except OSError as error:
            raise UsageError(
                f"store {self.root} can't be used: {os.strerror(error.errno or 0)}. "
                "Give a directory that this user can write, on a file system with hard links"
            ) from error

    def _walk(self, parts: tuple[str, ...]) -> Iterator[Key]:
        for name, is_directory in self._entries(parts):
            if is_directory:
                yield from self._walk((*parts, name))
            else:
                yield Key("/".join((*parts, name)))

    def _entries(self, parts: tuple[str, ...], *, temporary: bool = False) -> tuple[tuple[str, bool], ...]:
        """Return names with whether each is a directory, in the order of the keys under them."""
        try:
            with (
                self._translated(Key("/".join(parts))),
                self._directory(parts) as directory,
                os.scandir(directory) as scan,
            ):
                found = [
                    (entry.name, entry.is_dir(follow_symlinks=False))
                    for entry in scan
                    if not entry.is_symlink()
                    and (not entry.name.startswith(".") or (temporary and entry.name.startswith(_TEMPORARY)))
                ]
        except MissingObjectError:
            return ()
        return tuple(sorted(found, key=lambda item: item[0] + "/" * item[1]))

    @contextlib.contextmanager
    def _directory(self, parts: tuple[str, ...], *, make: bool = False) -> Iterator[int]:
        """Open the directory of these parts, making and syncing what is missing if asked to."""
        try:
            directory = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            why = f"{os.strerror(error.errno or 0)}{advice(error)}"
            raise UnavailableError(f"store {self.root} can't be reached: {why}") from error
        try:
            for depth in range(1, len(parts) + 1):
                child = self._entered(directory, parts[:depth], make=make)
                os.close(directory)
                directory = child
            yield directory
        finally:
            os.close(directory)

    def _entered(self, parent: int, path: tuple[str, ...], *, make: bool) -> int:
        """Open the last part of ``path`` in ``parent``, made if need be, with its entry synced once."""
        if make and path not in self._synced:
            self._make(parent, path)
        try:
            return os.open(path[-1], _WALK, dir_fd=parent)
        except FileNotFoundError:
            if not make:
                raise
        self._make(parent, path)  # it was removed since
        try:
            return os.open(path[-1], _WALK, dir_fd=parent)
        except FileNotFoundError as error:  # a file system of the network: another node has made it just now
            where = "/".join(path)
            raise UnseenDirectoryError(
                f"{where}: the directory is not visible yet in {self.root}; try again"
            ) from error

    def _make(self, parent: int, path: tuple[str, ...]) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path[-1], 0o777, dir_fd=parent)
        os.fsync(parent)
        if len(self._synced) >= _MAX_SYNCED:
            self._synced.clear()
        self._synced.add(path)

    @contextlib.contextmanager
    def _translated(self, key: Key) -> Iterator[None]:
        """Turn what the operating system says about ``key`` into our errors: the only place that does."""
        try:
            yield
        except FileNotFoundError as error:
            raise MissingObjectError(f"{key}: no such object in {self.root}") from error
        except OSError as error:
            if error.errno in {errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO}:
                raise CorruptObjectError(f"{key}: not a plain file in {self.root}; remove what lies there") from error
            what = os.strerror(error.errno or 0)
            raise UnavailableError(f"{key}: {what} in store {self.root}{advice(error)}") from error


def advice(error: OSError) -> str:
    """Return what a person can do about it, to be put behind what has happened; empty if that is not known."""
    return _ADVICE.get(error.errno or 0, "")


@contextlib.contextmanager
def _opened(name: str, directory: int) -> Iterator[int]:
    file = os.open(name, _READ, dir_fd=directory)
    try:
        yield file
    finally:
        os.close(file)


def _regular_size(file: int, key: Key) -> int:
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise CorruptObjectError(f"{key}: not a plain file; remove what lies there")
    return status.st_size


def _write_synced(name: str, body: bytes | memoryview, *, directory: int) -> None:
    file = os.open(name, _NEW, 0o666, dir_fd=directory)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: its left-overs stay
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        with memoryview(body) as whole, whole.cast("B") as view:
            written = 0
            while written < len(view):
                written += os.write(file, view[written : written + _DIRECT_BYTES])
        os.fsync(file)
    finally:
        os.close(file)


def _unlinked_if_dead(name: str, directory: int) -> bool:
    """Remove a temporary file, unless its writer lives."""
    try:
        with _opened(name, directory) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(name, dir_fd=directory)
    except OSError:
        return False  # it is locked, or gone, or can't be removed
    return True


def _wanted(file: int, key: Key, start: int, length: int | None) -> int:
    """Return how many bytes are to be read, after a check that they are there."""
    size = _regular_size(file, key)
    wanted = max(0, size - start) if length is None else length
    if length is None:
        check_whole(key, wanted)
    if start + wanted > size and wanted:
        raise _ends_at(key, size, start + wanted)
    return wanted


def _ends_at(key: Key, end: int, wanted: int) -> CorruptObjectError:
    return CorruptObjectError(f"{key}: ends at byte {end}, expected at least {wanted}")


def _read_buffered(file: int, start: int, length: int) -> bytes:
    body = os.pread(file, length, start)
    while len(body) < length and (more := os.pread(file, length - len(body), start + len(body))):
        body += more
    return body


def _set_direct(file: int) -> bool:
    """Turn the page cache off for this descriptor; where that is refused, drop the file's pages from it."""
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        return False
    return True


def _read_direct(file: int, start: int, length: int) -> bytes:
    """Read through a page-aligned buffer at aligned offsets, as O_DIRECT wants it."""
    body = bytearray()
    at = start - start % _ALIGNMENT_BYTES
    skip = start - at
    span = -(-(skip + length) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    with mmap.mmap(-1, max(_ALIGNMENT_BYTES, min(span, _DIRECT_BYTES))) as buffer:
        while len(body) < length and (count := os.preadv(file, [buffer], at)):
            body += buffer[skip : min(count, skip + length - len(body))]
            at += count
            skip = 0
            if count % _ALIGNMENT_BYTES:
                break  # the end of the file
    return bytes(body)


def _probe_link(root: int) -> None:
    first, second = (f".probe-{secrets.token_hex(8)}" for _ in range(2))
    try:
        _write_synced(first, b"probe", directory=root)
        os.link(first, second, src_dir_fd=root, dst_dir_fd=root, follow_symlinks=False)
        try:
            os.link(first, second, src_dir_fd=root, dst_dir_fd=root, follow_symlinks=False)
        except FileExistsError:
            pass
        else:
            raise OSError(errno.ENOTSUP, "link replaced a file")
        os.fsync(root)
    finally:
        for name in (first, second):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=root)
