"""``ckpt declare-dead``, and what a coordinator asks of nodes about attempts that were opened without the log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.coordinator.test_changes import TOKEN, reigning
from tests.sidecar.test_adoptions import proposal
from tests.support.reigns import FakeNode
from tests.support.stores import small_store

from toprope.__main__ import main
from toprope.coordinator.adapters.nodes import HttpNodes, session
from toprope.coordinator.cli_declare import declare
from toprope.coordinator.performer import Coordinator
from toprope.coordinator.wire import LEADER_HEADER, Adoptions, encode
from toprope.store.errors import UnavailableError, UsageError
from toprope.store.objects.directory import DirectoryStore


@asynccontextmanager
async def coordinator(*, status: int, leader: str | None = None) -> AsyncIterator[tuple[str, list[str]]]:
    """Yield the url of what answers like a coordinator, and what it is asked."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(f"{request.method} {request.path}")
        return web.Response(status=status, headers={} if leader is None else {LEADER_HEADER: leader})

    app = web.Application()
    app.add_routes([web.put("/v1/nodes/{node}/dead", answer)])
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/"), asked


async def told(*urls: str) -> None:
    await asyncio.to_thread(declare, urls, "n1", token="")


async def test_the_leader_is_told_whichever_coordinator_is_asked() -> None:
    async with coordinator(status=204) as (leads, heard), coordinator(status=409, leader=leads) as (stands_by, _):
        await told(stands_by)
        assert heard == ["PUT /v1/nodes/n1/dead"]


async def test_one_that_is_away_is_passed_over() -> None:
    async with coordinator(status=204) as (leads, heard):
        await told("http://127.0.0.1:1", leads)
        assert len(heard) == 1


async def test_when_none_that_leads_answers_each_says_why() -> None:
    async with coordinator(status=409, leader="") as (stands_by, _):
        with pytest.raises(
            UnavailableError, match=r"no coordinator answers at http://127.0.0.1:1 .*; the coordinator at .* stands by"
        ):
            await told("http://127.0.0.1:1", stands_by)


async def test_without_the_token_it_is_wrong_use() -> None:
    async with coordinator(status=401) as (url, _):
        with pytest.raises(UsageError, match="--token-file"):
            await told(url)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return the store of a job that was placed on n0 and n1."""
    small_store(DirectoryStore(tmp_path), steps=(10,))
    (tmp_path / "token").write_text(TOKEN)
    return tmp_path


async def test_a_coordinator_takes_a_node_for_dead_that_it_knows_and_names_those_for_another(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with reigning(root, token=TOKEN) as live:
        core, reign = live.core, live.coordinator.reign
        assert core is not None
        assert reign is not None
        live.coordinator.heard(FakeNode(name="spare", job_uid=core.log_view.state.job_uid).say())
        words = ("--coordinator", live.url, "--token-file", root / "token")
        assert await live.ckpt("declare-dead", "n2", *words) == 64
        assert "there is no node n2 in this job; there are: n0, n1, spare" in capsys.readouterr().err
        assert core.outage.dead == {}
        assert await live.ckpt("declare-dead", "n1", *words) == 0
        assert await live.ckpt("declare-dead", "spare", *words) == 0
        assert core.outage.dead == {"n1": f"{1:032x}"}, "the attempt is placed on no spare"
        capsys.readouterr()
        reign._over = True
        assert await live.ckpt("declare-dead", "n0", *words) == 4
        told = capsys.readouterr()
        assert ("leads no more; ask again" in told.err, told.out) == (True, "")
        assert "n0" not in core.outage.dead
        live.coordinator.reign = Coordinator(reign.config, metrics=reign.metrics)
        assert await live.ckpt("declare-dead", "n0", *words) == 4
        assert "is still reading the log" in capsys.readouterr().err
        live.coordinator.reign = reign


def test_a_name_that_is_none_and_no_coordinator_are_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["declare-dead", "../x", "--coordinator", "http://127.0.0.1:1"]) == 64
    assert main(["declare-dead", "n1", "--coordinator", " "]) == 64
    assert main(["declare-dead", "n1", "--coordinator", "http://127.0.0.1:1"]) == 4
    assert "no coordinator answers at http://127.0.0.1:1" in capsys.readouterr().err


async def test_a_node_is_asked_what_it_adopted_and_none_is_believed_that_says_no_such_thing() -> None:
    body = encode(Adoptions(attempts=(proposal(),)))

    async def answer(_request: web.Request) -> web.Response:
        return web.Response(body=body)

    app = web.Application()
    app.add_routes([web.get("/v1/adopted", answer)])
    async with TestServer(app) as server, session(token="", timeout_s=2.0) as client:
        url = str(server.make_url("")).rstrip("/")
        assert await HttpNodes(client).adopted(url) == (proposal(),)
        body = b'{"attempts": 3}'
        assert await HttpNodes(client).adopted(url) is None
        assert await HttpNodes(client).adopted("http://127.0.0.1:1") is None
