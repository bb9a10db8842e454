"""A part of a checkpoint on disk: for each rank a safetensors file of those of its tensors that were asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from toprope.store.checkpoint.assemble import read_indexes, shard_metadata, tensor_bytes
from toprope.store.checkpoint.header import Written, header_bytes
from toprope.store.checkpoint.manifest import Index, Tensor
from toprope.store.checkpoint.whole import DOCUMENT, is_named_like, nothing_like
from toprope.store.log.fold import JobState
from toprope.store.look.sample import alone
from toprope.store.objects.protocol import ObjectStore
from toprope.store.transfer.new_directory import WrittenOut, check_target, new_directory, put_in_place, synced_file
from toprope.store.transfer.restore import NOTE_NAME, is_ours, plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PartlyRestored(WrittenOut):
    """What was written: tensors of how many, and that it is only a part."""

    tensors: int
    of: int
    partial: bool = True


def restore_part(
    store: ObjectStore,
    state: JobState,
    *,
    to: Path,
    only: Sequence[str],
    step: int | None = None,
    force: bool = False,
) -> PartlyRestored:
    """Write the tensors of such names, each rank's as it stored them, into ``to``, whole or not at all.

    No manifest is written but a note that this is a part, so that nobody takes it for a checkpoint.

    Raises:
        UsageError: no tensor has such a name, or ``to`` is taken.
        NothingToVerifyError: there is no READY to restore.
        CorruptObjectError: something that was asked for is damaged; the message names what.
        CkptError: ``to`` can't be written.
    """
    seq = plan(state, step=step)[0]
    check_target(to, force=force, is_ours=is_ours)
    manifest, indexes = read_indexes(store, state, seq)
    chosen = {index.rank: _chosen(index, only) for index in indexes}
    total = sum(tensor.end - tensor.begin for tensors in chosen.values() for tensor in tensors)
    if not any(chosen.values()):
        raise nothing_like(only, (tensor.name for index in indexes for tensor in index.tensors))
    with new_directory(to, needed_bytes=total) as directory:
        for index in indexes:
            if chosen[index.rank]:
                path = directory / f"rank-{index.rank:05d}-of-{manifest.world:05d}.safetensors"
                _write(store, path, index, chosen[index.rank], job=state.job)
        with synced_file(directory / NOTE_NAME) as file:
            note = {"job": state.job, "attempt": manifest.attempt, "step": manifest.step, "only": list(only)}
            file.write(json.dumps(note, indent=2).encode() + b"\n")
        names = sorted(path.name for path in directory.iterdir())
        put_in_place(directory, to)
    return PartlyRestored(
        job=state.job,
        seq=seq,
        attempt=manifest.attempt,
        step=manifest.step,
        directory=to,
        files=tuple(names),
        tensors=sum(map(len, chosen.values())),
        of=sum(len(index.tensors) for index in indexes),
        bytes=total,
    )


def _chosen(index: Index, only: Sequence[str]) -> list[Tensor]:
    return [tensor for tensor in index.tensors if is_named_like(tensor.name, only)]


def _write(store: ObjectStore, path: Path, index: Index, tensors: Sequence[Tensor], *, job: str) -> None:
    with synced_file(path) as file:
        written = (Written(one.name, one.dtype, one.shape, one.end - one.begin) for one in tensors)
        file.write(header_bytes(written, _metadata(store, index, tensors, job=job)))
        for tensor in tensors:
            file.writelines(tensor_bytes(store, alone(index, tensor), job=job))


def _metadata(store: ObjectStore, index: Index, tensors: Sequence[Tensor], *, job: str) -> dict[str, str]:
    said = {"partial": "true", "step": str(index.step), "rank": str(index.rank), "world": str(index.world)}
    for tensor in tensors:
        if tensor.shape != tensor.global_shape:
            lies = {"global_shape": list(tensor.global_shape), "offsets": list(tensor.offsets)}
            said[f"piece:{tensor.name}"] = json.dumps(lies)
    if all(tensor.dtype != "U8" or tensor.name == DOCUMENT for tensor in tensors):
        return said
    stored = shard_metadata(store, index, job=job)
    dtypes = {f"dtype:{tensor.name}" for tensor in tensors} & set(stored)
    return said | {name: stored[name] for name in sorted(dtypes)}
