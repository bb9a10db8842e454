"""Restore to disk: a READY checkpoint's shards, verified as they are written, in a new directory that appears whole."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from toprope.store.checkpoint import Damage, damage_of, read_index, read_manifest, scan_shard
from toprope.store.errors import (
    CkptError,
    CorruptObjectError,
    MissingObjectError,
    NothingToVerifyError,
    StoreError,
    UsageError,
)
from toprope.store.fold import JobState
from toprope.store.manifest import Manifest
from toprope.store.objects.protocol import ObjectStore

MANIFEST_NAME = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedOver:
    """A READY that was newer but could not be used."""

    seq: int
    step: int
    damages: tuple[Damage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a restore wrote, and what it passed over on the way."""

    job: str
    seq: int
    attempt: int
    step: int
    bytes: int
    directory: Path
    files: tuple[str, ...]
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
        raise NothingToVerifyError(f"job {state.job}: no READY checkpoint of step {step}; there are steps {have}")
    return (of_step[-1],)


def restore(store: ObjectStore, state: JobState, *, to: Path, step: int | None = None, force: bool = False) -> Restored:
    """Write the first READY of the plan that verifies into the directory ``to``, which appears whole or not at all.

    Raises:
        UsageError: ``to`` is taken, or its parent is not there.
        NothingToVerifyError: there is no READY to restore.
        StoreError: each is damaged; the message lists what was found.
        CkptError: ``to`` can't be written.
    """
    seqs = plan(state, step=step)
    _check_target(to, force=force)
    passed_over: list[PassedOver] = []
    for seq in seqs:
        with _new_directory(to, needed_bytes=state.readies[seq].bytes) as directory:
            damages = _write_checkpoint(store, state, seq, directory)
            if not damages:
                _put_in_place(directory, to)
                return _restored(state, seq, to, tuple(passed_over))
        passed_over.append(PassedOver(seq=seq, step=state.readies[seq].step, damages=damages))
    found = "".join(f"\n  {damage}" for one in passed_over for damage in one.damages)
    raise StoreError(f"job {state.job}: no READY checkpoint could be restored; nothing was written{found}")


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
    with _synced_file(directory / MANIFEST_NAME) as file:
        file.write(body)
    return ()


def _write_shard(
    store: ObjectStore, state: JobState, seq: int, manifest: Manifest, *, directory: Path, rank: int
) -> tuple[Damage, ...]:
    try:
        index = read_index(store, manifest, manifest.shards[rank])
    except (CorruptObjectError, MissingObjectError) as error:
        return (damage_of(error, state, seq=seq, rank=rank),)
    with _synced_file(directory / f"rank-{rank:05d}-of-{manifest.world:05d}.safetensors") as file:
        return tuple(scan_shard(store, index, job=state.job, take=lambda chunk: _write_all(file, chunk)))


def _write_all(file: BinaryIO, chunk: bytes) -> None:
    file.write(chunk)


@contextlib.contextmanager
def _synced_file(path: Path) -> Iterator[BinaryIO]:
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _new_directory(to: Path, *, needed_bytes: int) -> Iterator[Path]:
    """Make a temporary directory beside ``to``, gone at the end unless it was put in place."""
    directory = to.parent / f".{to.name}.tmp-{secrets.token_hex(8)}"
    try:
        free_bytes = shutil.disk_usage(to.parent).free
        if free_bytes < needed_bytes:
            raise CkptError(f"{to.parent}: needs {needed_bytes} bytes, but {free_bytes} are free; nothing was written")
        directory.mkdir()
        yield directory
    except OSError as error:
        raise CkptError(f"{to}: can't be written: {os.strerror(error.errno or 0)}; nothing was restored") from error
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _check_target(to: Path, *, force: bool) -> None:
    if not to.parent.is_dir():
        raise UsageError(f"{to.parent}: no such directory; make it, or give --to another one")
    if not to.exists() and not to.is_symlink():
        return
    if to.is_symlink() or not to.is_dir():
        raise UsageError(f"{to}: is not a directory; give --to a new one")
    present = [path.name for path in to.iterdir()]
    if present and not force:
        raise UsageError(f"{to}: is there and not empty; give --to a new directory, or --force to replace this one")
    strange = [name for name in present if not (name == MANIFEST_NAME or name.endswith(".safetensors"))]
    if strange:
        raise UsageError(f"{to}: holds {strange[0]!r}, which no restore wrote; give --to a new directory")


def _put_in_place(directory: Path, to: Path) -> None:
    """Give the finished directory its name. What a forced restore replaces goes only once the new one is there."""
    _sync_directory(directory)
    aside = to.parent / f".{to.name}.old-{secrets.token_hex(8)}"
    replaces = to.is_dir() and any(to.iterdir())
    if replaces:
        to.rename(aside)
    directory.rename(to)
    _sync_directory(to.parent)
    if replaces:
        shutil.rmtree(aside)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
