"""Small valid stores, made without a trainer: shard images, indexes, manifests and the log that names them."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.support.logs import JOB_UID, LogWriter, attempt, job, ready, uid

from toprope.sidecar.object_tier import ObjectTier
from toprope.sidecar.packing import Codec
from toprope.sidecar.values import Shard as Snapshot
from toprope.store.checkpoint.manifest import Index, Manifest, Shard, encode, sha256
from toprope.store.checkpoint.shard import hash_image, index_of, parse_header
from toprope.store.digest import digest
from toprope.store.errors import AlreadyExistsError
from toprope.store.log.records import AttemptFacts, Elected, Held, Member, Struck
from toprope.store.names import Key, facts_key, index_key, manifest_key, shard_key
from toprope.store.objects.protocol import ObjectStore


def shard_image(*, step: int, rank: int, world: int = 2, number: int = 1, job_uid: str = JOB_UID) -> bytes:
    """Return a shard image whose bytes depend on step and rank: two tensors and a document."""
    weight = struct.pack("<6f", *(step + rank + at / 8 for at in range(6)))
    moment = struct.pack("<3d", *(step * rank + at for at in range(3)))
    document = json.dumps({"step": step, "rank": rank}).encode()
    tensors = {
        "optimizer.state.weight.exp_avg": ("F64", [3], moment),
        "model.weight": ("F32", [2, 3], weight),
        "model.empty": ("F32", [0, 7], b""),
        "__document__": ("U8", [len(document)], document),
    }
    metadata = {
        "format": "1",
        "job_uid": job_uid,
        "attempt": str(number),
        "attempt_uid": uid(number),
        "step": str(step),
        "rank": str(rank),
        "world": str(world),
        "document": "__document__",
    }
    return safetensors_image(tensors, metadata)


def adapter_image(  # noqa: PLR0913 - whose state it is
    *,
    step: int,
    rank: int,
    world: int = 2,
    number: int = 1,
    job_uid: str = JOB_UID,
    attempt_uid: str = "",
    frozen: int = 4096,
) -> bytes:
    """Return a shard image most of which never changes: ``frozen`` floats in two tensors, and an adapter of six."""
    plain = shard_image(step=step, rank=rank, world=world, number=number, job_uid=job_uid)
    header = parse_header(plain, size=len(plain), name="plain")
    tensors = {one.name: (one.dtype, list(one.shape), plain[one.begin : one.end]) for one in header.extents}
    of_rank = struct.pack(f"<{frozen // 2}f", *(rank + at / 16 for at in range(frozen // 2)))
    of_all = struct.pack(f"<{frozen // 2}f", *(at % 7 for at in range(frozen // 2)))
    first = {"optimizer.state.weight.exp_avg": tensors.pop("optimizer.state.weight.exp_avg")}
    still = {
        "model.frozen": ("F32", [frozen // 2], of_rank),
        "model.table": ("F32", [2, frozen // 4], of_all),
    }
    metadata = header.metadata | ({"attempt_uid": attempt_uid} if attempt_uid else {})
    return safetensors_image(first | still | tensors, metadata)


def safetensors_image(tensors: dict[str, tuple[str, list[int], bytes]], metadata: dict[str, str] | None) -> bytes:
    """Return a safetensors file of these tensors (dtype, shape, bytes), in this order, padded to 8 bytes."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for name, (dtype, shape, body) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(body)]}
        at += len(body)
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return struct.pack("<Q", len(text)) + text + b"".join(body for _, _, body in tensors.values())


@dataclass
class JobBuilder:
    """Puts a job into a store: ``begin``, then ``open_attempt`` and ``checkpoint`` as often as wanted.

    ``image`` makes the shard of a rank, given what ``shard_image`` is given. With ``codec`` sidecars store the shards,
    so that only what is new is stored.
    """

    store: ObjectStore
    name: str = "job"
    world: int = 2
    image: Callable[..., bytes] = shard_image
    codec: Codec | None = None
    spec: bytes = b'{"model":{"weight":["F32",[2,3]]}}'
    log: LogWriter = field(init=False)

    def __post_init__(self) -> None:
        self.log = LogWriter(self.store, self.name)
        self.tier = ObjectTier(self.store, self.name, codec=self.codec or "none")

    def begin(self) -> JobBuilder:
        spec = self._put_facts(self.spec)
        self.log.add(job(self.name), Elected(), job(self.name, spec=spec))
        return self.open_attempt()

    def open_attempt(
        self,
        *,
        ready: int | None = None,
        held: Held | None = None,
        from_step: int = 0,
        struck: tuple[Struck, ...] = (),
    ) -> JobBuilder:
        number = self.log.state.attempt_number + 1
        members = tuple(Member(rank=rank, node=f"n{rank}", boot_id=f"{rank:032x}") for rank in range(self.world))
        facts = encode(AttemptFacts(world=members, held_digests=(), versions={"python": "3.11.7"}))
        spec = self.log.state.spec_sha256
        assert spec is not None
        opened = attempt(
            number,
            ready=ready,
            held=held,
            from_step=from_step,
            struck=struck,
            world_size=self.world,
            facts_sha256=self._put_facts(facts),
            spec_sha256=spec,
        )
        self.log.add(opened)
        return self

    def checkpoint(
        self,
        step: int,
        *,
        change_manifest: Callable[[Manifest], Manifest] = lambda manifest: manifest,
        change_index: Callable[[Index], Index] = lambda index: index,
    ) -> int:
        """Write the shards, the indexes and the manifest of a step, append READY, and return its number.

        The changes are what a writer with a bug, or a hostile one, would have written and named by its true hash.
        """
        state = self.log.state
        current = state.attempt
        assert current is not None
        shards = tuple(self.put_shard(step=step, rank=rank, change=change_index) for rank in range(self.world))
        honest = Manifest(
            job=self.name,
            job_uid=state.job_uid,
            attempt=current.attempt,
            attempt_uid=current.uid,
            step=step,
            world=self.world,
            spec_sha256=current.spec_sha256,
            shards=shards,
        )
        body = encode(change_manifest(honest))
        total = sum(shard.bytes for shard in shards)
        named = sha256(body)
        self.store.create(manifest_key(self.name, attempt=current.attempt, step=step, sha256=named), body)
        return self.log.add(ready(step, number=current.attempt, parent=state.head, manifest=named, size_bytes=total))

    def put_shard(self, *, step: int, rank: int, change: Callable[[Index], Index] = lambda index: index) -> Shard:
        """Write the shard image and the index of a rank, and return its line in the manifest."""
        number = self.log.state.attempt_number
        image = self.image(step=step, rank=rank, world=self.world, number=number, job_uid=self.log.state.job_uid)
        nonce = f"{self.log.state.n:08x}"
        if self.codec is not None:
            return self._put_by_sidecar(image, step=step, rank=rank, nonce=nonce)
        key = shard_key(self.name, attempt=number, step=step, rank=rank, world=self.world, nonce=nonce)
        self.store.create(key, image)
        index = index_of(hash_image(memoryview(image), name=key), key=key)
        body = encode(change(index))
        named = index_key(self.name, attempt=number, step=step, rank=rank, world=self.world, sha256=sha256(body))
        self.store.create(named, body)
        return Shard(
            rank=rank,
            index_key=named,
            index_sha256=sha256(body),
            bytes=index.bytes,
            digest=index.digest,
        )

    def _put_by_sidecar(self, image: bytes, *, step: int, rank: int, nonce: str) -> Shard:
        current = self.log.state.attempt
        assert current is not None
        snapshot = Snapshot(
            attempt=current.attempt,
            step=step,
            attempt_uid=current.uid,
            rank=rank,
            world=self.world,
            bytes=len(image),
            digest=digest(image),
        )
        receipt = self.tier.put(snapshot, memoryview(image), nonce=nonce)
        return Shard(
            rank=rank,
            index_key=receipt.index_key,
            index_sha256=receipt.index_sha256,
            bytes=receipt.bytes,
            digest=receipt.digest,
        )

    def _put_facts(self, body: bytes) -> str:
        named = sha256(body)
        with contextlib.suppress(AlreadyExistsError):
            self.store.create(Key(facts_key(self.name, named)), body)
        return named


def small_store(store: ObjectStore, *, steps: tuple[int, ...] = (10, 20), name: str = "job") -> JobBuilder:
    """Put a job of two ranks with one attempt and these READY steps into a store."""
    builder = JobBuilder(store, name).begin()
    for step in steps:
        builder.checkpoint(step)
    return builder
