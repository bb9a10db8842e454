"""Export: a checkpoint's whole tensors in a format that others read: safetensors, a PyTorch DCP directory, torch.save.

``plan`` decides what is written where, or refuses by name; ``export`` writes it. What was written loads without
Toprope.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import msgspec

from toprope.store.checkpoint.assemble import read_indexes, shard_metadata, tensor_bytes
from toprope.store.checkpoint.header import Written, header_bytes
from toprope.store.checkpoint.leaves import Leaves, leaves_of
from toprope.store.checkpoint.manifest import Index, Manifest, sha256
from toprope.store.checkpoint.shard import ITEM_BYTES
from toprope.store.checkpoint.whole import DOCUMENT, Whole, gather, is_named_like, nothing_like, some, untiled
from toprope.store.errors import CorruptObjectError, StoreError, UsageError
from toprope.store.log.fold import JobState
from toprope.store.names import facts_key
from toprope.store.objects.protocol import ObjectStore
from toprope.store.transfer import with_torch
from toprope.store.transfer.new_directory import WrittenOut, check_target, new_directory, put_in_place, synced_file
from toprope.store.transfer.outgoing import Outgoing
from toprope.store.transfer.restore import plan as plan_restore

INDEX_NAME = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 1000**3
TORCH_NAME = "model.pt"
Format: TypeAlias = Literal["safetensors", "dcp", "torch"]
_OURS = re.compile(
    r"model(-[0-9]{5,}-of-[0-9]{5,})?\.safetensors|model\.safetensors\.index\.json|model\.pt|"
    r"__[0-9]+_0\.distcp|\.metadata"
)
_OF_PARAMETER = re.compile(r"model\.(.+)|optimizer(?:\.[A-Za-z0-9_-]+)?\.state\.(.+)\.[^.]+")


class _SpecModel(msgspec.Struct, frozen=True):
    params: dict[str, tuple[str, tuple[int, ...]]] = {}


class _Spec(msgspec.Struct, frozen=True):
    model: _SpecModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to be exported and how."""

    format: Format = "safetensors"
    only: tuple[str, ...] = ()
    prefix_strip: str = ""
    per_rank: bool = False
    as_bytes: bool = False
    max_shard_bytes: int = MAX_SHARD_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A tensor of an exported file: its name and shape there, its true dtype if safetensors has none for it."""

    name: str
    shape: tuple[int, ...]
    whole: Whole
    true_dtype: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported(WrittenOut):
    """What an export wrote. ``values`` is how many settings of optimizers and the like, ``left_out`` has the others.

    ``documents`` is how many documents of ranks were left out.
    """

    tensors: int
    documents: int
    values: int = 0
    left_out: tuple[str, ...] = ()


def export(
    store: ObjectStore, state: JobState, *, to: Path, wanted: Wanted, step: int | None = None, force: bool = False
) -> Exported:
    """Write the newest READY, or that of a step, into the directory ``to``, which appears whole or not at all.

    Raises:
        UsageError: ``to`` is taken, or something can't be exported as it was asked for; the message names it.
        NothingToVerifyError: there is no such READY.
        StoreError: it is damaged; the message names what.
        CkptError: ``to`` can't be written.
    """
    seq = plan_restore(state, step=step)[0]
    check_target(to, force=force, is_ours=lambda name: _OURS.fullmatch(name) is not None)
    manifest, indexes = read_indexes(store, state, seq)
    wholes = gather(indexes)
    chosen = choose(wholes, wanted)
    dtypes = _true_dtypes(store, chosen, state.job)
    shapes = _shapes(store, manifest) if _has_flat_pieces(chosen, indexes) else {}
    leaves = _leaves(store, wholes, wanted, job=state.job)
    lines = plan(chosen, wanted, dtypes=dtypes, shapes=shapes, renamed=leaves.renamed)
    total = sum(line.whole.bytes for line in lines)
    with new_directory(to, needed_bytes=total * (2 if wanted.format == "torch" else 1)) as directory:
        if wanted.format == "safetensors":
            files = _write_safetensors(store, directory, lines, manifest, limit=wanted.max_shard_bytes)
        else:
            files = _write_with_torch(store, directory, lines, leaves.values, wanted.format, job=state.job)
        put_in_place(directory, to)
    return Exported(
        job=state.job,
        seq=seq,
        attempt=manifest.attempt,
        step=manifest.step,
        directory=to,
        files=files,
        tensors=len(lines),
        bytes=total,
        documents=0 if wanted.per_rank else manifest.world,
        values=len(leaves.values),
        left_out=leaves.left_out,
    )


def choose(wholes: Sequence[Whole], wanted: Wanted) -> tuple[Whole, ...]:
    """Return the tensors whose names are asked for; the documents of ranks only with all else that is a rank's own.

    Raises:
        UsageError: there is none, or one is of single ranks, which was not asked for.
        StoreError: the pieces of one don't make up all of it exactly once.
    """
    kept = [one for one in wholes if one.name != DOCUMENT or wanted.per_rank]
    kept = [one for one in kept if is_named_like(one.name, wanted.only)]
    if not kept:
        raise nothing_like(wanted.only, (whole.name for whole in wholes))
    own = sorted({whole.name for whole in kept if whole.rank is not None})
    if own and not wanted.per_rank:
        raise UsageError(
            f"{some(own)}: not the same on all ranks that stored it under this name. Leave it out with --only, or "
            "keep each rank's with --per-rank"
        )
    for whole in kept:
        if why := untiled(whole):
            raise StoreError(f"{whole.label}: can't be put together: {why}")
    return tuple(kept)


def plan(
    chosen: Sequence[Whole],
    wanted: Wanted,
    *,
    dtypes: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Line, ...]:
    """Return what is written, by name. ``dtypes`` has those that safetensors lacks, by label.

    ``shapes`` are those of parameters; ``renamed`` has names that others give to tensors.

    Raises:
        UsageError: a dtype is one that safetensors lacks, or two tensors get the same name.
    """
    if dtypes and not wanted.as_bytes and wanted.format == "safetensors":
        named = [f"{label} ({dtype})" for label, dtype in sorted(dtypes.items())]
        raise UsageError(
            f"{some(named)}: safetensors has no such dtype. Leave it out with --only, or write its bytes as U8 with "
            "--as-bytes"
        )
    lines: dict[str, Line] = {}
    for whole in chosen:
        stripped = renamed.get(whole.name, whole.name).removeprefix(wanted.prefix_strip)
        name = replace(whole, name=stripped).label
        if not stripped or name in lines:
            other = f", as {lines[name].whole.label} would be" if name in lines else ""
            raise UsageError(f"{whole.label}: would be named {name!r}{other}. Give another --prefix-strip, or --only")
        lines[name] = Line(name=name, shape=_shape_of(whole, shapes), whole=whole, true_dtype=dtypes.get(whole.label))
    return tuple(lines[name] for name in sorted(lines))


def split(lines: Sequence[Line], *, limit: int) -> dict[str, tuple[Line, ...]]:
    """Return the files, each with its tensors: as many in each, in order, as ``limit`` bytes hold, or one."""
    groups: list[list[Line]] = []
    size = 0
    for line in lines:
        size += line.whole.bytes
        if not groups or size > limit:
            groups.append([])
            size = line.whole.bytes
        groups[-1].append(line)
    if len(groups) == 1:
        return {"model.safetensors": tuple(groups[0])}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": tuple(group)
        for number, group in enumerate(groups, start=1)
    }


def _true_dtypes(store: ObjectStore, chosen: Sequence[Whole], job: str) -> dict[str, str]:
    """Return the dtypes that safetensors lacks, by label. They are stored as bytes; headers name them."""
    suspects = [whole for whole in chosen if whole.dtype == "U8" and whole.name != DOCUMENT]
    indexes = {whole.parts[0].rank: whole.parts[0].index for whole in suspects}
    metadata = {rank: shard_metadata(store, index, job=job) for rank, index in sorted(indexes.items())}
    found = {whole.label: metadata[whole.parts[0].rank].get(f"dtype:{whole.name}") for whole in suspects}
    return {label: dtype for label, dtype in found.items() if dtype is not None}


def _has_flat_pieces(chosen: Sequence[Whole], indexes: Sequence[Index]) -> bool:
    names = {whole.name for whole in chosen if len(whole.shape) == 1}
    tensors = (tensor for index in indexes for tensor in index.tensors)
    return any(tensor.name in names and tensor.shape != tensor.global_shape for tensor in tensors)


def _shapes(store: ObjectStore, manifest: Manifest) -> dict[str, tuple[int, ...]]:
    """Return the shapes of parameters as the spec has them: FSDP1 stores them, and their moments, flattened.

    Raises:
        CorruptObjectError: the spec is not the one that the manifest names.
    """
    key = facts_key(manifest.job, manifest.spec_sha256)
    body = store.read(key)
    if sha256(body) != manifest.spec_sha256:
        raise CorruptObjectError(f"job {manifest.job}: the spec is not the one that the manifest names ({key})")
    try:
        spec = msgspec.json.decode(body, type=_Spec)
    except msgspec.DecodeError as error:
        raise CorruptObjectError(
            f"job {manifest.job}: the spec has no shapes of parameters: {error} ({key})"
        ) from error
    return {name: shape for name, (_, shape) in spec.model.params.items()}


def _shape_of(whole: Whole, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of a tensor, also of one that was flattened."""
    match = _OF_PARAMETER.fullmatch(whole.name)
    true = shapes.get(match[1] or match[2], whole.shape) if match else whole.shape
    return true if len(whole.shape) == 1 and math.prod(true) == whole.shape[0] else whole.shape


def _leaves(store: ObjectStore, wholes: Sequence[Whole], wanted: Wanted, *, job: str) -> Leaves:
    """Return what is not a tensor and is asked for, under the names that it is to have. Safetensors have no place."""
    if wanted.format == "safetensors":
        return Leaves(values={}, renamed={}, left_out=())
    bodies = (b"".join(tensor_bytes(store, whole, job=job)) for whole in wholes if whole.name == DOCUMENT)
    try:
        found = leaves_of([msgspec.json.decode(body, type=dict[str, Any]) for body in bodies])
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
        raise CorruptObjectError(f"job {job}: the document of a rank is not one: {error!r:.200}") from error
    values = {name: value for name, value in found.values.items() if is_named_like(name, wanted.only)}
    left_out = tuple(name for name in found.left_out if is_named_like(name, wanted.only))
    stripped = {name.removeprefix(wanted.prefix_strip): value for name, value in values.items()}
    return Leaves(values=stripped, renamed=found.renamed, left_out=left_out)


def _write_with_torch(
    store: ObjectStore,
    directory: Path,
    lines: Sequence[Line],
    values: Mapping[str, object],
    to_format: Format,
    *,
    job: str,
) -> tuple[str, ...]:
    tensors = [_outgoing(store, line, job=job) for line in lines]
    if to_format == "dcp":
        with_torch.dcp_write().write(directory, tensors, values)
    else:
        with (directory / ".scratch").open("w+b") as scratch, synced_file(directory / TORCH_NAME) as file:
            with_torch.torch_file().write(file, scratch, tensors, values)
        (directory / ".scratch").unlink()
    return tuple(sorted(path.name for path in directory.iterdir()))


def _outgoing(store: ObjectStore, line: Line, *, job: str) -> Outgoing:
    return Outgoing(
        name=line.name,
        dtype=line.whole.dtype,
        true_dtype=line.true_dtype,
        shape=line.shape if line.true_dtype is None else line.shape[:-1],
        read=functools.partial(tensor_bytes, store, line.whole, job=job),
    )


def _write_safetensors(
    store: ObjectStore, directory: Path, lines: Sequence[Line], manifest: Manifest, *, limit: int
) -> tuple[str, ...]:
    files = split(lines, limit=limit)
    for name, within in files.items():
        _write_file(store, directory / name, within, manifest)
    if len(files) == 1:
        return tuple(files)
    with synced_file(directory / INDEX_NAME) as file:
        file.write(_index_json(files, sum(line.whole.bytes for line in lines)))
    return (*files, INDEX_NAME)


def _write_file(store: ObjectStore, path: Path, lines: Sequence[Line], manifest: Manifest) -> None:
    ordered = sorted(lines, key=lambda line: (-ITEM_BYTES[line.whole.dtype], line.name))
    with synced_file(path) as file:
        file.write(_header(ordered, manifest))
        for line in ordered:
            for chunk in tensor_bytes(store, line.whole, job=manifest.job):
                file.write(chunk)


def _header(lines: Sequence[Line], manifest: Manifest) -> bytes:
    metadata = {
        "format": "pt",  # what transformers asks for
        "toprope.job": manifest.job,
        "toprope.job_uid": manifest.job_uid,
        "toprope.attempt": str(manifest.attempt),
        "toprope.step": str(manifest.step),
    } | {f"dtype:{line.name}": line.true_dtype for line in lines if line.true_dtype is not None}
    return header_bytes(
        (Written(line.name, line.whole.dtype, line.shape, line.whole.bytes) for line in lines), metadata
    )


def _index_json(files: Mapping[str, Sequence[Line]], total: int) -> bytes:
    places = {line.name: name for name, lines in files.items() for line in lines}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    return json.dumps(index, indent=2).encode() + b"\n"
