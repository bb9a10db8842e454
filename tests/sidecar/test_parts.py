"""A copy that a sidecar serves in parts: what it lists, what of it is sent, and what is not believed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st
from tests.support.scripted_trainer import image

from toprope.sidecar.adapters import http
from toprope.sidecar.adapters.http import Copies, SidecarHttp
from toprope.sidecar.adapters.peers import HttpPeers
from toprope.sidecar.parts import Part, Parts, decoded, parts_of, runs
from toprope.sidecar.ports import PeerError
from toprope.sidecar.values import Way
from toprope.store.digest import digest

BODY = image(attempt=1, attempt_uid="1a" * 16, step=1, rank=0, world=1, payload=4096, job_uid="0b" * 16)


async def served(
    body: bytes, *, takes_s: float = 0.0, stall_timeout_s: float = 5.0
) -> AsyncIterator[tuple[HttpPeers, str]]:
    async def view(_: Path) -> memoryview:
        await asyncio.sleep(takes_s)
        return memoryview(body)

    async def no_inventory(_after: int, _wait_s: float) -> None:
        return None

    copies = Copies(
        locate=lambda _uid, step, _rank: [(Way(kind="here", tier="memory", path="/x"), len(body))] if step == 1 else [],
        view=view,
        began=lambda *_: None,
        ended=lambda _: None,
        acked=lambda *_: None,
    )
    sidecar = SidecarHttp(
        copies, inventory_after=no_inventory, adopted=tuple, token="", stall_timeout_s=5.0, use_deadline_s=5.0
    )
    async with TestServer(sidecar.application()) as server, aiohttp.ClientSession() as session:
        peers = HttpPeers(session, node="a", token="", stall_timeout_s=stall_timeout_s)
        yield peers, str(server.make_url("/v1/copies/1a/1/0?tier=memory"))


@pytest.fixture
async def peer() -> AsyncIterator[tuple[HttpPeers, str]]:
    async for one in served(BODY):
        yield one


async def received(peers: HttpPeers, url: str, begin: int, end: int) -> bytes:
    into = bytearray(end - begin)
    await asyncio.to_thread(peers.receive, url, memoryview(into), begin=begin)
    return bytes(into)


async def test_a_sidecar_lists_the_parts_of_a_copy_and_sends_any_of_them(peer: tuple[HttpPeers, str]) -> None:
    peers, url = peer
    parts = await asyncio.to_thread(peers.parts, url, of_bytes=0)
    assert parts == parts_of(memoryview(BODY), name="x")
    assert (parts.bytes, parts.digest) == (len(BODY), digest(BODY))
    assert parts.parts[0].name == ""
    for part in parts.parts:
        assert digest(await received(peers, url, part.begin, part.end)) == part.digest
    whole = bytearray(len(BODY))
    await asyncio.to_thread(peers.receive, url, memoryview(whole))
    assert whole == BODY


async def test_an_image_is_hashed_once_for_all_who_ask_for_its_parts(
    peer: tuple[HttpPeers, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []

    def counting(image: memoryview, *, name: str) -> Parts:
        hashed.append(name)
        return parts_of(image, name=name)

    monkeypatch.setattr(http, "parts_of", counting)
    peers, url = peer
    async with asyncio.TaskGroup() as asking:
        answers = [asking.create_task(asyncio.to_thread(peers.parts, url, of_bytes=0)) for _ in range(5)]
    assert {answer.result() for answer in answers} == {parts_of(memoryview(BODY), name="x")}
    assert len(hashed) == 1
    for rank in range(http.LISTED_KEPT):
        await asyncio.to_thread(peers.parts, url.replace("/1/0", f"/1/{rank + 1}"), of_bytes=0)
    await asyncio.to_thread(peers.parts, url, of_bytes=0)
    assert len(hashed) == http.LISTED_KEPT + 2, "what was asked for long ago is not remembered"


async def test_a_range_beyond_a_copy_and_a_copy_that_is_not_there_are_errors(peer: tuple[HttpPeers, str]) -> None:
    peers, url = peer
    with pytest.raises(PeerError, match=f"answered 416: give a range within {len(BODY)} bytes"):
        await received(peers, url, len(BODY), len(BODY) + 1)
    with pytest.raises(PeerError, match="has 1 bytes; expected 2"):
        await received(peers, url, len(BODY) - 1, len(BODY) + 1)
    with pytest.raises(PeerError, match="answered 404: no verified copy"):
        await asyncio.to_thread(peers.parts, url.replace("/1/0", "/2/0"), of_bytes=0)


async def test_a_copy_that_is_no_image_is_not_listed() -> None:
    async for peers, url in served(b"x" * 64):
        with pytest.raises(PeerError, match=r"answered 404: .*not a shard image"):
            await asyncio.to_thread(peers.parts, url, of_bytes=0)


async def test_a_large_image_may_take_as_long_as_its_hashing_and_a_small_one_may_not() -> None:
    async for peers, url in served(BODY, takes_s=0.3, stall_timeout_s=0.1):
        parts = await asyncio.to_thread(peers.parts, url, of_bytes=5_000_000_000)
        assert parts.digest == digest(BODY)
        with pytest.raises(PeerError, match="timed out"):
            await asyncio.to_thread(peers.parts, url, of_bytes=len(BODY))


@pytest.mark.parametrize(
    "ends", [[(0, 5), (5, 9)], [(0, 5), (6, 10)], [(0, 5), (4, 10)], [(1, 10)], [(0, 5), (5, 4), (4, 10)]]
)
def test_parts_with_a_hole_or_an_overlap_are_not_read(ends: list[tuple[int, int]]) -> None:
    parts = tuple(Part(name=str(at), begin=begin, end=end, digest="") for at, (begin, end) in enumerate(ends))
    with pytest.raises(msgspec.MsgspecError):
        decoded(msgspec.json.encode(Parts(bytes=10, digest="", parts=parts)))


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=8))
def test_runs_cover_what_is_wanted_and_nothing_else(sizes: list[tuple[int, bool]]) -> None:
    at, some, expected = 0, [], set[int]()
    for size, is_wanted in sizes:
        if is_wanted:
            some.append(Part(name="", begin=at, end=at + size, digest=""))
            expected |= set(range(at, at + size))
        at += size
    covered = [one for begin, end in runs(some) for one in range(begin, end)]
    assert covered == sorted(expected)
