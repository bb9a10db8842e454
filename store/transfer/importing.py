"""Import: a checkpoint that others wrote, as the one READY checkpoint of a new job: one rank, one shard, names kept."""

from __future__ import annotations

import json
import math
import mmap
import secrets
from dataclasses import dataclass
from typing import Any

from toprope.store.checkpoint.header import Written, header_bytes
from toprope.store.checkpoint.leaves import IMPORTED
from toprope.store.checkpoint.manifest import Manifest, Shard, encode, sha256
from toprope.store.checkpoint.shard import (
    FORMAT,
    ITEM_BYTES,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    MAX_NAME_CHARACTERS,
    MAX_TENSORS,
    hash_image,
    index_of,
)
from toprope.store.checkpoint.whole import DOCUMENT
from toprope.store.digest import digest_of_object
from toprope.store.errors import AlreadyExistsError, CorruptObjectError, UsageError
from toprope.store.log.chain import read_log
from toprope.store.log.founding import found
from toprope.store.log.records import Attempt, AttemptFacts, Job, Member, Ready
from toprope.store.names import Key, checked_id, facts_key, index_key, manifest_key, shard_key
from toprope.store.objects.protocol import ObjectStore
from toprope.store.spool import spool
from toprope.store.transfer.incoming import Incoming, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What an import made. ``left_out`` names values that are neither tensors nor plain."""

    job: str
    step: int
    kind: str
    tensors: int
    values: int
    bytes: int
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Identity:
    job: str
    job_uid: str
    attempt_uid: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The image of a source: its header, and the tensors in the order of the file, each with where it begins."""

    header: bytes
    places: tuple[tuple[Incoming, int], ...]
    bytes: int


def import_source(store: ObjectStore, source: Source, *, job: str, step: int) -> Imported:
    """Store a source and found the job. Until the last record is written there is no checkpoint.

    Raises:
        UsageError: there is a job of that name, or the source can't be stored; nothing was changed.
        CorruptObjectError: the source turned out to be damaged, or the store did not keep what it was given.
        CkptError: there is no room for a temporary file of the image.
    """
    checked_id(job, what="job")
    if read_log(store, job).n:
        raise UsageError(
            f"job {job}: there is a job of this name in the store; nothing was changed. Give another --job"
        )
    who = _Identity(job=job, job_uid=_uid(), attempt_uid=_uid(), step=step)
    layout = plan(source, _metadata(who))
    shard = _store_shard(store, layout, who)
    spec = json.dumps(_spec(source), sort_keys=True, separators=(",", ":")).encode()
    facts = encode(AttemptFacts(world=(Member(rank=0, node="import", boot_id=_uid()),), held_digests=(), versions={}))
    spec_sha256, facts_sha256 = (_store_facts(store, job, body) for body in (spec, facts))
    manifest = encode(
        Manifest(
            job=job,
            job_uid=who.job_uid,
            attempt=1,
            attempt_uid=who.attempt_uid,
            step=step,
            world=1,
            spec_sha256=spec_sha256,
            shards=(shard,),
        )
    )
    digest = sha256(manifest)
    store.create(manifest_key(job, attempt=1, step=step, sha256=digest), manifest)
    opened = Attempt(
        attempt=1,
        uid=who.attempt_uid,
        launch_id=_uid(),
        round=0,
        ready=None,
        held=None,
        from_step=0,
        struck=(),
        world_size=1,
        facts_sha256=facts_sha256,
        spec_sha256=spec_sha256,
        why=f"imported from {source.kind}",
    )
    ready = Ready(
        attempt=1, attempt_uid=who.attempt_uid, step=step, parent=None, manifest_sha256=digest, bytes=shard.bytes
    )
    named = Job(uid=who.job_uid, name=job)
    found(store, job, (named, Job(uid=who.job_uid, name=job, spec_sha256=spec_sha256), opened, ready))
    return Imported(
        job=job,
        step=step,
        kind=source.kind,
        tensors=len(source.tensors),
        values=len(source.values),
        bytes=shard.bytes,
        left_out=source.left_out,
    )


def plan(source: Source, metadata: dict[str, str]) -> Layout:
    """Return where each tensor goes in an image: by the size of an element, largest first, the document last.

    Raises:
        UsageError: no reader would accept such an image.
    """
    document = json.dumps({IMPORTED: dict(source.values)}, separators=(",", ":")).encode()
    ordered = sorted(source.tensors, key=lambda tensor: (-_item_bytes(tensor), tensor.name))
    ordered.append(Incoming(name=DOCUMENT, dtype="U8", shape=(len(document),), fill=lambda view: _put(view, document)))
    if len(ordered) > MAX_TENSORS:
        raise UsageError(f"{len(source.tensors)} tensors; a shard holds at most {MAX_TENSORS - 1}")
    names, written = {"__metadata__"}, []
    for tensor in ordered:
        if tensor.name in names or len(tensor.name) > MAX_NAME_CHARACTERS or not tensor.name:
            raise UsageError(f"a tensor is named {tensor.name[:200]!r}, which a shard can't have")
        if tensor.true_dtype is not None:
            metadata[f"dtype:{tensor.name}"] = tensor.true_dtype
        names.add(tensor.name)
        written.append(Written(tensor.name, tensor.dtype, tensor.shape, _bytes(tensor)))
    header = header_bytes(written, metadata)
    if (length := len(header) - LENGTH_BYTES) > MAX_HEADER_BYTES:
        raise UsageError(f"the names of {len(source.tensors)} tensors take {length} bytes; at most {MAX_HEADER_BYTES}")
    places, at = [], len(header)
    for tensor in ordered:
        places.append((tensor, at))
        at += _bytes(tensor)
    return Layout(header=header, places=tuple(places), bytes=at)


def _item_bytes(tensor: Incoming) -> int:
    return ITEM_BYTES[tensor.dtype] if tensor.true_dtype is None else tensor.shape[-1]


def _bytes(tensor: Incoming) -> int:
    return math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]


def _put(view: memoryview, body: bytes) -> None:
    view[:] = body


def _uid() -> str:
    return secrets.token_hex(16)


def _metadata(who: _Identity) -> dict[str, str]:
    return {
        "format": FORMAT,
        "job_uid": who.job_uid,
        "attempt": "1",
        "attempt_uid": who.attempt_uid,
        "step": str(who.step),
        "rank": "0",
        "world": "1",
        "document": DOCUMENT,
    }


def _spec(source: Source) -> dict[str, Any]:
    """Return what a job depends on whose class nobody knows: the names and forms of what would be parameters."""
    params = {
        tensor.name.removeprefix("model."): [tensor.true_dtype or tensor.dtype, list(tensor.shape)]
        for tensor in source.tensors
        if tensor.name.startswith("model.")
    }
    return {"model": {"class": "imported", "params": params, "buffers": {}, "tied": {}}}


def _store_shard(store: ObjectStore, layout: Layout, who: _Identity) -> Shard:
    """Write image and index, read the image back, and return its line for the manifest."""
    key = shard_key(who.job, attempt=1, step=who.step, rank=0, world=1, nonce=_uid())
    with spool(layout.bytes) as file:
        file.truncate(layout.bytes)
        with mmap.mmap(file.fileno(), layout.bytes) as pages, memoryview(pages) as view:
            _fill(view, layout)
            index = index_of(hash_image(view, name=key), key=key)
            store.create(key, view)
    if (read_back := digest_of_object(store, key, uncached=True)) != index.files[0].digest:
        raise CorruptObjectError(f"{key}: the store returns other bytes than were written: digest {read_back}")
    body = encode(index)
    named = index_key(who.job, attempt=1, step=who.step, rank=0, world=1, sha256=sha256(body))
    store.create(named, body)
    return Shard(
        rank=0,
        index_key=named,
        index_sha256=sha256(body),
        bytes=layout.bytes,
        digest=index.files[0].digest,
    )


def _fill(view: memoryview, layout: Layout) -> None:
    _put(view[: len(layout.header)], layout.header)
    for tensor, begin in layout.places:
        with view[begin : begin + _bytes(tensor)] as part:
            tensor.fill(part)


def _store_facts(store: ObjectStore, job: str, body: bytes) -> str:
    digest = sha256(body)
    key = Key(facts_key(job, digest))
    try:
        store.create(key, body)
    except AlreadyExistsError:
        if store.read(key) != body:
            raise
    return digest
