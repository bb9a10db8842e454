"""The local tier: shards as files on this node's disk, each listed only with a receipt that matches it.

Data first: ``tmp.<nonce>``, synced, renamed, directory synced; then the receipt the same way. A crash leaves temporary
files, or data without a receipt, which is not listed: the next start removes both. All calls block.

Two other kinds of file lie in the directory and are none of the tier's: ``sidecar.lock`` (``directories``) and
``adopted-<attempt>.json`` (``adoptions``).
"""

from __future__ import annotations

import errno
import json
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from toprope.sidecar.ports import DiskPort, SyncError
from toprope.sidecar.values import Shard
from toprope.store.checkpoint.shard import LENGTH_BYTES, header_length, identity_of, parse_header
from toprope.store.digest import digest, digest_of_file
from toprope.store.errors import CorruptObjectError

_DATA = re.compile(r"a\d+-s\d+-rank-\d+-of-\d+-[0-9a-f]+\.safetensors")
_RECEIPT = re.compile(_DATA.pattern + r"\.receipt")
_MAX_RECEIPT_BYTES = 64 * 1024


class LocalError(Exception):
    """A shard was not stored.

    ``damaged``: its source is wrong; ``quarantine``: the disk lost writes twice; ``no_room``: it is full.
    """

    def __init__(self, reason: str, *, damaged: bool = False, quarantine: bool = False, no_room: bool = False) -> None:
        super().__init__(reason)
        self.damaged = damaged
        self.quarantine = quarantine
        self.no_room = no_room


class LocalTier:
    """The files of one job in the local directory."""

    def __init__(self, directory: Path, disk: DiskPort) -> None:
        self._directory = directory
        self._disk = disk

    def store(self, shard: Shard, image: memoryview, *, nonces: tuple[str, str]) -> Path:
        """Store a shard durably and return its path; after a failed sync it is written once more, as another file.

        Raises:
            LocalError: it is not stored.
        """
        try:
            return self._store(shard, image, nonces[0])
        except SyncError:
            return self._second_try(shard, image, nonces[1])
        except OSError as error:
            raise self._failed(error) from error

    def _second_try(self, shard: Shard, image: memoryview, nonce: str) -> Path:
        try:
            return self._store(shard, image, nonce)
        except SyncError as error:
            reason = f"{self._directory}: sync failed twice ({error.strerror}); it is left alone for a while"
            raise LocalError(reason, quarantine=True) from error
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> LocalError:
        return LocalError(f"{self._directory}: {error.strerror}", no_room=error.errno in {errno.ENOSPC, errno.EDQUOT})

    def _store(self, shard: Shard, image: memoryview, nonce: str) -> Path:
        name = f"a{shard.attempt}-s{shard.step}-rank-{shard.rank}-of-{shard.world}-{nonce}.safetensors"
        path = self._directory / name
        self._publish(path, image, nonce)
        found = digest(image)
        if found != shard.digest:
            self._disk.remove(path)
            reason = f"the slot's digest is {found} and was {shard.digest} when it was hashed"
            raise LocalError(reason, damaged=True)
        self._publish(path.with_name(f"{name}.receipt"), memoryview(_encode(shard)), nonce)
        return path

    def _publish(self, path: Path, body: memoryview, nonce: str) -> None:
        temporary = self._directory / f"tmp.{nonce}"
        try:
            self._disk.write(temporary, body)
            self._disk.rename(temporary, path)
        except OSError:
            self._disk.remove(temporary)
            raise
        self._disk.sync_directory(self._directory)

    def drop(self, path: Path) -> str:
        """Delete a copy, its receipt first, so that it is never listed without data; return what the disk kept."""
        return self._kept(path.with_name(f"{path.name}.receipt")) or self._kept(path)

    def free_bytes(self) -> int:
        """Return how many bytes the disk has free."""
        stat = os.statvfs(self._directory)
        return stat.f_bavail * stat.f_frsize

    def sweep(self) -> list[str]:
        """Remove what crashes have left; return a line for each that the disk kept.

        Not while anything is stored: it would be taken for a leftover.
        """
        try:
            names = {path.name for path in self._directory.iterdir()}
        except OSError as error:
            return [f"{self._directory} can't be read: {error.strerror}"]
        leftovers = (
            name
            for name in sorted(names)
            if name.startswith("tmp.") or (_DATA.fullmatch(name) and f"{name}.receipt" not in names)
        )
        return [line for name in leftovers if (line := self._kept(self._directory / name))]

    def _kept(self, path: Path) -> str:
        """Delete a file; return why it is still there, or nothing."""
        try:
            self._disk.remove(path)
        except OSError as error:
            return f"{path} can't be removed: {error.strerror}"
        return ""

    def scan(self) -> Iterator[tuple[Shard, Path, str] | str]:
        """Yield each copy whose receipt and digest match, with the uid of its job, and a line for each other."""
        try:
            names = sorted(self._directory.iterdir())
        except OSError as error:
            yield f"{self._directory} can't be read: {error.strerror}"
            return
        for receipt in names:
            if _RECEIPT.fullmatch(receipt.name) is None:
                continue
            path = receipt.with_name(receipt.name.removesuffix(".receipt"))
            try:
                shard = _decode(receipt)
                _check(path, shard)
                job_uid = _job_of(path)
            except (OSError, ValueError, CorruptObjectError) as error:
                yield f"{path} is not used: {error}"
            else:
                yield shard, path, job_uid


def _check(path: Path, shard: Shard) -> None:
    length = path.stat().st_size
    if length != shard.bytes:
        raise ValueError(f"it has {length} bytes; its receipt says {shard.bytes}")
    found = digest_of_file(path)
    if found != shard.digest:
        raise ValueError(f"its digest is {found}; its receipt says {shard.digest}")


def _job_of(path: Path) -> str:
    """Return the uid of the job that an image says it is of."""
    size, name = path.stat().st_size, path.name
    with path.open("rb") as file:
        head = file.read(LENGTH_BYTES)
        head += file.read(header_length(head, size=size, name=name) - LENGTH_BYTES)
    return identity_of(parse_header(head, size=size, name=name), name=name).job_uid


def _encode(shard: Shard) -> bytes:
    body = json.dumps({"format": 1, **asdict(shard)}, sort_keys=True)
    return f"{zlib.crc32(body.encode()):08x} {body}\n".encode()


def _decode(path: Path) -> Shard:
    with path.open("rb") as file:
        raw = file.read(_MAX_RECEIPT_BYTES)
    crc, _, body = raw.decode("ascii").strip().partition(" ")
    if f"{zlib.crc32(body.encode()):08x}" != crc:
        raise ValueError("its receipt is damaged")
    values = json.loads(body)
    if values.pop("format", None) != 1:
        raise ValueError("its receipt is of another format")
    return Shard(**values)
