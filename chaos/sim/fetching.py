"""Copies that a simulated sidecar brings here: from the peer that it holds for, and for a restore from anywhere."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

from toprope.chaos.sim.copies import WrongDigestError, WrongError, check_digest, check_header, is_right, place_of
from toprope.chaos.sim.memory import File, stage_path
from toprope.chaos.sim.net import NetError
from toprope.chaos.sim.sidecar_ports import ASK_S
from toprope.sidecar import effects as do
from toprope.sidecar import events as on
from toprope.sidecar.values import Shard, Way
from toprope.store.checkpoint.files import write_image
from toprope.store.checkpoint.ready import read_index_at
from toprope.store.digest import digest
from toprope.store.errors import CkptError, UnavailableError
from toprope.store.names import Key
from toprope.trainer_hooks.link import wire

if TYPE_CHECKING:
    from toprope.chaos.sim.sidecar import SimSidecar


class Fetching:
    """What a sidecar gets from others."""

    def __init__(self, car: SimSidecar) -> None:
        self._car, self._world, self._node, self._memory = car, car.world, car.node, car.node.memory

    async def pull(self, effect: do.Pull) -> None:
        """Copy a shard from its owner, and tell it which digest came."""
        shard = effect.shard
        file = self._memory.spares.get((shard.rank, effect.spare))
        if file is None or len(file.data) < shard.bytes:
            file = self._memory.spares[shard.rank, effect.spare] = File(bytearray(shard.bytes))
        try:
            with self._world.trace.phase("peer replication", place_of(shard)):
                await self._receive(effect.url, shard, file)
                check_digest(digest(bytes(file.data[: shard.bytes])), shard)
                check_header(bytes(file.data[: shard.bytes]), shard)
        except WrongDigestError as error:
            self._world.trace.sometimes("a pull brought wrong bytes")
            self._car.post(on.PullFailed(shard=shard, spare=effect.spare, reason=str(error)))
            await self._acknowledge(effect, error.found)
            return
        except (NetError, WrongError) as error:
            self._car.post(on.PullFailed(shard=shard, spare=effect.spare, reason=str(error)))
            return
        file.page = shard.page()
        file.flipped = False
        self._car.post(on.Pulled(shard=shard, spare=effect.spare))
        await self._acknowledge(effect, shard.digest)

    async def _receive(self, url: str, shard: Shard, file: File, *, tier: str = "memory") -> None:
        """Receive a copy in two halves, straight into a file."""
        place, half = (shard.attempt_uid, shard.step, shard.rank), shard.bytes // 2
        me = self._node.name

        async def part(begin: int, end: int, serve: int) -> int:
            number, body = await self._world.ask_sidecar(
                me, url, lambda car: car.serving.serve(place, tier, begin=begin, end=end, serve=serve), timeout_s=ASK_S
            )
            if len(body) != end - begin:
                raise NetError(f"{url}: {len(body)} bytes came; expected {end - begin}")
            file.data[begin:end] = body
            return number

        serve = await part(0, half, 0)
        self._world.at("receive")
        await self._car.pause(0.05)
        await part(half, shard.bytes, serve)

    async def _acknowledge(self, effect: do.Pull, found: str) -> None:
        shard = effect.shard
        place = (shard.attempt_uid, shard.step, shard.rank)
        spare = self._memory.spares.get((shard.rank, effect.spare))
        if found == shard.digest and spare is not None:
            self._world.oracle.on_claim(
                f"{self._node.name}'s acknowledgement",
                place,
                said=found,
                found=bytes(spare.data[: shard.bytes]),
                spoiled=spare.flipped,
            )
        with contextlib.suppress(NetError):
            await self._world.ask_sidecar(
                self._node.name,
                effect.url,
                lambda car: car.serving.acked(self._node.name, place, found),
                timeout_s=ASK_S,
            )

    async def stage(self, effect: do.Stage) -> None:
        """Bring a shard of the source here, by the first way that gives it."""
        shard, tried, again = effect.shard, [], not effect.ways
        for way in effect.ways:
            place = (effect.attempt_uid, effect.step, shard.rank)
            try:
                with self._world.trace.phase(f"staging from {way.kind} {way.tier}", place):
                    path = await self._twice(effect, way)
            except (WrongError, NetError, CkptError, OSError) as error:
                tried.append(f"{way.tier} of {way.node}: {error}")
                again |= isinstance(error, NetError | UnavailableError)
                continue
            self._world.trace.sometimes(f"staged from {way.kind} {way.tier}")
            staged = wire.StagedShard(
                rank=shard.rank, path=path, bytes=shard.bytes, digest=shard.digest, tier=way.tier, node=way.node
            )
            self._car.post(on.ShardStaged(attempt_uid=effect.attempt_uid, shard=staged))
            return
        reason = "; ".join(tried) or "nobody has it"
        self._car.post(on.StageFailed(attempt_uid=effect.attempt_uid, rank=shard.rank, reason=reason, again=again))

    async def _twice(self, effect: do.Stage, way: Way) -> str:
        """Take it, from the object store once more if wrong bytes come."""
        try:
            return await self._taken(effect, way)
        except WrongError:
            if way.kind != "object":
                raise
            self._world.trace.sometimes("wrong bytes of the store were asked for once more")
            return await self._taken(effect, way)

    async def _taken(self, effect: do.Stage, way: Way) -> str:
        shard = effect.shard
        if way.kind == "here":
            await self._car.pause(0.05)
            if way.tier == "local":
                self._node.disk.check_readable(way.path)
            body = self._node.bytes_at(way.path, shard.bytes)
            if body is None:
                raise NetError("it is here no more")
            if not is_right(digest(body), shard.digest):
                event = on.CopyDoubted(
                    attempt_uid=effect.source_attempt_uid, step=effect.step, rank=shard.rank, tier=way.tier
                )
                self._world.loop.call_soon(self._car.post, event)
                raise WrongError("it is not what it should be")
            return way.path
        file = self._memory.staged[effect.attempt_uid, shard.rank] = File(bytearray(shard.bytes))
        if way.kind == "node":
            wanted = Shard(
                attempt=0,
                step=effect.step,
                attempt_uid=effect.source_attempt_uid,
                rank=shard.rank,
                world=0,
                bytes=shard.bytes,
                digest=shard.digest,
            )
            await self._receive(way.url, wanted, file, tier=way.tier)
        else:
            index = await self._car.bulk(partial(read_index_at, self._world.objects, Key(way.key)))
            if index.bytes != shard.bytes:
                raise WrongError("it is not as long as it should be")
            with memoryview(file.data) as view:
                await self._world.loop.stepwise(
                    partial(write_image, self._world.objects, index, partial(_write_into, view))
                )
        if not is_right(digest(bytes(file.data)), shard.digest):
            raise WrongError("it is not what it should be")
        return stage_path(effect.attempt_uid, shard.rank)


def _write_into(view: memoryview, at: int, body: memoryview) -> None:
    view[at : at + len(body)] = body
