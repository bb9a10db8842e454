"""Documents by HTTP that come in pieces, as long ones do on a network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from prometheus_client import CollectorRegistry
from tests.support.reigns import FakeNode

from toprope.coordinator.adapters.http import application
from toprope.coordinator.adapters.nodes import HttpNodes
from toprope.coordinator.wire import (
    MAX_INVENTORY_BYTES,
    Desired,
    Health,
    Inventory,
    OpenAnswer,
    OpenRequest,
    Presence,
    encode,
)
from toprope.store.keep.changes import ChangeAnswer, ChangeRequest

INVENTORY = FakeNode(name="a", job_uid="00").say()


class Ear:
    """A service that notes what it hears and knows of nothing to answer."""

    def __init__(self) -> None:
        self.heard_all: list[Inventory] = []

    @property
    def registry(self) -> CollectorRegistry:
        return CollectorRegistry()

    def health(self, *, standby: str = "") -> Health:
        raise NotImplementedError

    def heard(self, inventory: Inventory) -> None:
        self.heard_all.append(inventory)

    def desired(self, *, node: str = "") -> Desired | None:
        return None

    async def desired_after(self, term: int, version: int) -> None:
        raise NotImplementedError

    async def open(self, request: OpenRequest) -> OpenAnswer:
        raise NotImplementedError

    async def change(self, asked: ChangeRequest) -> ChangeAnswer:
        raise NotImplementedError

    def declare_dead(self, node: str) -> None:
        raise NotImplementedError

    def status(self) -> Presence | None:
        return None


def in_pieces(body: bytes, size: int = 100) -> list[bytes]:
    return [body[start : start + size] for start in range(0, len(body), size)]


async def let_the_other_end_read() -> None:
    """Let what was sent arrive: both ends are in this loop."""
    for _ in range(10):
        await asyncio.sleep(0)


async def answer_of(pieces: list[bytes]) -> Inventory | None:
    """Return what a node is understood to hold that answers in these pieces."""

    async def get(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await let_the_other_end_read()
        return response

    app = web.Application()
    app.router.add_get("/v1/inventory", get)
    async with TestServer(app) as server, ClientSession() as session:
        return await HttpNodes(session).inventory(f"http://127.0.0.1:{server.port}")


async def test_an_inventory_that_comes_in_pieces_is_read_whole() -> None:
    assert await answer_of(in_pieces(encode(INVENTORY))) == INVENTORY


async def test_an_inventory_that_is_too_long_is_none() -> None:
    assert await answer_of([encode(INVENTORY), b" " * MAX_INVENTORY_BYTES]) is None


async def test_an_inventory_that_is_put_in_pieces_is_heard() -> None:
    async def body() -> AsyncIterator[bytes]:
        for piece in in_pieces(encode(INVENTORY)):
            yield piece
            await let_the_other_end_read()

    ear = Ear()
    async with TestServer(application(ear, token="")) as server, ClientSession() as session:
        url = f"http://127.0.0.1:{server.port}/v1/nodes/a/inventory"
        async with session.put(url, data=body()) as answer:
            assert answer.status == 503, "heard, and there is no Desired yet to answer with"
    assert ear.heard_all == [INVENTORY]
