"""Manifest and index: what a checkpoint consists of. Pure; encoded as JSON with sorted keys.

A manifest names one index for each rank by its SHA-256; an index names the rank's files and, in them, each tensor with
its digest. ``digest`` is always XXH3-128, 32 hex digits, as ``xxhsum -H128`` prints it. What was written in an earlier
format is read as a value of this one.
"""

from __future__ import annotations

import hashlib
from typing import Literal, TypeVar

import msgspec

from toprope.store.errors import CorruptObjectError

FORMAT = 2
MAX_MANIFEST_BYTES = 32 * 1024 * 1024
MANIFEST_BYTES_A_RANK = 1024
MAX_INDEX_BYTES = 32 * 1024 * 1024
MAX_INDEX_MARKS = 3 * 1024 * 1024
"""How many braces, brackets, commas and colons an index may have, before it is parsed: a value of JSON takes much more
memory than text. A tensor has some thirty, and a shard 65,536 tensors at most."""
MAX_FILES = 64


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


class Head(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the image has before its tensors: length and header, at ``begin`` to ``end`` of file number ``file``.

    ``digest`` is empty if only that of the whole image vouches for it: in format 1.
    """

    file: int
    begin: int
    end: int
    digest: str


class Packed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the object of a packed file lies in the store: its own length in bytes and its digest."""

    codec: Literal["zstd"]
    bytes: int
    digest: str


class File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file that holds tensors: its whole length in bytes and its digest, unpacked."""

    key: str
    bytes: int
    digest: str
    packed: Packed | None = None

    @property
    def stored_bytes(self) -> int:
        """The length of the object."""
        return self.bytes if self.packed is None else self.packed.bytes

    @property
    def stored_digest(self) -> str:
        """The digest of the object."""
        return self.digest if self.packed is None else self.packed.digest


class Index(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The snapshot of one rank at one step: its image is ``head`` and then ``tensors``, one after the other.

    ``bytes`` and ``digest`` are those of the image. ``files[0]`` is new with this checkpoint; the others are named by
    the READY ``base`` too.
    """

    format: int = FORMAT
    job_uid: str
    attempt: int
    attempt_uid: str
    step: int
    rank: int
    world: int
    bytes: int
    digest: str
    base: int | None = None
    head: Head
    files: tuple[File, ...]
    tensors: tuple[Tensor, ...]


class _FileOf1(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: str
    bytes: int
    digest: str


class _IndexOf1(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An index of format 1: one file, which is the image."""

    format: int
    job_uid: str
    attempt: int
    attempt_uid: str
    step: int
    rank: int
    world: int
    files: tuple[_FileOf1]
    tensors: tuple[Tensor, ...]

    def as_now(self) -> Index:
        """Return the index of today's format that says the same."""
        (image,) = self.files
        tensors = tuple(sorted(self.tensors, key=lambda tensor: (tensor.begin, tensor.end)))
        return Index(
            format=self.format,
            job_uid=self.job_uid,
            attempt=self.attempt,
            attempt_uid=self.attempt_uid,
            step=self.step,
            rank=self.rank,
            world=self.world,
            bytes=image.bytes,
            digest=image.digest,
            head=Head(file=0, begin=0, end=tensors[0].begin if tensors else image.bytes, digest=""),
            files=(File(key=image.key, bytes=image.bytes, digest=image.digest),),
            tensors=tensors,
        )


class Shard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank's line in the manifest. ``digest`` and ``bytes`` are those of its whole image, wherever its parts lie."""

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


class _Peek(msgspec.Struct, frozen=True):
    format: int


_T = TypeVar("_T", Index, Manifest)


def encode(value: msgspec.Struct) -> bytes:
    """Return the one encoding of a value: JSON, keys sorted, no white space."""
    return msgspec.json.encode(value, order="deterministic")


def sha256(body: bytes) -> str:
    """Return the SHA-256 of these bytes, 64 hex digits."""
    return hashlib.sha256(body).hexdigest()


def decode(body: bytes, kind: type[_T], *, key: str, expected_sha256: str) -> _T:
    """Return the manifest or index in these bytes, of this format or an earlier one.

    Raises:
        CorruptObjectError: its SHA-256 is not the one that names it, or it is not a value of that kind and format.
    """
    found = sha256(body)
    if found != expected_sha256:
        raise CorruptObjectError(f"{key}: SHA-256 is {found}, expected {expected_sha256}")
    if kind is Index and (marks := sum(map(body.count, (b"{", b"[", b",", b":")))) > MAX_INDEX_MARKS:
        raise CorruptObjectError(f"{key}: {marks} values and more; at most {MAX_INDEX_MARKS}")
    try:
        written = msgspec.json.decode(body, type=_Peek).format
        if not 1 <= written <= FORMAT:
            raise CorruptObjectError(f"{key}: format {written}; this version reads formats 1 to {FORMAT}")
        if kind is Index and written == 1:
            return msgspec.json.decode(body, type=_IndexOf1).as_now()
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise CorruptObjectError(f"{key}: not a {kind.__name__.lower()} of formats 1 to {FORMAT}: {error}") from error
