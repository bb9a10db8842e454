"""Manifest and index: what a checkpoint consists of. Pure; encoded as JSON with sorted keys.

A manifest names one index for each rank by its SHA-256; an index names the rank's files and, in them, each tensor with
its digest. ``digest`` is always XXH3-128, 32 hex digits, as ``xxhsum -H128`` prints it.
"""

from __future__ import annotations

import hashlib
from typing import TypeVar

import msgspec

from toprope.store.errors import CorruptObjectError

FORMAT = 1
MAX_MANIFEST_BYTES = 64 * 1024 * 1024
MAX_INDEX_BYTES = 64 * 1024 * 1024


class Tensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor of a rank: bytes ``begin`` to ``end`` of file number ``file`` (from the start of the file).

    ``shape`` is that of the piece stored here; it lies at ``offsets`` of a tensor of ``global_shape``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    file: int
    begin: int
    end: int
    digest: str


class File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An object that holds tensors: its whole length in bytes and its digest."""

    key: str
    bytes: int
    digest: str


class Index(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The snapshot of one rank at one step."""

    format: int = FORMAT
    job_uid: str
    attempt: int
    attempt_uid: str
    step: int
    rank: int
    world: int
    files: tuple[File, ...]
    tensors: tuple[Tensor, ...]


class Shard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank's line in the manifest. ``digest`` and ``bytes`` are those of its newest file, files[0] of its index."""

    rank: int
    index_key: str
    index_sha256: str
    bytes: int
    digest: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A checkpoint: the shards of all ranks at one step of one attempt."""

    format: int = FORMAT
    job: str
    job_uid: str
    attempt: int
    attempt_uid: str
    step: int
    world: int
    spec_sha256: str
    shards: tuple[Shard, ...]


_T = TypeVar("_T", Index, Manifest)


def encode(value: msgspec.Struct) -> bytes:
    """Return the one encoding of a value: JSON, keys sorted, no white space."""
    return msgspec.json.encode(value, order="deterministic")


def sha256(body: bytes) -> str:
    """Return the SHA-256 of these bytes, 64 hex digits."""
    return hashlib.sha256(body).hexdigest()


def decode(body: bytes, kind: type[_T], *, key: str, expected_sha256: str) -> _T:
    """Return the manifest or index in these bytes.

    Raises:
        CorruptObjectError: its SHA-256 is not the one that names it, or it is not a value of that kind and format.
    """
    found = sha256(body)
    if found != expected_sha256:
        raise CorruptObjectError(f"{key}: SHA-256 is {found}, expected {expected_sha256}")
    try:
        value = msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise CorruptObjectError(f"{key}: not a {kind.__name__.lower()} of format {FORMAT}: {error}") from error
    if value.format != FORMAT:
        raise CorruptObjectError(f"{key}: format {value.format}; this version reads format {FORMAT}")
    return value
