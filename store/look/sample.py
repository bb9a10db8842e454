"""Verify a part: some tensors of a checkpoint, chosen by a seed, and the length of every file; and what is not read.

``untold`` looks further than digests can: whether the pieces of all ranks make up whole tensors, as a restore onto
another number of ranks needs them.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from toprope.store.checkpoint.assemble import tensor_bytes
from toprope.store.checkpoint.manifest import Index, Tensor
from toprope.store.checkpoint.ready import Damage, damage_of, length_damage, read_index, read_manifest
from toprope.store.checkpoint.whole import DOCUMENT, Part, Whole, gather, untiled
from toprope.store.errors import CorruptObjectError, MissingObjectError, UsageError
from toprope.store.log.fold import JobState
from toprope.store.look.verify import CheckpointReport
from toprope.store.objects.protocol import ObjectStore

_PERCENT = 100
_SAMPLE = re.compile(r"([0-9]{1,9})|([0-9]{1,3}(?:\.[0-9]{1,6})?)%")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """How many tensors of a checkpoint are read: a number of them, or a percentage; which ones, ``seed`` decides."""

    number: int | None = None
    percent: float = 0.0
    seed: int = 0

    def of(self, total: int) -> int:
        """Return how many of this many are read; of any part of a hundred at least one."""
        wanted = math.ceil(total * self.percent / _PERCENT) if self.number is None else self.number
        return min(total, wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What was read of a checkpoint: tensors of how many, and their bytes."""

    tensors: int
    of: int
    bytes: int


def parse_sample(text: str, *, seed: int) -> Sample:
    """Return the sample that a user asks for: ``5`` tensors, or ``1%`` of them.

    Raises:
        UsageError: it is neither.
    """
    match = _SAMPLE.fullmatch(text)
    if match is None or (match[2] is not None and float(match[2]) > _PERCENT):
        raise UsageError(f"--sample {text!r}: give a number of tensors, as 20, or a part of them, as 1%")
    if match[1] is not None:
        return Sample(number=int(match[1]), seed=seed)
    return Sample(percent=float(match[2]), seed=seed)


def sample_checkpoint(
    store: ObjectStore, state: JobState, seq: int, sample: Sample
) -> tuple[CheckpointReport, Sampled]:
    """Read manifest, indexes, the length of each file, and a sample of the tensors of READY ``seq``.

    Raises:
        UnavailableError: the store did not answer.
    """
    ready = state.readies[seq]
    indexes, damages = _read_indexes(store, state, seq)
    for index in indexes:
        damages += [one for file in index.files for one in length_damage(store, index, file, job=state.job)]
    spoiled = {damage.key for damage in damages}
    tensors = [(index, tensor) for index in indexes for tensor in index.tensors]
    chosen = _chosen(tensors, sample, of=f"{ready.attempt_uid}-{ready.step}")
    for index, tensor in chosen:
        if index.files[tensor.file].key not in spoiled:
            damages += _tensor_damage(store, index, tensor, job=state.job)
    report = CheckpointReport(
        job=state.job,
        seq=seq,
        attempt=ready.attempt,
        step=ready.step,
        world=state.attempts[ready.attempt - 1].world_size,
        bytes=ready.bytes,
        damages=tuple(damages),
    )
    read_bytes = sum(tensor.end - tensor.begin for _, tensor in chosen)
    return report, Sampled(tensors=len(chosen), of=len(tensors), bytes=read_bytes)


def _read_indexes(store: ObjectStore, state: JobState, seq: int) -> tuple[list[Index], list[Damage]]:
    try:
        manifest, _ = read_manifest(store, state, seq)
    except (CorruptObjectError, MissingObjectError) as error:
        return [], [damage_of(error, state, seq=seq)]
    indexes, damages = [], []
    for shard in manifest.shards:
        try:
            indexes.append(read_index(store, manifest, shard))
        except (CorruptObjectError, MissingObjectError) as error:
            damages.append(damage_of(error, state, seq=seq, rank=shard.rank))
    return indexes, damages


def _chosen(tensors: Sequence[tuple[Index, Tensor]], sample: Sample, *, of: str) -> list[tuple[Index, Tensor]]:
    """Return the tensors that the seed chooses, the same whatever else is in the store."""

    def drawn(one: tuple[Index, Tensor]) -> bytes:
        index, tensor = one
        return hashlib.sha256(f"{sample.seed} {of} {index.rank} {tensor.name}".encode()).digest()

    kept = {id(tensor) for _, tensor in sorted(tensors, key=drawn)[: sample.of(len(tensors))]}
    return [one for one in tensors if id(one[1]) in kept]


def alone(index: Index, tensor: Tensor) -> Whole:
    """Return what a rank stored under a name as a tensor of its own, not as a piece of a larger one."""
    whole = msgspec.structs.replace(tensor, global_shape=tensor.shape, offsets=(0,) * len(tensor.shape))
    part = Part(index=index, tensor=whole)
    return Whole(name=tensor.name, rank=index.rank, dtype=tensor.dtype, shape=tensor.shape, parts=(part,))


def _tensor_damage(store: ObjectStore, index: Index, tensor: Tensor, *, job: str) -> Iterator[Damage]:
    try:
        for _ in tensor_bytes(store, alone(index, tensor), job=job):
            pass
    except CorruptObjectError as error:
        (damage,) = error.args
        assert isinstance(damage, Damage)
        yield damage


def untold(indexes: Sequence[Index], *, ranks: int) -> tuple[list[str], list[str]]:
    """Return what stands in the way of a restore onto so many ranks, and what such a restore must decide by itself.

    The first are tensors whose pieces don't make up all of them exactly once. The second are those that ranks have
    each of their own, if the number of ranks is another one.
    """
    wholes = [whole for whole in gather(indexes) if whole.name != DOCUMENT]
    wrong = [f"{whole.label}: {why}" for whole in wholes if (why := untiled(whole)) is not None]
    own = sorted({whole.name for whole in wholes if whole.rank is not None})
    return wrong, own if ranks != len(indexes) else []
