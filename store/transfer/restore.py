"""Restore to disk: a READY checkpoint's shards, verified as they are written, in a new directory that appears whole."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from toprope.store.checkpoint.manifest import Manifest
from toprope.store.checkpoint.ready import Damage, damage_of, read_index, read_manifest, scan_shard
from toprope.store.errors import (
    CorruptObjectError,
    MissingObjectError,
    NothingToVerifyError,
    StoreError,
    UnseenObjectError,
)
from toprope.store.keep.holds import holding
from toprope.store.log.chain import read_on
from toprope.store.log.fold import JobState
from toprope.store.objects.protocol import ObjectStore
from toprope.store.transfer.new_directory import WrittenOut, check_target, new_directory, put_in_place, synced_file

MANIFEST_NAME = "manifest.json"
NOTE_NAME = "PARTIAL.json"
"""What a part of a checkpoint has in place of a manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedOver:
    """A READY that was newer but could not be used."""

    seq: int
    step: int
    damages: tuple[Damage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored(WrittenOut):
    """What a restore wrote, and what it passed over on the way."""

    passed_over: tuple[PassedOver, ...]


def plan(state: JobState, *, step: int | None = None) -> tuple[int, ...]:
    """Return the READYs to try, in this order: newest first of the lineage, or the newest of one step.

    Raises:
        NothingToVerifyError: there is none.
    """
    if step is None:
        seqs = tuple(seq for seq, _ in state.restorable())
        if not seqs:
            why = "no READY checkpoint yet" if not state.readies else "each READY checkpoint is retired or tainted"
            raise NothingToVerifyError(f"job {state.job}: {why}, so nothing to restore")
        return seqs
    of_step = [seq for seq in state.live if state.readies[seq].step == step]
    if not of_step:
        have = sorted({state.readies[seq].step for seq in state.live})
        newer = "; what is newer is not READY yet" if step > max(have, default=0) else ""
        raise NothingToVerifyError(
            f"job {state.job}: no READY checkpoint of step {step}; there are steps {have}{newer}"
        )
    return (of_step[-1],)


def restore(store: ObjectStore, state: JobState, *, to: Path, step: int | None = None, force: bool = False) -> Restored:
    """Write the first READY of the plan that verifies into the directory ``to``, which appears whole or not at all.

    Each is held while it is read. One that was retired before is none any more: then the plan is made anew.

    Raises:
        UsageError: ``to`` is taken, or its parent is not there.
        NothingToVerifyError: there is no READY to restore.
        StoreError: each is damaged; the message lists what was found.
        UnseenObjectError: so is none, but something of each is not to be seen here.
        CkptError: ``to`` can't be written.
    """
    plan(state, step=step)
    check_target(to, force=force, is_ours=is_ours)
    passed_over: list[PassedOver] = []
    while (seq := _next(state, step, passed_over)) is not None:
        with holding(store, state, seq) as state:  # noqa: PLR1704 - as the log is by then
            if seq in state.retired:
                continue
            with new_directory(to, needed_bytes=state.readies[seq].bytes) as directory:
                damages = _write_checkpoint(store, state, seq, directory)
                if not damages:
                    put_in_place(directory, to)
                    return _restored(state, seq, to, tuple(passed_over))
            passed_over.append(PassedOver(seq=seq, step=state.readies[seq].step, damages=damages))
        state = read_on(store, state)  # without a hold it may have been retired while it was read
    found = "".join(f"\n  {damage}" for one in passed_over for damage in one.damages)
    text = f"job {state.job}: no READY checkpoint could be restored; nothing was written"
    if all(damage.unseen for one in passed_over for damage in one.damages):
        raise UnseenObjectError(f"{text}. Try again, or on the node that saved; or it was removed{found}")
    raise StoreError(text + found)


def _next(state: JobState, step: int | None, passed_over: list[PassedOver]) -> int | None:
    """Return the first READY of the plan that was not passed over, or None if all were.

    Raises:
        NothingToVerifyError: there is no READY to restore, and none was passed over.
    """
    tried = {one.seq for one in passed_over}
    try:
        return next((seq for seq in plan(state, step=step) if seq not in tried), None)
    except NothingToVerifyError:
        if tried:
            return None
        raise


def _restored(state: JobState, seq: int, to: Path, passed_over: tuple[PassedOver, ...]) -> Restored:
    ready = state.readies[seq]
    return Restored(
        job=state.job,
        seq=seq,
        attempt=ready.attempt,
        step=ready.step,
        bytes=ready.bytes,
        directory=to,
        files=tuple(sorted(path.name for path in to.iterdir())),
        passed_over=passed_over,
    )


def _write_checkpoint(store: ObjectStore, state: JobState, seq: int, directory: Path) -> tuple[Damage, ...]:
    """Write manifest and shards, and return what is wrong with them: if anything is, the directory is of no use."""
    try:
        manifest, body = read_manifest(store, state, seq)
    except (CorruptObjectError, MissingObjectError) as error:
        return (damage_of(error, state, seq=seq),)
    for rank in range(manifest.world):
        damages = _write_shard(store, state, seq, manifest, directory=directory, rank=rank)
        if damages:
            return damages
    with synced_file(directory / MANIFEST_NAME) as file:
        file.write(body)
    return ()


def _write_shard(
    store: ObjectStore, state: JobState, seq: int, manifest: Manifest, *, directory: Path, rank: int
) -> tuple[Damage, ...]:
    try:
        index = read_index(store, manifest, manifest.shards[rank])
    except (CorruptObjectError, MissingObjectError) as error:
        return (damage_of(error, state, seq=seq, rank=rank),)
    with synced_file(directory / f"rank-{rank:05d}-of-{manifest.world:05d}.safetensors") as file:
        return tuple(scan_shard(store, index, job=state.job, take=lambda chunk: _write_all(file, chunk)))


def _write_all(file: BinaryIO, chunk: bytes) -> None:
    file.write(chunk)


def is_ours(name: str) -> bool:
    """Return whether a restore writes files of this name: of a checkpoint, or of a part of one."""
    return name in {MANIFEST_NAME, NOTE_NAME} or name.endswith(".safetensors")
