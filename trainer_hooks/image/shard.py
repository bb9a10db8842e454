"""A shard image: one rank's tensors and document as a plain safetensors file, planned once and written in place.

``plan_image`` says where each tensor goes. The header is JSON padded with spaces to a length that stays the same for
the life of a plan; tensors follow by element size descending, with no gaps; last comes the document, a byte tensor
named ``__document__`` whose length may differ from snapshot to snapshot. ``Image`` reads one back.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import struct
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from toprope.trainer_hooks.errors import StateMismatchError, UnsupportedLeafError
from toprope.trainer_hooks.image import cuda
from toprope.trainer_hooks.image.copying import LARGE_BYTES, Copier, Move, lies_in_order

DOCUMENT = "__document__"
FORMAT = "1"
MAX_HEADER_BYTES = 16 * 1024 * 1024  # these four are what the services accept: see docs/format.md
MAX_TENSORS = 65_536
MAX_DIMENSIONS = 32
MAX_NAME_CHARACTERS = 1024
_LENGTH = struct.Struct("<Q")
_ALIGNED = 16  # torch crashes on a complex128 that lies elsewhere
_WIDEST = 10**18  # room for any step, attempt or offset when a header's length is chosen
_WHOLE: Mapping[str, Any] = MappingProxyType({})

_SAFETENSORS: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}
_AS_BYTES: dict[torch.dtype, str] = {
    dtype: str(dtype).removeprefix("torch.")
    for name in ("complex32", "complex128", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2")
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
_BY_NAME = {name: dtype for dtype, name in (_SAFETENSORS | _AS_BYTES).items()}


def check_tensor(name: str, tensor: torch.Tensor) -> None:
    """Check that a tensor can be kept exactly.

    Raises:
        UnsupportedLeafError: it can't; the message says why.
    """
    reason = _refusal(tensor)
    if reason:
        raise UnsupportedLeafError.at(name, reason)


def _refusal(tensor: torch.Tensor) -> str:
    if type(tensor) not in {torch.Tensor, torch.nn.Parameter}:
        return f"a tensor of class {type(tensor).__module__}.{type(tensor).__qualname__} is not supported yet"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}; only strided tensors can be kept"
    if tensor.is_quantized or (tensor.dtype not in _SAFETENSORS and tensor.dtype not in _AS_BYTES):
        return f"a tensor of dtype {tensor.dtype}, which can't be kept"
    if tensor.device.type not in {"cpu", "cuda"}:
        return f"a tensor on device {tensor.device}; only CPU and CUDA tensors can be kept"
    return ""


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a tensor lies: ``begin`` counts from the end of the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Where a tensor lies in the larger one of which it is a piece."""

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The layout of an image: one for all tensors of the same names, dtypes and shapes with the same pieces."""

    extents: tuple[Extent, ...]
    header_bytes: int
    tensor_bytes: int
    described: str = field(repr=False)
    """What the header says of all tensors, but for the document: it is the same in each image of this plan."""
    typed: str = field(repr=False)
    """What the header's metadata says of single tensors."""

    @property
    def start(self) -> int:
        """Where the tensors begin."""
        return _LENGTH.size + self.header_bytes

    def image_bytes(self, document_bytes: int) -> int:
        """Return the length of the whole image."""
        return self.start + self.tensor_bytes + document_bytes


def plan_image(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], pieces: Mapping[str, Piece] = _WHOLE
) -> Plan:
    """Return the layout for these tensors; ``metadata`` gives the keys of the header and the room their values need.

    ``pieces`` has those that are a piece of a larger tensor.

    Raises:
        UnsupportedLeafError: no reader would accept an image of these tensors.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    extents, offset = [], 0
    for name, tensor in ordered:
        size = tensor.numel() * tensor.dtype.itemsize
        extents.append(Extent(name, tensor.dtype, tuple(tensor.shape), offset, size))
        offset += size
    described, typed = _describe(extents, pieces)
    plan = Plan(tuple(extents), 0, offset, described, typed)
    widest = {key: value if not value.isdecimal() else str(_WIDEST) for key, value in metadata.items()}
    header = _header_json(plan, _WIDEST, widest)
    padded_bytes = -(-(len(header) + _LENGTH.size) // _ALIGNED) * _ALIGNED - _LENGTH.size
    _check_limits(extents, padded_bytes)
    return replace(plan, header_bytes=padded_bytes)


def _check_limits(extents: Sequence[Extent], size: int) -> None:
    if len(extents) >= MAX_TENSORS or size > MAX_HEADER_BYTES:  # the document is a tensor as well
        raise UnsupportedLeafError.at(
            "the state of this rank",
            f"{len(extents)} tensors with a header of {size} bytes; less than {MAX_TENSORS} with {MAX_HEADER_BYTES} "
            "can be kept",
        )
    for extent in extents:
        dimensions = len(extent.shape) + (extent.dtype in _AS_BYTES)
        if dimensions > MAX_DIMENSIONS or len(extent.name) > MAX_NAME_CHARACTERS:
            raise UnsupportedLeafError.at(
                extent.name[:80],
                f"a tensor of {dimensions} dimensions with a name of {len(extent.name)} characters; at most "
                f"{MAX_DIMENSIONS} and {MAX_NAME_CHARACTERS} can be kept",
            )


def header_bytes(plan: Plan, document_bytes: int, metadata: Mapping[str, str]) -> bytes:
    """Return the first bytes of an image: length and header, padded."""
    text = _header_json(plan, document_bytes, metadata)
    assert len(text) <= plan.header_bytes, "the header outgrew its plan"
    return _LENGTH.pack(plan.header_bytes) + text.ljust(plan.header_bytes)


def _header_json(plan: Plan, document_bytes: int, metadata: Mapping[str, str]) -> bytes:
    said = _json({"format": FORMAT, "document": DOCUMENT, **metadata})
    offsets = [plan.tensor_bytes, plan.tensor_bytes + document_bytes]
    document = _json({DOCUMENT: {"dtype": "U8", "shape": [document_bytes], "data_offsets": offsets}})
    return f'{{"__metadata__":{_joined(said, plan.typed)},{_joined(plan.described, document)[1:]}'.encode()


def _describe(extents: Sequence[Extent], pieces: Mapping[str, Piece]) -> tuple[str, str]:
    """Return what the header says of the tensors, and what its metadata says of single ones."""
    described: dict[str, Any] = {}
    typed: dict[str, str] = {}
    for extent in extents:
        stored = _SAFETENSORS.get(extent.dtype)
        item = [] if stored else [extent.dtype.itemsize]
        offsets = [extent.begin, extent.begin + extent.bytes]
        described[extent.name] = {"dtype": stored or "U8", "shape": [*extent.shape, *item], "data_offsets": offsets}
        if not stored:
            typed[f"dtype:{extent.name}"] = _AS_BYTES[extent.dtype]
        piece = pieces.get(extent.name)
        if piece is not None:
            lies = {"global_shape": [*piece.global_shape, *item], "offsets": [*piece.offsets, *(0 for _ in item)]}
            typed[f"piece:{extent.name}"] = _json(lies)
    return _json(described), _json(typed)


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _joined(first: str, second: str) -> str:
    """Return the JSON object that has the members of both."""
    between = "," if len(first) > len("{}") and len(second) > len("{}") else ""
    return f"{first[:-1]}{between}{second[1:]}"


def is_plain(tensor: torch.Tensor) -> bool:
    """Say whether the logical values of a tensor are the bytes that lie at its address, one after the other."""
    return tensor.is_cpu and lies_in_order(tensor)


class MappedFile:
    """A file mapped for writing whose pages were faulted in, so that a copy into it meets no page fault."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self.bytes = os.fstat(descriptor).st_size
            self.inode = os.fstat(descriptor).st_ino
            self._map = mmap.mmap(descriptor, self.bytes)
        finally:
            os.close(descriptor)
        self._view = memoryview(self._map)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        _populate(self._address, self.bytes)
        weakref.finalize(self, cuda.Pin(self._address, self.bytes).release)

    def put(self, offset: int, body: bytes) -> None:
        """Write these bytes at an offset."""
        self._view[offset : offset + len(body)] = body

    def put_tensor(self, offset: int, tensor: torch.Tensor) -> None:
        """Write the logical values of a tensor, row by row, at an offset."""
        count = tensor.nbytes
        assert offset + count <= self.bytes
        if count == 0:
            return
        if is_plain(tensor):
            ctypes.memmove(self._address + offset, tensor.data_ptr(), count)
            return
        if tensor.device.type == "cpu":
            # Gathering first costs a second copy, but is exact for every dtype and stride, lazy views included.
            with torch.no_grad():
                plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
            ctypes.memmove(self._address + offset, plain.data_ptr(), count)
            return
        with torch.no_grad():
            self.typed_view(offset, tensor).copy_(tensor.detach(), non_blocking=True)

    def move(self, offset: int, tensor: torch.Tensor, count: int) -> Move:
        """Return the copy of memory that writes a plain tensor of ``count`` bytes at an offset."""
        assert offset + count <= self.bytes
        return Move(self._address + offset, tensor, count)

    def typed_view(self, offset: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return the place of a tensor as one of its dtype and shape."""
        count = tensor.numel() * tensor.dtype.itemsize
        assert 0 < count <= self.bytes - offset
        raw = torch.frombuffer(self._view, dtype=torch.uint8, offset=offset, count=count)
        return raw.view(tensor.dtype).reshape(tensor.shape)


_MADV_POPULATE_WRITE = 23


def _populate(address: int, length: int) -> None:
    """Fault the mapping in; a kernel that can't (before 5.14) leaves that to the first copy."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), ctypes.c_int(_MADV_POPULATE_WRITE))


_NONE: Collection[str] = frozenset()


def write_image(  # noqa: PLR0913 - what an image consists of, and how it is written
    target: MappedFile,
    plan: Plan,
    tensors: Mapping[str, torch.Tensor],
    document: bytes,
    metadata: Mapping[str, str],
    *,
    later: Collection[str] = _NONE,
    copier: Copier | None = None,
) -> int:
    """Write an image into a mapped file and return its length. When it returns, the bytes are there.

    Those of the tensors named in ``later`` are not. ``copier`` copies with a second thread.
    """
    target.put(0, header_bytes(plan, len(document), metadata))
    moves: list[Move] = []
    with cuda.copying(tensors.values()):
        for extent in plan.extents:
            if extent.name in later:
                continue
            offset, tensor = plan.start + extent.begin, tensors[extent.name]
            if copier is not None and extent.bytes >= LARGE_BYTES and is_plain(tensor):
                moves.append(target.move(offset, tensor, extent.bytes))
            else:
                target.put_tensor(offset, tensor)
    if copier is not None:
        copier.run(moves)
    target.put(plan.start + plan.tensor_bytes, document)
    return plan.image_bytes(len(document))


class Image:
    """An image mapped for reading. Tensors that it gives alias the mapping, and are gone with it."""

    def __init__(self, path: Path, length: int) -> None:
        """Map the file.

        Raises:
            StateMismatchError: it is not a shard image of this format.
            OSError: it can't be read.
        """
        self.path = path
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size < length or length < _LENGTH.size:
                raise StateMismatchError(f"{path}: {os.fstat(descriptor).st_size} bytes; expected at least {length}")
            # Private and writable: torch warns about memory that it may not write.
            self._map = mmap.mmap(descriptor, length, access=mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)
        try:
            self._read_header(length)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StateMismatchError(f"{path}: not a shard image: {error!r}") from error

    def _read_header(self, length: int) -> None:
        (header_length,) = _LENGTH.unpack_from(self._map)
        if header_length > min(MAX_HEADER_BYTES, length - _LENGTH.size):
            raise ValueError(f"header of {header_length} bytes")
        header = json.loads(self._map[_LENGTH.size : _LENGTH.size + header_length])
        self.metadata: dict[str, str] = header.pop("__metadata__")
        if self.metadata["format"] != FORMAT:
            raise ValueError(f"format {self.metadata['format']}; this version reads format {FORMAT}")
        self._start = _LENGTH.size + header_length
        self.extents = {name: self._extent(name, entry, length) for name, entry in header.items()}

    def _extent(self, name: str, entry: dict[str, Any], length: int) -> Extent:
        true_type = self.metadata.get(f"dtype:{name}")
        dtype = _BY_NAME[true_type or entry["dtype"]]
        shape = tuple(entry["shape"][:-1] if true_type else entry["shape"])
        begin, end = entry["data_offsets"]
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        if not 0 <= begin <= end <= length - self._start or end - begin != size:
            raise ValueError(f"{name} lies at {begin} to {end}, and its shape and dtype take {size} bytes")
        return Extent(name, dtype, shape, begin, size)

    def document(self) -> Any:  # noqa: ANN401 - JSON, which the decoder checks
        """Return the document.

        Raises:
            StateMismatchError: there is none, or it is not JSON.
        """
        extent = self.extents.get(DOCUMENT)
        if extent is None:
            raise StateMismatchError(f"{self.path}: no {DOCUMENT}")
        begin = self._start + extent.begin
        try:
            return json.loads(self._map[begin : begin + extent.bytes])
        except ValueError as error:
            raise StateMismatchError(f"{self.path}: {DOCUMENT} is not JSON: {error}") from error

    def piece(self, name: str) -> Piece:
        """Return where the tensor of this name lies in the larger one of which it is a piece, if only in itself.

        Raises:
            StateMismatchError: the header does not say it in a way that can be read.
        """
        shape, text = self.extents[name].shape, self.metadata.get(f"piece:{name}")
        if text is None:
            return Piece(shape, (0,) * len(shape))
        try:
            lies = json.loads(text)
            whole, offsets = (tuple(map(int, lies[key][: len(shape)])) for key in ("global_shape", "offsets"))
        except (ValueError, KeyError, TypeError) as error:
            raise StateMismatchError(f"{self.path}: piece:{name} can't be read: {error!r}") from error
        if not len(whole) == len(offsets) == len(shape) or not all(
            0 <= at <= at + size <= extent for at, size, extent in zip(offsets, shape, whole, strict=True)
        ):
            raise StateMismatchError(f"{self.path}: piece:{name} does not lie inside its tensor")
        return Piece(whole, offsets)

    def digest(self, name: str) -> str:  # noqa: ARG002 - of a file alone none is known
        """Return the digest of the tensor of this name, verified; empty if it is not known without reading it."""
        return ""

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor of this name, which must be in ``extents``."""
        extent = self.extents[name]
        if extent.bytes == 0:
            return torch.empty(extent.shape, dtype=extent.dtype)
        raw = torch.frombuffer(
            memoryview(self._map), dtype=torch.uint8, offset=self._start + extent.begin, count=extent.bytes
        )
        if raw.data_ptr() % extent.dtype.itemsize:
            raw = raw.clone()  # an image that others wrote
        return raw.view(extent.dtype).reshape(extent.shape)
