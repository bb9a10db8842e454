"""A sidecar finds the coordinator that leads among those it knows: some stand by, are frozen, or are gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.support.services import free_port

from toprope.coordinator.wire import LEADER_HEADER, Cadence, Desired, OpenAnswer, OpenRequest, encode
from toprope.sidecar.adapters import coordinator
from toprope.sidecar.adapters.coordinator import HttpCoordinator
from toprope.sidecar.ports import CoordinatorError

DESIRED = Desired(
    job="job",
    job_uid="0b" * 16,
    term=1,
    version=1,
    url="",
    cadence=Cadence(from_step=0, every=1, local_every=1, object_every=1),
)


@dataclass
class Coordinators:
    """Servers by name, where each was started, and who was asked, in order."""

    asked: list[str] = field(default_factory=list)
    urls: dict[str, str] = field(default_factory=dict)

    async def start(self, stack: AsyncExitStack, name: str, *, leader: str | None = None, frozen: bool = False) -> None:
        """Start one: it leads, or stands by and says that ``leader`` does (empty: it doesn't know), or is frozen."""

        async def answer(_: web.Request) -> web.Response:
            self.asked.append(name)
            if frozen:
                await asyncio.sleep(60.0)
            if leader is None:
                return web.Response(body=encode(DESIRED), content_type="application/json")
            raise web.HTTPConflict(text="stands by\n", headers={LEADER_HEADER: self.urls.get(leader, leader)})

        async def opened(request: web.Request) -> web.Response:
            await answer(request)
            return web.Response(body=encode(OpenAnswer(code="busy")), content_type="application/json")

        async def health(request: web.Request) -> web.Response:
            return await answer(request) if frozen else web.Response()

        app = web.Application()
        app.router.add_get("/v1/desired", answer)
        app.router.add_post("/v1/attempts", opened)
        app.router.add_get("/healthz", health)
        server = await stack.enter_async_context(TestServer(app))
        self.urls[name] = f"http://127.0.0.1:{server.port}"


@asynccontextmanager
async def asking(servers: Coordinators, known: Sequence[str], *, current: str = "") -> AsyncIterator[HttpCoordinator]:
    """Yield the adapter of a sidecar that was told these coordinators, and by its document the ``current`` one."""
    urls = tuple(servers.urls.get(name, name) for name in known)
    async with aiohttp.ClientSession() as session:
        yield HttpCoordinator(
            session, node="a", urls=urls, token="", current=lambda: servers.urls.get(current, current)
        )


async def test_one_that_stands_by_points_to_the_leader_that_nobody_was_told_of() -> None:
    servers = Coordinators()
    async with AsyncExitStack() as stack:
        await servers.start(stack, "leader")
        await servers.start(stack, "standby", leader="leader")
        async with asking(servers, ["standby"]) as port:
            assert await port.get_desired(newer_than=None) == DESIRED
    assert servers.asked == ["standby", "leader"]


async def test_the_one_of_the_document_is_asked_first_and_the_next_when_it_is_gone() -> None:
    servers = Coordinators()
    async with AsyncExitStack() as stack:
        await servers.start(stack, "a")
        await servers.start(stack, "b")
        async with asking(servers, ["a"], current="b") as port:
            await port.get_desired(newer_than=None)
        async with asking(servers, ["a"], current=f"http://127.0.0.1:{free_port()}") as port:
            await port.get_desired(newer_than=None)
    assert servers.asked == ["b", "a"]


async def test_one_that_is_frozen_is_asked_last_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "REQUEST_TIMEOUT_S", 0.2)
    servers = Coordinators()
    async with AsyncExitStack() as stack:
        await servers.start(stack, "frozen", frozen=True)
        await servers.start(stack, "b")
        async with asking(servers, ["b"], current="frozen") as port:
            for _ in range(3):
                assert await port.get_desired(newer_than=None) == DESIRED
    assert servers.asked == ["frozen", "b", "b", "b"]


async def test_a_launch_does_not_wait_for_one_that_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "REQUEST_TIMEOUT_S", 0.2)
    servers = Coordinators()
    async with AsyncExitStack() as stack:
        await servers.start(stack, "frozen", frozen=True)
        await servers.start(stack, "b")
        request = OpenRequest(job="job", launch_id="1a" * 16, round=0, world=(), spec={}, versions={})
        async with asyncio.timeout(10.0), asking(servers, ["b"], current="frozen") as port:
            assert (await port.open_attempt(request)).code == "busy"
    assert servers.asked == ["frozen", "b"]


@pytest.mark.parametrize("leader", ["", "standby", "ftp://x", "no url"])
async def test_those_that_stand_by_and_know_no_leader_are_asked_once_each(leader: str) -> None:
    servers = Coordinators()
    async with AsyncExitStack() as stack:
        await servers.start(stack, "standby", leader=leader)
        async with asking(servers, ["standby"]) as port:
            with pytest.raises(CoordinatorError, match="answered 409: stands by"):
                await port.get_desired(newer_than=None)
    assert servers.asked == ["standby"]
