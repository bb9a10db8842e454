"""The runtime over real adapters: a directory store, HTTP, mosquitto; and whole processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import aiohttp
import aiomqtt
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.support.reigns import JOB, SPEC, FakeNode
from tests.support.services import Process, broker, free_port, wait_ready, wait_until

from toprope.__main__ import main
from toprope.chaos.live.ask import get
from toprope.chaos.live.broker import start_broker
from toprope.chaos.live.processes import LiveError
from toprope.coordinator.wire import (
    LEADER_HEADER,
    MAX_DESIRED_BYTES,
    Desired,
    Member,
    OpenAnswer,
    OpenRequest,
    Presence,
    decode,
    encode,
)
from toprope.store.log.chain import read_log
from toprope.store.objects.opening import open_store

PATIENCE_S = 20.0


def words(directory: Path, *arguments: str, job: str = JOB) -> list[str]:
    return ["coordinator", "--job", job, "--store", str(directory / "store"), *arguments]


class Coordinator:
    """A coordinator process."""

    def __init__(self, directory: Path, *arguments: str, name: str = "coordinator") -> None:
        ready = directory / f"{name}.ready"
        ready.unlink(missing_ok=True)
        line = [sys.executable, "-m", "toprope", *words(directory, "--ready-file", str(ready), *arguments)]
        self.process = Process(name, line, log=directory / f"{name}.log")
        try:
            self.ready = wait_ready(self.process, ready)
        except LiveError:
            self.process.stop()
            raise
        self.url: str = self.ready["url"]


class Start(Protocol):
    """Starts a coordinator process that serves."""

    def __call__(self, *arguments: str, name: str = "coordinator") -> Coordinator: ...


def only_line(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line that was said on stderr."""
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.fixture
def mosquitto(tmp_path: Path) -> Iterator[int]:
    """Return the port of a broker that runs."""
    with broker(tmp_path) as port:
        yield port


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Start]:
    """Start coordinators that are gone after the test."""
    processes: list[Process] = []

    def start(*arguments: str, name: str = "coordinator") -> Coordinator:
        one = Coordinator(tmp_path, *arguments, name=name)
        processes.append(one.process)
        return one

    yield start
    for process in processes:
        if process.status() is None:
            process.stop()


# --- wrong use


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("--broker", "nowhere"), "--broker 'nowhere' is not usable: give HOST:PORT"),
        (("--every", "0"), "--every 0"),
        (("--every", "4", "--local-every", "6"), "--local-every 6"),
        (("--listen", "0.0.0.0:0"), "--token-file"),
        (("--verdict-deadline", "301"), "--verdict-deadline 301 is not usable: give more than 5 seconds"),
        (("--verdict-deadline", "5"), "--verdict-deadline 5 is not usable"),
        (("--verdict-deadline", "nan"), "--verdict-deadline nan is not usable"),
        (("--broker", "127.0.0.1:1", "--embedded-broker"), "not both"),
        (("--token-file", "/nonexistent"), "can't be read"),
        (("--ready-file", "/nowhere/ready"), "--ready-file /nowhere/ready: its directory does not exist"),
        (("--every", "x"), "--every"),
        (("--what",), "--what"),
    ],
)
def test_wrong_use_gets_one_line_and_exit_64_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], what: str
) -> None:
    assert main(words(tmp_path, *arguments)) == 64
    assert what in only_line(capsys)
    assert list(tmp_path.iterdir()) == []


def test_an_odd_job_name_is_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(tmp_path, job="../up")) == 64
    assert "job '../up' is not usable" in only_line(capsys)


def test_a_store_that_cant_be_made_is_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "store").write_text("a file")
    assert main(words(tmp_path)) == 64
    assert "store" in only_line(capsys)


def test_a_port_in_use_is_wrong_use_and_elects_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], started: Start
) -> None:
    one = started()
    other = tmp_path / "other"
    other.mkdir()
    port = one.url.rpartition(":")[2]
    assert main(words(other, "--listen", f"127.0.0.1:{port}")) == 64
    assert "in use" in only_line(capsys)
    assert read_log(open_store(str(other / "store")), JOB).n == 0


# --- processes


def health(url: str) -> dict[str, object]:
    """Return what a coordinator says of itself; nothing while it does not answer."""
    said: dict[str, object] = json.loads(get(url, "/healthz") or b"{}")
    return said


def roles(urls: list[str]) -> set[object]:
    return {health(url).get("role") for url in urls}


def gauges(url: str) -> dict[str, str]:
    """Return what a coordinator gives of these of its metrics."""
    given = (line.split() for line in (get(url, "/metrics") or b"").decode().splitlines() if not line.startswith("#"))
    return {name: value for name, value in given if name in {"toprope_coordinator_leading", "toprope_nodes_alive"}}


async def refused(url: str) -> tuple[int, str | None]:
    """Return the status of the answer to a question that only a leader answers, and where that is said to be."""
    async with aiohttp.ClientSession() as client, client.get(f"{url}/v1/desired") as answer:
        return answer.status, answer.headers.get(LEADER_HEADER)


def test_of_two_coordinators_one_stands_by_says_who_leads_and_leads_once_that_one_is_killed(
    capsys: pytest.CaptureFixture[str], started: Start
) -> None:
    port = free_port()
    one = started("--listen", f"127.0.0.1:{port}", name="one")
    two = started(name="two")
    assert asyncio.run(refused(two.url)) == (409, one.url)
    assert (health(two.url)["role"], health(two.url)["leader"]) == ("follower", one.url)
    leads = {"toprope_coordinator_leading": "1.0", "toprope_nodes_alive": "0.0"}
    assert (gauges(one.url), gauges(two.url)) == (leads, {"toprope_coordinator_leading": "0.0"})

    wait_until(lambda: two.url in str(get(one.url, "/v1/status")), what="the leader knows of it", timeout_s=PATIENCE_S)
    assert main(["status", "--coordinator", two.url]) == 0
    shown = capsys.readouterr().out
    assert f"term 1, broker none, {one.url}" in shown
    assert f"standby: {two.url}" in shown

    one.process.kill()
    wait_until(lambda: health(two.url).get("role") == "leader", what="the other one leads", timeout_s=15)
    assert main(["status", "--coordinator", f"{one.url},{two.url}"]) == 0
    assert "term 2" in capsys.readouterr().out
    assert gauges(two.url) == leads
    again = started("--listen", f"127.0.0.1:{port}", name="again")
    assert asyncio.run(refused(again.url)) == (409, two.url)
    assert health(two.url)["term"] == 2


def test_a_coordinator_told_to_end_ends_with_status_0(started: Start) -> None:
    one = started("--embedded-broker")
    assert one.process.stop() == 0


async def test_a_token_is_asked_for_everywhere_but_for_health(tmp_path: Path, started: Start) -> None:
    token = tmp_path / "token"
    token.write_text("a secret of some length")
    one = await asyncio.to_thread(started, "--token-file", str(token))
    async with aiohttp.ClientSession() as client:
        for path, status in (("/v1/desired", 401), ("/v1/status", 401), ("/metrics", 401), ("/healthz", 200)):
            async with client.get(one.url + path) as answer:
                assert answer.status == status
        headers = {"Authorization": "Bearer a secret of some length"}
        for standby, shown in ({}, "http://mine"), (headers, "http://ours"):
            async with client.get(f"{one.url}/healthz", params={"standby": shown}, headers=standby) as answer:
                assert answer.status == 200
        async with client.get(f"{one.url}/v1/status", headers=headers) as answer:
            assert (await answer.json())["standbys"] == ["http://ours"], "who shows no token is not shown either"
        async with client.get(f"{one.url}/v1/desired", headers=headers) as answer:
            assert answer.status == 200


async def test_documents_that_are_none_are_refused_and_change_nothing(started: Start) -> None:
    one = await asyncio.to_thread(started)
    async with aiohttp.ClientSession() as client:
        async with client.put(f"{one.url}/v1/nodes/a/inventory", data=b"{") as answer:
            assert answer.status == 400
        async with client.put(f"{one.url}/v1/nodes/a/inventory", data=b"x" * 300_000) as answer:
            assert answer.status == 400
        async with client.post(f"{one.url}/v1/attempts", data=b"[]") as answer:
            assert answer.status == 400
        node = FakeNode(name="b", job_uid="00")
        async with client.put(f"{one.url}/v1/nodes/a/inventory", data=encode(node.say())) as answer:
            assert answer.status == 400
        async with client.get(f"{one.url}/v1/status") as answer:
            assert (await answer.json())["nodes"] == []


# --- with nodes


@asynccontextmanager
async def served(node: FakeNode) -> AsyncIterator[None]:
    """Serve a node's inventory as its sidecar would."""

    async def get(_request: web.Request) -> web.Response:
        return web.Response(body=encode(node.inventory()), content_type="application/json")

    app = web.Application()
    app.router.add_get("/v1/inventory", get)
    async with TestServer(app) as server:
        node.url = f"http://127.0.0.1:{server.port}"
        yield


async def desired_at(client: aiohttp.ClientSession, url: str, after: str = "") -> Desired:
    query = f"?after={after}&wait_s=15" if after else ""
    async with client.get(f"{url}/v1/desired{query}") as answer:
        assert answer.status == 200, await answer.text()
        return decode(await answer.read(), Desired, limit=MAX_DESIRED_BYTES)


async def put(client: aiohttp.ClientSession, url: str, node: FakeNode) -> None:
    async with client.put(f"{url}/v1/nodes/{node.name}/inventory", data=encode(node.say())) as answer:
        assert answer.status == 200


async def ask(client: aiohttp.ClientSession, url: str, node: FakeNode) -> OpenAnswer:
    world = (Member(rank=0, node=node.name, boot_id=node.boot_id),)
    request = OpenRequest(job=JOB, launch_id="1a" * 16, round=0, world=world, spec=SPEC, versions={"python": "3.11"})
    async with client.post(f"{url}/v1/attempts", data=encode(request)) as answer:
        return decode(await answer.read(), OpenAnswer, limit=MAX_DESIRED_BYTES)


async def test_an_attempt_is_opened_by_http_alone_and_survives_a_killed_coordinator(
    tmp_path: Path, started: Start
) -> None:
    port = str(free_port())
    one = await asyncio.to_thread(started, "--listen", f"127.0.0.1:{port}")
    async with aiohttp.ClientSession() as client:
        first = await desired_at(client, one.url)
        node = FakeNode(name="a", job_uid=first.job_uid)
        async with served(node):
            await put(client, one.url, node)
            answer = await ask(client, one.url, node)
            assert answer.attempt is not None
            assert answer.attempt.number == 1
            later = await desired_at(client, one.url, after=f"{first.term}.{first.version}")
            assert later.attempt == answer.attempt

            killed = one.process.kill()
            assert killed.status == -signal.SIGKILL
            two = await asyncio.to_thread(started, "--listen", f"127.0.0.1:{port}", name="again")
            assert two.url == one.url
            await put(client, two.url, node)
            again = await ask(client, two.url, node)
            assert again.attempt == answer.attempt
    state = await asyncio.to_thread(lambda: read_log(open_store(str(tmp_path / "store")), JOB))
    assert (state.term, state.attempt_number) == (2, 1)


async def opened_by_broker(one: Coordinator) -> None:
    """Let a node be heard by broker alone, and an attempt of it be seen there."""
    host, _, port = str(one.ready["broker"]).rpartition(":")
    async with aiomqtt.Client(host, int(port), identifier="test") as client, aiohttp.ClientSession() as http:
        await client.subscribe(f"toprope/{JOB}/desired", qos=1)
        first = await next_desired(client)
        node = FakeNode(name="a", job_uid=first.job_uid)
        async with served(node), asyncio.timeout(PATIENCE_S):
            topic = f"toprope/{JOB}/nodes/a"
            presence = Presence(node="a", boot_id=node.boot_id, incarnation=node.incarnation, alive=True)
            await client.publish(f"{topic}/inventory", b"no document", qos=1, retain=True)
            await client.publish(f"{topic}/inventory", encode(node.say()), qos=1, retain=True)
            await client.publish(f"{topic}/presence", encode(presence), qos=1, retain=True)
            while (answer := await ask(http, one.url, node)).code == "unavailable":  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.05)
            assert answer.attempt is not None
            while (await next_desired(client)).attempt is None:
                pass


async def next_desired(client: aiomqtt.Client) -> Desired:
    async with asyncio.timeout(PATIENCE_S):
        message = await anext(client.messages)
    return decode(bytes(message.payload), Desired, limit=MAX_DESIRED_BYTES)


async def test_documents_travel_by_mosquitto_and_are_published_anew_by_the_next_term(
    mosquitto: int, started: Start
) -> None:
    arguments = ("--broker", f"127.0.0.1:{mosquitto}")
    before = await asyncio.to_thread(started, *arguments)
    await opened_by_broker(before)
    await asyncio.to_thread(started, *arguments, name="next")
    before.process.kill()
    async with aiomqtt.Client("127.0.0.1", mosquitto, identifier="test") as client:
        await client.subscribe(f"toprope/{JOB}/desired", qos=1)
        while (desired := await next_desired(client)).term != 2:
            pass
    assert desired.attempt is not None


async def test_documents_travel_by_the_embedded_broker(started: Start) -> None:
    await opened_by_broker(await asyncio.to_thread(started, "--embedded-broker"))


async def test_a_document_of_a_quarter_mebibyte_passes_the_embedded_broker(started: Start) -> None:
    one = await asyncio.to_thread(started, "--embedded-broker")
    host, _, port = str(one.ready["broker"]).rpartition(":")
    async with aiomqtt.Client(host, int(port), identifier="test") as client:
        await client.subscribe("toprope/other/desired", qos=1)
        await client.publish("toprope/other/desired", b"x" * (256 * 1024), qos=1)
        async with asyncio.timeout(PATIENCE_S):
            message = await anext(client.messages)
    assert len(message.payload) == 256 * 1024


def test_a_broker_that_dies_is_found_again(tmp_path: Path, started: Start) -> None:
    port = free_port()
    first = start_broker(port=port, directory=tmp_path, log=tmp_path / "broker.log")
    one = started("--broker", f"127.0.0.1:{port}")

    def state() -> str:
        return str(json.loads(get(one.url, "/v1/status") or b"{}").get("broker"))

    wait_until(lambda: state() == "connected", what="connected", timeout_s=PATIENCE_S)
    assert main(["status", "--job", JOB, "--broker", f"127.0.0.1:{port}"]) == 0
    first.kill()
    wait_until(lambda: state() == "away", what="the broker is missed", timeout_s=PATIENCE_S)
    second = start_broker(port=port, directory=tmp_path, log=tmp_path / "broker.log")
    try:
        wait_until(lambda: state() == "connected", what="connected again", timeout_s=PATIENCE_S)
        assert asyncio.run(retained(port)).term == 1
    finally:
        second.stop()


async def retained(port: int) -> Desired:
    async with aiomqtt.Client("127.0.0.1", port, identifier="test") as client:
        await client.subscribe(f"toprope/{JOB}/desired", qos=1)
        return await next_desired(client)


# --- ckpt status


def test_status_of_a_coordinator_that_is_away_is_one_line_and_exit_4(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--coordinator", f"http://127.0.0.1:{free_port()}"]) == 4
    assert "no coordinator answers" in only_line(capsys)


def test_status_says_what_there_is_and_gives_it_as_data(capsys: pytest.CaptureFixture[str], started: Start) -> None:
    one = started()
    assert main(["status", "--coordinator", one.url]) == 0
    assert "no attempt yet" in capsys.readouterr().out
    assert main(["status", "--coordinator", one.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["job"] == JOB
    assert main(["status", "--coordinator", one.url, "--job", "other"]) == 64
    assert main(["status"]) == 64


# --- ckpt up


def test_up_starts_all_restarts_what_dies_and_stops_all(
    tmp_path: Path, memory_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ready = tmp_path / "up.ready"
    line = ["up", "--job", JOB, "--store", str(tmp_path / "store"), "--node", "a"]
    line += ["--dir", str(tmp_path / "up"), "--memory-dir", str(memory_dir), "--ready-file", str(ready)]
    process = Process("up", [sys.executable, "-m", "toprope", *line], log=tmp_path / "up.log")
    try:
        content = wait_ready(process, ready, timeout_s=60)
        assert f"export CKPT_SOCKET={memory_dir}/sidecar.sock" in process.log.read_text()

        def alive() -> list[str]:
            views = [json.loads(get(url, "/v1/status") or b'{"nodes": []}') for url in content["urls"]]
            return [node["node"] for view in views for node in view["nodes"] if node["alive"]]

        wait_until(lambda: alive() == ["a"], what="node a is heard", timeout_s=30)
        assert main(line) == 64
        assert f"(pid {content['pid']}) runs already in {memory_dir}" in only_line(capsys)
        elsewhere = [*line, "--dir", str(tmp_path / "elsewhere")]
        assert main(elsewhere) == 64, "another --dir must not fence off the coordinator of a job that runs"
        assert f"runs already in {memory_dir}" in only_line(capsys)
        names = dict(zip(content["urls"], ("coordinator", "coordinator-2"), strict=True))
        (leader,) = (name for url, name in names.items() if health(url).get("role") == "leader")
        assert names[content["url"]] == leader
        os.kill(content["pids"][leader], signal.SIGKILL)
        wait_until(lambda: "starting it again" in process.log.read_text(), what="it is noticed", timeout_s=30)
        wait_until(lambda: alive() == ["a"], what="the next coordinator hears node a", timeout_s=30)
        assert main(["status", "--job", JOB, "--dir", str(tmp_path / "up")]) == 0
        assert "term 2" in capsys.readouterr().out
        wait_until(lambda: roles(content["urls"]) == {"leader", "follower"}, what="one stands by again", timeout_s=30)
    finally:
        assert process.stop(timeout_s=30) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in content["pids"].values())
