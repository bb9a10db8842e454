"""Documents by HTTP that come in pieces, as long ones do on a network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator

from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from prometheus_client import CollectorRegistry
from tests.support.reigns import FakeNode

from toprope.coordinator.adapters.http import Page, application
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
        self.known: Callable[[], Generator[None, None, Presence]] | None = None

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

    def status(self) -> Generator[None, None, Presence] | None:
        return None if self.known is None else self.known()


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


def presence(node: str) -> Presence:
    return Presence(node=node, boot_id="0b", incarnation="0a", alive=True)


async def test_what_is_heard_does_not_wait_until_the_status_is_worked_out() -> None:
    ear, begun = Ear(), asyncio.Event()

    def slices() -> Generator[None, None, Presence]:
        begun.set()
        while not ear.heard_all:
            yield
        return presence("a")

    async with (
        asyncio.timeout(10.0),
        TestServer(application(ear, token="")) as server,
        ClientSession() as session,
        asyncio.TaskGroup() as tasks,
    ):
        url = f"http://127.0.0.1:{server.port}/v1"

        async def status() -> tuple[int, bytes]:
            async with session.get(f"{url}/status") as answer:
                return answer.status, await answer.read()

        assert (await status())[0] == 503
        ear.known = slices
        asked = tasks.create_task(status())
        await begun.wait()
        async with session.put(f"{url}/nodes/a/inventory", data=encode(INVENTORY)):
            pass
        assert await asked == (200, encode(presence("a")))


async def test_all_who_ask_while_a_page_is_worked_out_are_told_of_what_is_so_after_they_asked() -> None:
    page, go, begun = Page(), asyncio.Event(), list[str]()

    def begin() -> Generator[None, None, Presence]:
        begun.append(str(len(begun)))
        return slices(begun[-1])

    def slices(name: str) -> Generator[None, None, Presence]:
        while not go.is_set():
            yield
        return presence(name)

    async with asyncio.timeout(10.0), asyncio.TaskGroup() as tasks:
        first = tasks.create_task(page.read(begin))
        await asyncio.sleep(0)
        others = [tasks.create_task(page.read(begin)) for _ in range(3)]
        await asyncio.sleep(0)
        go.set()
    assert await first == encode(presence("0"))
    assert [await one for one in others] == [encode(presence("1"))] * 3
    assert begun == ["0", "1"]
