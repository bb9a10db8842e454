"""Of a peer copy only what has changed travels, and of one that broke off only what is missing; all is checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.scripted_trainer import image

from toprope.coordinator.wire import Inventory
from toprope.sidecar.adapters.files import Disk, Pages
from toprope.sidecar.effects import Pull
from toprope.sidecar.memory import Memory
from toprope.sidecar.parts import Parts, parts_of
from toprope.sidecar.ports import PeerError, Ports
from toprope.sidecar.pulling import ASK_AGAIN_AFTER, GAP_BYTES, Puller, WrongBytesError
from toprope.sidecar.values import Shard
from toprope.store.digest import digest
from toprope.trainer_hooks.link.slot import read_page

UID = "1a" * 16
FROZEN = 4 * GAP_BYTES


class Owner:
    """Another sidecar: what it serves of each step, how much was asked of it, and when its connection breaks."""

    def __init__(self) -> None:
        self.images: dict[int, bytes] = {}
        self.sent = self.listed = 0
        self.breaks_after: int | None = None

    def save(self, step: int, *, frozen: bytes = b"f") -> Shard:
        """Save a step: a large tensor that stays as it is, and a small one that changes."""
        body = image(
            attempt=1,
            attempt_uid=UID,
            step=step,
            rank=0,
            world=1,
            job_uid="0b" * 16,
            payload=64,
            frozen=frozen * FROZEN,
        )
        self.images[step] = body
        return Shard(attempt=1, step=step, attempt_uid=UID, rank=0, world=1, bytes=len(body), digest=digest(body))

    def _of(self, url: str) -> bytes:
        return self.images[int(url.split("/")[6])]

    async def watch(self, url: str, *, after: int) -> Inventory:
        raise PeerError(url)

    def receive(self, url: str, into: memoryview, *, begin: int | None = None, paced: bool = False) -> None:
        assert paced
        body = self._of(url)[begin or 0 :][: len(into)]
        if self.breaks_after is not None and len(body) > self.breaks_after:
            into[: self.breaks_after] = body[: self.breaks_after]
            raise PeerError("the connection ended")
        into[:] = body
        self.sent += len(into)

    def parts(self, url: str, *, of_bytes: int) -> Parts:
        self.listed += 1
        return parts_of(memoryview(self._of(url)), name=url)

    async def acknowledge(self, url: str, *, digest: str) -> None:
        raise PeerError(url)


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
def puller(owner: Owner, memory_dir: Path) -> Puller:
    memory = Memory(memory_dir / "job", Pages(), limit_bytes=None)
    memory.make_directories()
    return Puller(memory, ports(owner))


def ports(owner: Owner) -> Ports:
    """Return ports of which only pages and peers are asked."""
    nothing: object = None
    return Ports(pages=Pages(), disk=Disk(), peers=owner, objects=nothing, coordinator=nothing, broker=nothing)  # type: ignore[arg-type]


def pulled(puller: Puller, shard: Shard, spare: int) -> int:
    return puller.pull(Pull(url="http://b", shard=shard, spare=spare))


def held(puller: Puller, shard: Shard, spare: int) -> bytes:
    return bytes(puller._memory.view(puller._memory.spare(0, spare).data)[: shard.bytes])


def test_only_tensors_that_have_changed_travel(puller: Puller, owner: Owner) -> None:
    first, second, third = (owner.save(step) for step in (1, 2, 3))
    assert pulled(puller, first, 0) == first.bytes
    for spare, shard in ((1, second), (0, third)):
        assert pulled(puller, shard, spare) < GAP_BYTES
        assert held(puller, shard, spare) == owner.images[shard.step]
    assert owner.sent < first.bytes + 2 * GAP_BYTES


def test_a_copy_that_was_damaged_here_is_not_blamed_on_the_owner_and_is_no_base_any_more(
    puller: Puller, owner: Owner
) -> None:
    first, second, third = (owner.save(step) for step in (1, 2, 3))
    pulled(puller, first, 0)
    pulled(puller, second, 1)
    puller._memory.view(puller._memory.spare(0, 1).data)[FROZEN // 2] ^= 1
    with pytest.raises(PeerError, match="damaged here"):
        pulled(puller, third, 0)
    assert pulled(puller, third, 0) > FROZEN
    assert held(puller, third, 0) == owner.images[3]


def test_a_flip_on_the_receivers_side_of_the_wire_is_found_where_it_was_stored_and_the_next_try_is_good(
    puller: Puller, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = owner.save(1)
    honest = owner.receive

    def flipped(url: str, into: memoryview, *, begin: int | None = None, paced: bool = False) -> None:
        honest(url, into, begin=begin, paced=paced)
        into[len(into) // 2] ^= 1

    monkeypatch.setattr(owner, "receive", flipped)
    with pytest.raises(WrongBytesError) as caught:
        pulled(puller, shard, 0)
    assert caught.value.found != shard.digest
    page = puller._memory.spare(0, 0).page
    assert not page.exists() or read_page(page) != shard.page(), "nothing says that it is held"
    monkeypatch.setattr(owner, "receive", honest)
    assert pulled(puller, shard, 0) == shard.bytes
    assert held(puller, shard, 0) == owner.images[1]
    assert read_page(page) == shard.page()


def test_where_all_changes_digests_are_asked_for_now_and_then_only(puller: Puller, owner: Owner) -> None:
    for step in range(1, ASK_AGAIN_AFTER + 4):
        shard = owner.save(step, frozen=bytes([step]))
        assert pulled(puller, shard, step % 2) == shard.bytes
        assert held(puller, shard, step % 2) == owner.images[step]
    assert owner.listed == 2


def test_a_pull_that_broke_off_goes_on_with_what_is_missing(puller: Puller, owner: Owner) -> None:
    shard = owner.save(1)
    owner.breaks_after = shard.bytes - 100
    with pytest.raises(PeerError):
        pulled(puller, shard, 0)
    owner.breaks_after = None
    assert pulled(puller, shard, 0) < shard.bytes
    assert held(puller, shard, 0) == owner.images[1]


def test_an_owner_whose_bytes_have_changed_is_told_which_digest_they_have(puller: Puller, owner: Owner) -> None:
    first, second = owner.save(1), owner.save(2)
    pulled(puller, first, 0)
    with pytest.raises(WrongBytesError) as caught:
        pulled(puller, replace(second, digest="00" * 16), 1)
    assert caught.value.found == second.digest
