"""Tensors on their way into a store, and where they come from: safetensors here, torch's formats in their room."""

from __future__ import annotations

import functools
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

import msgspec

from toprope.store.checkpoint.shard import LENGTH_BYTES, header_length, parse_header
from toprope.store.digest import CHUNK_BYTES
from toprope.store.errors import CkptError, CorruptObjectError, UsageError
from toprope.store.transfer import with_torch
from toprope.store.transfer.dcp_metadata import MAX_BYTES, read_metadata

_INDEX_MAX_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """A tensor as it is to be stored; ``true_dtype`` is torch's name of its dtype if safetensors has none for it.

    ``fill`` writes its bytes, in row-major order, over all of the memory that it is given.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    true_dtype: str | None = None
    fill: Callable[[memoryview], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What is to be imported. ``values`` are plain, by name; ``left_out`` names those that are not."""

    kind: str
    tensors: tuple[Incoming, ...]
    values: Mapping[str, Any]
    left_out: tuple[str, ...] = ()


def open_source(path: Path) -> Source:
    """Return what is at ``path``: a DCP directory, safetensors (a file or a directory of them), a torch.save file.

    Raises:
        UsageError: it is none of these, or needs torch, which is not there.
        CorruptObjectError: it is damaged, or holds what is not taken; the message names it.
        CkptError: it can't be read.
    """
    try:
        if path.is_dir():
            source = _dcp(path) if (path / ".metadata").exists() else _safetensors_directory(path)
        elif path.suffix == ".safetensors":
            source = _from_files([path])
        elif zipfile.is_zipfile(path):
            source = with_torch.reading().torch_source(path)
        elif path.exists():
            raise UsageError(f"{path}: not a file of safetensors or of torch.save (as a zip file, since torch 1.6)")
        else:
            raise UsageError(f"{path}: no such file or directory")
    except OSError as error:
        raise CkptError(f"{path}: can't be read: {error.strerror}") from error
    names = [tensor.name for tensor in source.tensors]
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    if twice is not None:
        raise UsageError(
            f"{path}: two tensors are named {twice!r}. What `ckpt restore` wrote is brought into a store by `ckpt copy`"
        )
    return source


def _dcp(path: Path) -> Source:
    file = path / ".metadata"
    if file.stat().st_size > MAX_BYTES:
        raise CorruptObjectError(f"{file}: {file.stat().st_size} bytes; at most {MAX_BYTES}")
    tensors, values = read_metadata(file.read_bytes(), name=str(file))
    source: Source = with_torch.reading().dcp_source(path, tensors, values)
    return source


def _safetensors_directory(path: Path) -> Source:
    indexes = sorted(path.glob("*.safetensors.index.json"))
    if not indexes:
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise UsageError(f"{path}: neither a .metadata of DCP nor a .safetensors file is there")
        return _from_files(files)
    if indexes[0].stat().st_size > _INDEX_MAX_BYTES:
        raise CorruptObjectError(f"{indexes[0]}: too long for an index; at most {_INDEX_MAX_BYTES} bytes")
    try:
        places = msgspec.convert(msgspec.json.decode(indexes[0].read_bytes())["weight_map"], dict[str, str])
    except (msgspec.DecodeError, msgspec.ValidationError, KeyError, TypeError) as error:
        raise CorruptObjectError(f"{indexes[0]}: not an index of safetensors files: {error}") from error
    strange = next((name for name in places.values() if PurePath(name).name != name), None)
    if strange is not None:
        raise CorruptObjectError(
            f"{indexes[0]}: it names the file {strange[:200]!r}, which is not one of its directory"
        )
    source = _from_files([path / name for name in sorted(set(places.values()))])
    if lacking := sorted(set(places) ^ {tensor.name for tensor in source.tensors}):
        raise CorruptObjectError(f"{indexes[0]}: index and files disagree about tensor {lacking[0][:200]!r}")
    return source


def _from_files(files: Iterable[Path]) -> Source:
    return Source(kind="safetensors", tensors=tuple(one for file in files for one in _of_file(file)), values={})


def _of_file(path: Path) -> Iterable[Incoming]:
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(LENGTH_BYTES)
        length = header_length(first, size=size, name=str(path))
        header = parse_header(first + file.read(length - LENGTH_BYTES), size=size, name=str(path))
    for extent in header.extents:
        fill = functools.partial(_read_into, path, extent.begin)
        true_dtype = header.metadata.get(f"dtype:{extent.name}")
        tensor = Incoming(name=extent.name, dtype=extent.dtype, shape=extent.shape, fill=fill)
        yield replace(tensor, true_dtype=true_dtype) if extent.dtype == "U8" else tensor


def _read_into(path: Path, begin: int, view: memoryview) -> None:
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        at = 0
        while at < len(view):
            count = file.readinto(view[at : at + CHUNK_BYTES])
            if not count:
                raise CorruptObjectError(f"{path}: ends at byte {begin + at}")
            at += count
