"""Bytes between nodes: how much memory they take, how slow they may come, what becomes of who never ends."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web
from tests.sidecar.test_config import config
from tests.support.coordinator_stub import CoordinatorStub
from tests.support.fake_store import FakeStore
from tests.support.scripted_trainer import ScriptedTrainer, image
from tests.support.sidecar_node import MakeNode

from toprope.coordinator import serving
from toprope.coordinator.wire import RestoreShard
from toprope.sidecar.adapters.files import Pages
from toprope.sidecar.adapters.http import Copies, SidecarHttp
from toprope.sidecar.adapters.peers import HttpPeers
from toprope.sidecar.effects import Stage
from toprope.sidecar.memory import Memory
from toprope.sidecar.pace import Pace
from toprope.sidecar.ports import PeerError
from toprope.sidecar.staging import Stager
from toprope.sidecar.values import Way
from toprope.store.digest import digest
from toprope.trainer_hooks.link.wire import ALL

MIB = 1 << 20
STALL_S = 0.4


@dataclass(slots=True)
class Owner:
    """A sidecar's HTTP server, which serves one image from a thread of its own."""

    image: bytes
    url: str = ""
    began: int = 0

    def application(self, *, stall_timeout_s: float, use_deadline_s: float) -> web.Application:
        async def view(_path: Path) -> memoryview:
            return memoryview(self.image)

        async def nothing(_after: int, _wait_s: float) -> None:
            return None

        def begins(*_: object) -> None:
            self.began += 1

        copies = Copies(
            locate=lambda *_: [(Way(kind="here", tier="memory", path="/", node="a"), len(self.image))],
            view=view,
            began=begins,
            ended=lambda *_: None,
            acked=lambda *_: None,
        )
        return SidecarHttp(
            copies,
            inventory_after=nothing,
            adopted=tuple,
            token="",
            stall_timeout_s=stall_timeout_s,
            use_deadline_s=use_deadline_s,
        ).application()


@contextmanager
def owner(image: bytes, *, stall_timeout_s: float = 5.0, use_deadline_s: float = 30.0) -> Iterator[Owner]:
    served, ready, loop = Owner(image), threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        app = served.application(stall_timeout_s=stall_timeout_s, use_deadline_s=use_deadline_s)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        served.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert ready.wait(10.0)
        yield served
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@contextmanager
def peers(*, stall_timeout_s: float = 5.0, pace: Pace | None = None) -> Iterator[HttpPeers]:
    """Yield what receives; the session, which it needs for documents alone, is never used."""
    loop = asyncio.new_event_loop()

    async def session() -> aiohttp.ClientSession:
        return aiohttp.ClientSession()

    made = loop.run_until_complete(session())
    try:
        yield HttpPeers(made, node="b", token="", stall_timeout_s=stall_timeout_s, pace=pace)
    finally:
        loop.run_until_complete(made.close())
        loop.close()


def copy_url(url: str) -> str:
    return f"{url}/v1/copies/aa/1/0?tier=memory"


def high_water(pid: int) -> int:
    """Return the most bytes that a process has had in memory, shared ones too."""
    (kib,) = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(kib) * 1024


@pytest.mark.fault("B128")
@pytest.mark.parametrize("size", [3 * MIB, pytest.param(512 * MIB, marks=pytest.mark.long)])
def test_a_large_state_costs_its_holder_no_more_than_what_it_stores(
    size: int, nodes: MakeNode, stub: CoordinatorStub
) -> None:
    giver, holder = nodes("a"), nodes("b")
    giver.start()
    holder.start()
    stub.wait("a", lambda _: True, what="inventory")
    stub.place(("a", "b"))
    assert holder.process is not None
    before = high_water(holder.process.pid)
    with ScriptedTrainer(giver.socket) as trainer:
        trainer.payload = size
        trainer.begin(stub)
        trainer.announce()
        trainer.snapshot(1)
        assert stub.wait_copy("b", "peer", 1).bytes > size
    stored = sum(path.stat().st_size for path in holder.memory.rglob("*.data"))
    assert stored >= size
    assert high_water(holder.process.pid) - before <= stored + 64 * MIB


@contextmanager
def dripping(body: bytes, *, pieces: int, wait_s: float, stop_after: int | None = None) -> Iterator[str]:
    """Yield the url of a server that sends in pieces, with pauses; it may stop dead after some of them."""
    over = threading.Event()
    size = len(body) // pieces

    def serve(listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                with connection, contextlib.suppress(OSError):
                    connection.recv(65536)
                    connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode())
                    for number in range(pieces):
                        if number == stop_after:
                            over.wait(30.0)
                            break
                        connection.sendall(body[number * size : (number + 1) * size])
                        over.wait(wait_s)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1/copies/aa/1/0?tier=memory"
        finally:
            over.set()
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.fault("B129")
def test_who_sends_slowly_but_steadily_is_heard_to_the_end_and_who_stops_dead_is_given_up() -> None:
    body = bytes(range(250)) * 4
    into = memoryview(bytearray(len(body)))
    with peers(stall_timeout_s=STALL_S) as receiver:
        with dripping(body, pieces=10, wait_s=STALL_S / 3) as url:
            began_s = time.monotonic()
            receiver.receive(url, into)
            assert time.monotonic() - began_s > 2.5 * STALL_S
        assert bytes(into) == body
        with dripping(body, pieces=10, wait_s=0.0, stop_after=4) as url:
            began_s = time.monotonic()
            with pytest.raises(PeerError, match="timed out"):
                receiver.receive(url, memoryview(bytearray(len(body))))
            assert time.monotonic() - began_s < 3 * STALL_S + 2.0


@pytest.mark.fault("B113")
@pytest.mark.parametrize("stall_s", [STALL_S, pytest.param(config().stall_timeout_s, marks=pytest.mark.long)])
@pytest.mark.parametrize("after_mib", [1, 5])
def test_a_peer_that_stalls_after_a_mebibyte_or_some_is_given_up_once_and_the_next_one_has_it(
    memory_dir: Path, monkeypatch: pytest.MonkeyPatch, stall_s: float, after_mib: int
) -> None:
    asked: list[int | None] = []
    connect = http.client.HTTPConnection.connect

    def counted(self: http.client.HTTPConnection) -> None:
        asked.append(self.port)
        connect(self)

    monkeypatch.setattr(http.client.HTTPConnection, "connect", counted)
    body = image(attempt=1, attempt_uid="1a" * 16, step=1, rank=0, world=1, payload=8 * MIB, job_uid="0b" * 16)
    shard = RestoreShard(rank=0, bytes=len(body), digest=digest(body), sources=())
    memory = Memory(memory_dir / "job", Pages(), limit_bytes=None)
    memory.make_directories()
    with (
        dripping(body, pieces=len(body) // MIB, wait_s=0.0, stop_after=after_mib) as stalls,
        dripping(body, pieces=1, wait_s=0.0) as other,
        peers(stall_timeout_s=stall_s) as receiver,
    ):
        ways = [Way(kind="node", tier="peer", node=url[-5:], url=url.partition("/v1")[0]) for url in (stalls, other)]
        stager = Stager(memory=memory, peers=receiver, objects=FakeStore(), doubt=lambda *_: None)
        request = Stage(
            attempt_uid="2b" * 16,
            source_attempt_uid="1a" * 16,
            step=1,
            shard=shard,
            ways=tuple(ways),
            tensors=frozenset({ALL}),
            part=1,
        )
        began_s = time.monotonic()
        staged = stager.stage(request).shard
        took_s = time.monotonic() - began_s
    assert staged.node == ways[1].node
    assert Path(staged.path).read_bytes()[: staged.bytes] == body
    assert asked == [urlsplit(url).port for url in (stalls, other)], "each is asked once"
    assert took_s >= stall_s
    if stall_s != STALL_S:
        assert took_s <= 8.0


def test_a_reader_that_is_slower_than_a_slot_may_be_in_use_goes_on_where_it_was_cut_off() -> None:
    body = bytes(range(256)) * (48 * MIB // 256)
    pace = Pace(24.0 * MIB)
    with owner(body, use_deadline_s=-1.6) as served, peers(pace=pace) as receiver:  # 0.8 s in all
        into = memoryview(bytearray(len(body)))
        receiver.receive(copy_url(served.url), into, begin=0, paced=True)
        assert into == body
        assert served.began > 1, "it was cut off at least once"


SIZES = (2**16 - 1, 2**16, 2**16 + 1, 4 * MIB + 1, 20 * MIB)


@pytest.mark.fault("B130")
@pytest.mark.parametrize("times", [2, pytest.param(100, marks=pytest.mark.long)])
def test_a_whole_body_is_whole_however_slowly_it_is_read(times: int) -> None:
    for size in SIZES:
        body = bytes(range(251)) * (size // 251) + bytes(size % 251)
        naps = iter(range(1_000_000))
        pace = Pace(1e12, sleep=lambda _, naps=naps: time.sleep(0.002 if next(naps) % 40 == 0 else 0))  # type: ignore[misc]
        with owner(body) as served, peers(pace=pace) as receiver:
            for number in range(times):
                into = memoryview(bytearray(size))
                receiver.receive(copy_url(served.url), into, paced=number % 2 == 0)
                assert into == body
            assert served.began == times, "nothing had to be asked for again"


def send(url: str, head: str, body: bytes = b"") -> socket.socket:
    parts = urlsplit(url)
    connection = socket.create_connection((str(parts.hostname), parts.port), timeout=10.0)
    connection.sendall(head.replace("\n", "\r\n").encode() + body)
    return connection


def status_of(connection: socket.socket) -> int:
    with connection.makefile("rb") as answer:
        return int(answer.readline().split()[1])


ACK = "POST /v1/copies/aa/1/0/ack HTTP/1.1\nHost: a\n"


@pytest.mark.fault("B133")
def test_who_sends_for_ever_or_never_is_cut_and_others_are_served_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "BODY_S", 1.0)
    body = bytes(range(256)) * 4096
    with owner(body) as served, peers() as receiver, contextlib.ExitStack() as open_ones:
        idle = [open_ones.enter_context(send(served.url, f"{ACK}Content-Length: 40\n\n")) for _ in range(200)]
        began_s = time.monotonic()
        into = memoryview(bytearray(len(body)))
        receiver.receive(copy_url(served.url), into)
        assert into == body
        assert time.monotonic() - began_s < 0.9, "served while they idle"
        endless = open_ones.enter_context(send(served.url, f"{ACK}Transfer-Encoding: chunked\n\n"))
        before = high_water(os.getpid())
        for _ in range(1024):
            endless.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")
        assert status_of(endless) == 413, "it is drained, so that it hears why"
        assert high_water(os.getpid()) - before < 16 * MIB, "64 MiB were sent"
        assert {status_of(connection) for connection in idle} == {408}


def test_a_body_that_is_too_long_is_refused_by_what_it_says_of_itself() -> None:
    with owner(b"") as served:
        parts = urlsplit(served.url)
        connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=10.0)
        connection.request("POST", "/v1/copies/aa/1/0/ack", body=b"x" * (MIB + 1))
        assert connection.getresponse().status == 413
        connection.close()
