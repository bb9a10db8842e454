"""A command asks the coordinator that leads: past those that are away, by way of those that stand by, once."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from toprope.coordinator.leader import Answer, NobodyThereError, StandsByError, ask_leader
from toprope.coordinator.wire import LEADER_HEADER
from toprope.store.errors import UnavailableError, UsageError

AWAY = "http://127.0.0.1:1"


class Coordinator:
    """Answers each request alike; without a status it takes it and hangs up. ``heard``: what it was asked."""

    def __init__(self, status: int | None = 200, leader: str | None = None) -> None:
        self.status, self.leader = status, leader
        self.url = ""
        self.heard: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        """Note what is asked."""
        self.heard.append(f"{request.method} {await request.text()}")
        if self.status is None:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        headers = {} if self.leader is None else {LEADER_HEADER: self.leader}
        return web.Response(status=self.status, text=f"answer of {self.url}", headers=headers)


@asynccontextmanager
async def serving(*coordinators: Coordinator) -> AsyncIterator[None]:
    servers = []
    try:
        for one in coordinators:
            app = web.Application()
            app.add_routes([web.route("*", "/v1/x", one.answer)])
            servers.append(TestServer(app))
            await servers[-1].start_server()
            one.url = str(servers[-1].make_url("")).rstrip("/")
        yield
    finally:
        for server in servers:
            await server.close()


async def asked(*urls: str, method: str = "GET") -> Answer:
    return await asyncio.to_thread(ask_leader, urls, "/v1/x", method=method, body=b"words", token="")


async def test_the_one_that_leads_is_asked_once_whoever_names_it() -> None:
    leads, stands_by = Coordinator(), Coordinator(409)
    async with serving(leads, stands_by):
        stands_by.leader = leads.url
        answer = await asked(AWAY, stands_by.url, leads.url, method="POST")
        assert (answer.url, answer.status, answer.text) == (leads.url, 200, f"answer of {leads.url}")
        assert (leads.heard, stands_by.heard) == (["POST words"], ["POST words"])


async def test_those_that_stand_by_and_name_each_other_are_asked_once_each() -> None:
    one, other = Coordinator(409), Coordinator(409)
    async with serving(one, other):
        one.leader, other.leader = other.url, one.url
        with pytest.raises(StandsByError, match=f"the coordinator at {one.url} stands by; .*{other.url} stands by"):
            await asked(one.url)
        assert (len(one.heard), len(other.heard)) == (1, 1)


async def test_where_none_is_each_is_named() -> None:
    with pytest.raises(NobodyThereError, match=f"no coordinator answers at {AWAY} ") as error:
        await asked(AWAY)
    assert not isinstance(error.value, StandsByError)


@pytest.mark.parametrize("method", ["GET", "PUT", "POST"])
async def test_what_may_have_been_done_once_is_asked_of_nobody_else(method: str) -> None:
    hangs_up, leads = Coordinator(None), Coordinator()
    async with serving(hangs_up, leads):
        if method == "POST":
            with pytest.raises(UnavailableError, match="took the request") as error:
                await asked(hangs_up.url, leads.url, method=method)
            assert not isinstance(error.value, NobodyThereError)
            assert leads.heard == []
        else:
            assert (await asked(hangs_up.url, leads.url, method=method)).url == leads.url


async def test_one_that_takes_the_request_and_says_nothing_is_somebody() -> None:
    hangs_up = Coordinator(None)
    async with serving(hangs_up):
        with pytest.raises(UnavailableError, match="took the request") as error:
            await asked(hangs_up.url, AWAY)
        assert not isinstance(error.value, NobodyThereError)


def test_one_that_is_silent_is_waited_for_as_long_as_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began_s = time.monotonic()
        with pytest.raises(UnavailableError, match="does not answer"):
            ask_leader([f"http://127.0.0.1:{silent.getsockname()[1]}"], "/v1/x", token="", timeout_s=0.02)
        assert time.monotonic() - began_s < 5, "not the ten seconds that a command has"


async def test_a_refusal_is_an_answer_and_a_missing_token_is_wrong_use() -> None:
    refuses, wants_token = Coordinator(409, leader=None), Coordinator(401)
    async with serving(refuses, wants_token):
        assert (await asked(refuses.url)).status == 409
        with pytest.raises(UsageError, match="--token-file"):
            await asked(wants_token.url)


@pytest.mark.parametrize("url", ["nothing", "https://a:1", "http://"])
def test_what_is_no_url_is_wrong_use(url: str) -> None:
    with pytest.raises(UsageError, match="is not a url such as"):
        ask_leader([url], "/v1/x", token="")
